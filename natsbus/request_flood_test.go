package natsbus

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/wire"
)

// TestRequestFlood: a host to which a client has sent D asks faster than D answers. D keeps
// little of it, and handles a few of the long requests at a time.
func TestRequestFlood(t *testing.T) {
	leaktest.Check(t)
	secure, err := NewIdentity().serverTLS()
	if err != nil {
		t.Fatal(err)
	}
	asking := &wire.Renew{}
	for i := range 1024 {
		asking.Loads = append(asking.Loads, fmt.Sprintf("%0100d", i))
	}
	data, err := (&wire.Request{Kind: wire.KindRenew, Renew: asking}).MarshalMsg(nil)
	if err != nil || len(data) <= longMessage {
		t.Fatalf("%d bytes, %v", len(data), err)
	}
	const requests = 150
	h := newRelay(t, "", secure)
	h.listens = func(conn net.Conn, subject, sid string) {
		ask := fmt.Sprintf("MSG %s %s %s.x %d\r\n%s\r\n", subject, sid, inboxOf(named("H").ID()), len(data), data)
		for range requests {
			if _, err := conn.Write([]byte(ask)); err != nil {
				return
			}
		}
	}
	d := newBus(t, Options{Identity: named("D")})
	var now, most, waits, done atomic.Int64
	ctx, heard := context.WithCancel(ctxOf(t, within)) // until D is asked
	defer heard()
	d.Serve(func(via core.Via, _ *wire.Request) *wire.Reply {
		heard()
		raise(&most, now.Add(1))
		defer now.Add(-1)
		if l, err := d.known(via); err == nil {
			_, bytes, _ := l.sub.Pending()
			raise(&waits, int64(bytes))
		}
		time.Sleep(10 * time.Millisecond) // a slow answer
		done.Add(1)
		return &wire.Reply{}
	})
	if _, _, err := d.Lookup(ctx, core.Target{Bootstrap: "http://" + h.Addr().String(), EngineID: "e"}); err == nil || !strings.Contains(err.Error(), "e") {
		t.Fatal("a host that answers nothing is an engine")
	}
	eventually(t, "all is answered", func() error {
		if n := done.Load(); n < requests {
			return fmt.Errorf("%d answers", n)
		}
		return nil
	})
	if most.Load() > maxLong {
		t.Errorf("%d long requests are answered at a time", most.Load())
	}
	if limit := int64(maxWaiting + 3*len(data)); waits.Load() > limit {
		t.Errorf("%d bytes wait, want at most %d", waits.Load(), limit)
	}
}

// raise makes a value at least another.
func raise(v *atomic.Int64, to int64) {
	for old := v.Load(); old < to && !v.CompareAndSwap(old, to); old = v.Load() {
	}
}
