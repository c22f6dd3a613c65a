package attack

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/kvconn/kvconn/internal/freeport"
)

// onTheWay is a host between two agents' data streams. It reads what prefill sends, and may
// change it.
type onTheWay struct {
	mu     sync.Mutex
	read   bytes.Buffer
	change func(b []byte)
}

// pass passes prefill's bytes on.
func (h *onTheWay) pass(from io.Reader, to io.Writer) {
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		h.mu.Lock()
		h.read.Write(b[:n])
		if h.change != nil {
			h.change(b[:n])
		}
		h.mu.Unlock()
		if _, e := to.Write(b[:n]); err != nil || e != nil {
			return
		}
	}
}

// serve lets the streams that come to an address through to another one.
func (h *onTheWay) serve(t testing.TB, at, to string) {
	t.Helper()
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			d, err := l.Accept()
			if err != nil {
				return
			}
			p, err := net.Dial("tcp", to)
			if err != nil {
				_ = d.Close()
				continue
			}
			go func() { _, _ = io.Copy(p, d) }()
			go func() {
				defer p.Close()
				defer d.Close()
				h.pass(p, d)
			}()
		}
	}()
}

// TestManInTheMiddle: a host between prefill and decode read each KV cache, and what it changed
// was taken for good. Without a token, nkeys or TLS it still does. With one of them it sees nothing of a
// cache, what it changes ends the load with the reason, and no byte of that is in a block.
func TestManInTheMiddle(t *testing.T) {
	inEachDeployment(t, manInTheMiddle)
	t.Run("port-token", func(t *testing.T) {
		manInTheMiddle(newScenario(t, deployment{name: "port-token", token: "a-token-0123456789"}))
	})
}

func manInTheMiddle(t *scenario) {
	cache, other := bytes.Repeat([]byte{170}, 64), bytes.Repeat([]byte{171}, 64)
	sealed := t.token != "" || t.nkeys || t.tls
	ports, err := freeport.Take(1)
	if err != nil {
		t.Fatal(err)
	}
	p := t.startPlain("prefill", map[string]any{"tcp_port": ports[0], "advertise_host": "127.0.0.2"})
	d := t.startPlain("decode", nil)
	p.boot = strings.Replace(p.boot, "127.0.0.2", "127.0.0.1", 1) // the host is on the way of the data only
	h := &onTheWay{}
	h.serve(t, fmt.Sprint("127.0.0.2:", ports[0]), fmt.Sprint("127.0.0.1:", ports[0]))
	p.say("fill 170")
	if l := transfer(t, p, d, "read"); l.Code != "ok" {
		t.Fatalf("%+v", l)
	}
	h.mu.Lock()
	passed := h.read.Len()
	if seen := bytes.Contains(h.read.Bytes(), cache); seen == sealed {
		t.Errorf("the host has read a KV cache: %t", seen)
	}
	h.change = func(b []byte) {
		if !sealed {
			copy(b, bytes.ReplaceAll(b, cache, other))
		} else if len(b) > 0 {
			b[len(b)/2] ^= 1
		}
	}
	h.mu.Unlock()
	if passed < fourBlocks {
		t.Errorf("the host has passed %d bytes on: the attack itself has failed", passed)
	}
	l := transfer(t, p, d, "changed")
	bytes := d.say("bytes").Bytes
	if !sealed && (l.Code != "ok" || bytes["171"] == 0) {
		t.Errorf("in the clear: %+v, %v; the attack itself has failed", l, bytes)
	}
	if sealed && (l.Code == "ok" || !strings.Contains(l.Reason, "wrong tag") || bytes["170"]+bytes["0"] != layers*numBlocks*blockBytes) {
		t.Errorf("sealed: %+v, %v", l, bytes)
	}
	h.mu.Lock()
	h.change = nil
	h.mu.Unlock()
	// The stream that came after the one that was broken may have been changed too, before the host ceased: a load
	// may still meet that.
	var after said
	for try := range 3 {
		if after = transfer(t, p, d, fmt.Sprint("after-", try)); after.Code == "ok" {
			break
		}
	}
	if !sealed {
		return // it is documented
	}
	if after.Code != "ok" {
		t.Errorf("honest loads after it: %+v", after)
	}
	got(t, "each KV cache read, and what it changed taken for good", "0 bytes of a cache in %d that it passed on, 0 changed bytes in blocks, the load ends by a wrong tag, and one after it is well", passed)
}
