package natsbus

import (
	"io"
	"testing"
)

func TestHandshakeSeesWhoIsLetIn(t *testing.T) {
	const info, ping = "INFO {\"a\":1}\r\n", "PING\r\n"
	for text, want := range map[string]struct {
		in  bool
		why string
	}{
		info: {}, info + ping + ping: {}, info + "PIN": {}, "INFO": {},
		info + "PONG\r\n": {in: true}, info + "+OK\r\n": {in: true}, info + ping + "PONG\r\n": {in: true}, info + info: {in: true},
		info + "-ERR 'Authorization Violation'\r\n":       {why: "Authorization Violation"},
		info + ping + "-ERR 'Authentication Timeout'\r\n": {why: "Authentication Timeout"},
	} {
		for _, step := range []int{1, 3, len(text)} { // in pieces of any size
			calls := 0
			h := &handshake{w: io.Discard, done: func() { calls++ }}
			for rest := text; rest != ""; {
				n := min(step, len(rest))
				if _, err := h.Write([]byte(rest[:n])); err != nil {
					t.Fatal(err)
				}
				rest = rest[n:]
			}
			if h.in != want.in || (calls == 1) != want.in || calls > 1 || h.refusal() != want.why {
				t.Errorf("%q: in %v, %d calls, %q", text, h.in, calls, h.refusal())
			}
		}
	}
}
