package local

import (
	"strings"
	"syscall"
	"testing"
)

func TestInspect(t *testing.T) {
	if r := Inspect(); !r.Available || r.BootID == "" || r.Network == "" || r.Processes == "" || r.Who == "" {
		t.Errorf("%+v", r)
	}
	k := &stern{errno: syscall.EPERM, shut: true}
	if r := inspect(k); r.Available || !strings.Contains(r.Problem, "a filter of system calls") {
		t.Errorf("%+v", r)
	}
	for mode, says := range map[string]string{"": "any process", "0": "any process", "1": "one decode engine", "2": "CAP_SYS_PTRACE", "3": "nobody"} {
		k := &stern{mode: mode}
		if r := inspect(k); !r.Available || r.Yama != mode || !strings.Contains(r.Who, says) {
			t.Errorf("mode %q: %+v", mode, r)
		}
	}
}
