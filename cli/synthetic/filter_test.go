package synthetic

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/rig/callfilter"
)

// TestStartUnderAFilter: where a filter of system calls would end the process for starting another, Start says so.
func TestStartUnderAFilter(t *testing.T) {
	const forbid = "SYNTHETIC_FORBID"
	calls := map[string]uint32{"pidfd_open": unix.SYS_PIDFD_OPEN, "pidfd_send_signal": unix.SYS_PIDFD_SEND_SIGNAL}
	if name := os.Getenv(forbid); name != "" { // the process that has the filter
		if err := callfilter.Install(callfilter.Kill, calls[name]); err != nil {
			t.Fatal(err)
		}
		p, err := Start(t.Context(), []string{"/bin/true"})
		if err == nil {
			p.Stop()
			t.Fatal("it was started")
		}
		if !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "SystemCallFilter") {
			t.Error(err)
		}
		return
	}
	for name := range calls {
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestStartUnderAFilter$")
			cmd.Env = append(os.Environ(), forbid+"="+name)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
