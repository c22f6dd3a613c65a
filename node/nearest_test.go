package node

import (
	"fmt"
	"strings"
	"testing"
)

// TestUnknownKey: the message names the key, the known key that is most like it, if there is one, and all known keys.
func TestUnknownKey(t *testing.T) {
	for key, want := range map[string]string{
		"bootstrap_prot": "bootstrap_port", "boostrap_port": "bootstrap_port", "lease": "lease_s", "Bootstrap-Port": "bootstrap_port", "peer_timeout": "peer_timeout_s", "tcp_stream": "tcp_streams",
		"bootstrap-port": "bootstrap_port", "colour": "", "x": "", "": "",
	} {
		_, err := ParseConfig(fmt.Appendf(nil, `{"engine_id":"e","role":"decode",%q:1}`, key))
		if err == nil {
			t.Fatalf("%q is taken", key)
		}
		says := fmt.Sprintf("unknown config key %q; known keys are advertise_host, ", key)
		if want != "" {
			says = fmt.Sprintf("unknown config key %q, the nearest is %q; known keys are advertise_host, ", key, want)
		}
		if !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v; want %s", key, err, says)
		}
	}
}

func TestEdits(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"", "abc", 3}, {"abc", "", 3}, {"abc", "abc", 0}, {"abc", "acb", 1}, {"abc", "abd", 1}, {"abc", "bc", 1}, {"prot", "port", 1}, {"kitten", "sitting", 3}} {
		if got := edits(c.a, c.b); got != c.want {
			t.Errorf("edits(%q, %q) = %d, want %d", c.a, c.b, got, c.want)
		}
	}
}
