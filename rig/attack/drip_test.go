package attack

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/internal/freeport"
)

// drip passes connections on. Of what comes back it passes the first bytes at once, and from
// then on one byte each 100 ms.
func drip(t testing.TB, at, to string, first int64) (dripped *atomic.Int64) {
	t.Helper()
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	dripped = new(atomic.Int64)
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				_ = in.Close()
				continue
			}
			t.Cleanup(func() { _ = in.Close(); _ = out.Close() })
			go func() { _, _ = io.Copy(out, in) }()
			go func() {
				_, _ = io.CopyN(in, out, first)
				for {
					if _, err := io.CopyN(in, out, 1); err != nil {
						return
					}
					dripped.Add(1)
					time.Sleep(100 * time.Millisecond) // the attack itself
				}
			}()
		}
	}()
	return dripped
}

// TestBytesThatDrip: a prefill engine that says that it sends, and sends a byte now and then,
// kept the decode engine's blocks for as long as it liked: no stream stood still, nobody was
// silent. Now a load ends when load_timeout_s is over.
func TestBytesThatDrip(t *testing.T) { atBoth(t, bytesThatDrip) }

func bytesThatDrip(t *scenario) {
	ports, err := freeport.Take(1)
	if err != nil {
		t.Fatal(err)
	}
	port := ports[0]
	slow := t.startAnother("", "slow", map[string]any{"tcp_port": port, "bootstrap_host": "127.0.0.2", "advertise_host": "127.0.0.2"})
	dripped := drip(t, fmt.Sprintf("127.0.0.2:%d", port), fmt.Sprintf("127.0.0.1:%d", port), 2048)
	p := t.startPlain("prefill", nil)
	d := t.startPlain("decode", map[string]any{"load_timeout_s": 3})
	calm := before(t, p, d)
	slow.say("offer dripped 4 4")
	began := time.Now()
	d.say("load dripped 30 4 %s", slow.from())
	h := &honest{}
	for h.all < loadsBefore || dripped.Load() == 0 && time.Since(began) < bound {
		h.load(t, p, d, fmt.Sprint("beside", h.all))
	}
	l := d.report("dripped")
	took := time.Since(began)
	if l.Code == "ok" || !strings.Contains(l.Reason, "load_timeout_s") || took < 2*time.Second {
		t.Errorf("after %v: %+v", took, l)
	}
	if dripped.Load() == 0 {
		t.Error("no byte dripped")
	}
	before := d.say("bytes").Bytes["0"]
	n := dripped.Load()
	for deadline := time.Now().Add(bound); dripped.Load() < n+3 && time.Now().Before(deadline); { // later bytes, if the stream still stands
		if h.load(t, p, d, fmt.Sprint("later", h.all)); time.Since(began) > took+2*time.Second {
			break
		}
	}
	if after := d.say("bytes").Bytes["0"]; after != before {
		t.Errorf("%d bytes landed after the load had ended", before-after)
	}
	got(t, "decode's blocks kept for as long as it drips", "blocks back after %.1f s of load_timeout_s 3, 0 bytes later, %s", took.Seconds(), h.comparedWith(t, calm))
}
