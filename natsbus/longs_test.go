package natsbus

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/wire"
)

// longHello is a hello that is long.
func longHello(name string) *wire.Request {
	h := hello(name)
	h.Hello.Shapes = make([]wire.Shape, longMessage/8) // of twelve bytes each
	return h
}

// askedFor is a request of so many bytes that waits.
func askedFor(from core.AgentID, bytes int) *asked {
	return &asked{from: from, m: &nats.Msg{Data: make([]byte, bytes)}}
}

// owners are the owners of what waits, in its order.
func (q *longs) owners() string {
	var out []string
	for _, v := range q.queue {
		out = append(out, ownerOf(v.from))
	}
	return strings.Join(out, " ")
}

// TestLongsHaveABound: of all long requests that wait so many bytes are held, and of one owner a part of that. When there is no
// room, the newest of who has the most gives way to who has less.
func TestLongsHaveABound(t *testing.T) {
	q := newLongs()
	put := func(from core.AgentID, bytes int, dropped int, want string) {
		t.Helper()
		if n, _ := q.put(askedFor(from, bytes)); n != dropped || q.owners() != want {
			t.Errorf("%d bytes of %s: %d are dropped, and %q wait; want %d, %q", bytes, from, n, q.owners(), dropped, want)
		}
	}
	const part = maxLongBytesOf / 2
	put("a-1", part-1, 0, "a")
	put("a-2", part, 0, "a a") // the key's agents together
	put("a-3", part, 1, "a a")
	put("b", 2*maxLongBytesOf, 0, "a a b") // its first, however long
	put("c", part, 0, "a a b c")
	put("d", part, 0, "a a b c d")
	put("e", part, 1, "a a c d e") // all have room without b's
	for i := range maxLongBytes/part - 5 {
		if n, _ := q.put(askedFor(core.AgentID(fmt.Sprint("f", i)), part)); n != 0 {
			t.Fatal("there is room")
		}
	}
	put("g", part, 1, strings.Replace(q.owners(), "a a", "a", 1)+" g") // a had the most
	put("h", part, 1, q.owners())                                      // nobody has more than h would have
	for v := q.next(); v != nil; v = q.next() {
	}
	if q.bytes != 0 || len(q.of) != 0 {
		t.Errorf("%d bytes of %v wait, and nothing does", q.bytes, q.of)
	}
	for i := range maxLongs {
		q.put(askedFor(core.AgentID(fmt.Sprint("s", i)), 1))
	}
	if n, _ := q.put(askedFor("t", 1)); n != 1 || len(q.queue) != maxLongs {
		t.Errorf("%d requests wait", len(q.queue))
	}
}

// TestLongRequestsWait: at an agent's own server and in a cluster, one long request is answered at a time, and short ones beside it.
// All long ones get their answers.
func TestLongRequestsWait(t *testing.T) {
	t.Run("cluster", func(t *testing.T) {
		s := newSealedPair(t)
		longsWait(t, s.prefill, func(name string) (*Bus, core.Via) {
			return newBus(t, Options{Identity: named(name), ClusterURL: s.url, Token: "right", ConnectTimeout: time.Minute}), ""
		})
	})
	t.Run("port", func(t *testing.T) {
		leaktest.Check(t)
		p := newPort(t, "127.0.0.1:0", ServerOptions{})
		prefill := newBus(t, Options{Identity: named("P"), Server: p.Server})
		serve(prefill)
		register(t, prefill, "e")
		longsWait(t, prefill, func(name string) (*Bus, core.Via) {
			b := newBus(t, Options{Identity: named(name)})
			_, via, err := b.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url(), EngineID: "e"})
			if err != nil {
				t.Fatal(err)
			}
			return b, via
		})
	})
}

func longsWait(t *testing.T, prefill *Bus, open func(name string) (*Bus, core.Via)) {
	var now, most atomic.Int64
	release := make(chan struct{})
	let := sync.OnceFunc(func() { close(release) })
	defer let()
	answer := core.Handler(func(_ core.Via, req *wire.Request) *wire.Reply {
		if len(req.Hello.Shapes) > 1 {
			raise(&most, now.Add(1))
			defer now.Add(-1)
			<-release
		}
		return &wire.Reply{Reason: "answer"}
	})
	prefill.handler.Store(&answer)
	const askers, each = 4, 3
	var all sync.WaitGroup
	for i := range askers {
		b, via := open(fmt.Sprint("D", i))
		for range each {
			all.Go(func() {
				if r, err := b.Request(ctxOf(t, within), via, named("P").ID(), longHello("e")); err != nil || r.Reason != "answer" {
					t.Errorf("%+v, %v", r, err)
				}
			})
		}
	}
	eventually(t, "all but one wait", func() error {
		prefill.longs.mu.Lock()
		defer prefill.longs.mu.Unlock()
		if n := len(prefill.longs.queue); n != askers*each-1 {
			return fmt.Errorf("%d wait", n)
		}
		return nil
	})
	b, via := open("S")
	for range 2 * maxHandlers {
		if r, err := b.Request(ctxOf(t, within), via, named("P").ID(), hello("e")); err != nil || r.Reason != "answer" {
			t.Fatalf("a short one beside them: %+v, %v", r, err)
		}
	}
	let()
	all.Wait()
	if most.Load() != 1 {
		t.Errorf("%d long requests were answered at a time", most.Load())
	}
}
