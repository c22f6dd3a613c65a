package proxy

import (
	"bytes"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rig/leaktest"
)

func TestEndOfString(t *testing.T) {
	leaktest.Check(t)
	for _, s := range []string{`""`, `"a"`, `"\""`, `"\\"`, `"\\\""`, `"a\"b\\"`, `"\u4e2d\"\u4e2d"`, `"é\\\\"`} {
		if at := endOfString([]byte("x"+s+`,"y"`), 1); at != 1+len(s) {
			t.Errorf("%s ends at %d, want %d", s, at-1, len(s))
		}
	}
}

// TestManyEscapes: the time for a body is in proportion to its length. It once grew with the
// length's square: minutes for this body.
func TestManyEscapes(t *testing.T) {
	leaktest.Check(t)
	body := []byte(`{"prompt":"` + strings.Repeat(`\u4e2d`, 4<<20) + `","kv_transfer_params":1}`)
	found := make(chan string, 1)
	go func() {
		name, _ := memberAmong(body, Mooncake.reserved())
		found <- name
	}()
	if got := recv(t, found, "the end of a body of escapes"); got != paramsName {
		t.Errorf("found %q", got)
	}
	if f, err := parseFields(body); err != nil || len(f) != 2 || !bytes.HasSuffix(f[0].value, []byte(`\u4e2d"`)) {
		t.Errorf("%d members, %v", len(f), err)
	}
}
