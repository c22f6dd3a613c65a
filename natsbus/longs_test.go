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

// TestLongsTakeTurns: each owner has one of its long requests answered in a round, also one that comes when others have many waiting.
func TestLongsTakeTurns(t *testing.T) {
	q := newLongs()
	want := func(order string) {
		t.Helper()
		if q.owners() != order {
			t.Errorf("%q wait, want %q", q.owners(), order)
		}
	}
	for _, from := range []core.AgentID{"a-1", "a-2", "a-3", "b", "b", "c"} { // a key's agents are one owner
		q.put(askedFor(from, 1))
	}
	want("a b c a b a")
	if v := q.next(); v.from != "a-1" {
		t.Errorf("the first is of %s", v.from)
	}
	q.put(askedFor("d", 1))
	want("b c d a b a")
	for range 4 { // to a's second, with which a round begins
		q.next()
	}
	q.put(askedFor("e", 1))
	want("b e a")
	for range 3 {
		q.next()
	}
	q.put(askedFor("f", 1))
	q.put(askedFor("f", 1))
	answered := ""
	for i := range 6 { // new owners without an end keep f's second request out for a round
		q.put(askedFor(core.AgentID(fmt.Sprint("new", i)), 1))
		answered += " " + ownerOf(q.next().from)
	}
	if answered != " f new0 new1 new2 f new3" {
		t.Errorf("answered are%s", answered)
	}
}

// TestLongsHaveABound: of all long requests that wait so many bytes are held, and one owner may have them all. If there is no room, the
// newest of who has the most give way to who has less: as many as it needs, or none if that is not enough.
func TestLongsHaveABound(t *testing.T) {
	q := newLongs()
	put := func(from core.AgentID, bytes int, dropped int, want string) {
		t.Helper()
		if n, _ := q.put(askedFor(from, bytes)); n != dropped || q.owners() != want {
			t.Errorf("%d bytes of %s: %d are dropped, and %q wait; want %d, %q", bytes, from, n, q.owners(), dropped, want)
		}
	}
	const part = maxLongBytes / 8
	put("z", 2*maxLongBytes, 0, "z") // one, however long
	put("a-0", part, 1, "a")
	for range 7 {
		q.put(askedFor("a-1", part))
	}
	put("a-2", part, 1, "a a a a a a a a") // the key's agents together
	put("b", part, 1, "a b a a a a a a")
	put("c", 3*part, 3, "a b c a a a")
	put("d", 3*part, 1, "a b c a a a") // only one of a's would give way to it
	put("e", part, 1, "a b c e a a")
	q.next()
	put("e", part, 0, "b c e a e a")
	put("e", part, 1, "b c e a e a") // it would have as much as c, which has the most
	put("b", part, 1, "b e a e b a")
	if q.bytes != 6*part || q.of["a"] != 2*part || q.of["b"] != 2*part || q.of["e"] != 2*part || q.of["c"] != 0 {
		t.Errorf("%d bytes wait, of %v", q.bytes, q.of)
	}
	for v := q.next(); v != nil; v = q.next() {
	}
	if q.bytes != 0 || len(q.of) != 0 || q.unanswered() != 0 {
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

// longsHeld has an agent answer long requests when release is called. first is closed when the first of them is being answered.
func longsHeld(prefill *Bus) (first chan struct{}, release func()) {
	first, hold := make(chan struct{}), make(chan struct{})
	came := sync.OnceFunc(func() { close(first) })
	answer := core.Handler(func(_ core.Via, req *wire.Request) *wire.Reply {
		if len(req.Hello.Shapes) > 1 {
			came()
			<-hold
		}
		return &wire.Reply{Reason: "answer"}
	})
	prefill.handler.Store(&answer)
	return first, sync.OnceFunc(func() { close(hold) })
}

// longsQueued waits until so many long requests wait.
func longsQueued(t *testing.T, b *Bus, want int) {
	t.Helper()
	eventually(t, fmt.Sprint(want, " wait"), func() error {
		b.longs.mu.Lock()
		defer b.longs.mu.Unlock()
		if n := len(b.longs.queue); n != want {
			return fmt.Errorf("%d wait", n)
		}
		return nil
	})
}

// TestLongRequestIsOvertaken: while a sealed long request waits, its agent's short ones overtake it, more of them than an agent
// remembers numbers of. It is answered all the same.
func TestLongRequestIsOvertaken(t *testing.T) {
	s := newSealedPair(t)
	first, release := longsHeld(s.prefill)
	defer release()
	var long sync.WaitGroup
	ask := func(req *wire.Request) {
		t.Helper()
		if r, err := s.decode.Request(ctxOf(t, within), "", s.p, req); err != nil || r.Reason != "answer" {
			t.Errorf("%+v, %v", r, err)
		}
	}
	long.Go(func() { ask(longHello("e")) })
	<-first
	long.Go(func() { ask(longHello("e")) })
	longsQueued(t, s.prefill, 1)
	for range 64 * (replayWords + 1) {
		ask(hello("e"))
	}
	release()
	long.Wait()
	if n := s.prefill.seals.repeated.Load(); n != 0 {
		t.Errorf("%d requests are taken for copies", n)
	}
}

// TestCloseWhileLongRequestsWait: an agent that closes answers the long request on which it is, and tells those who wait that it closes.
func TestCloseWhileLongRequestsWait(t *testing.T) {
	s := newSealedPair(t)
	first, release := longsHeld(s.prefill)
	defer release()
	const waiting = 3
	said := make(chan string, 1+waiting)
	ask := func() {
		r, err := s.decode.Request(ctxOf(t, within), "", s.p, longHello("e"))
		if err != nil {
			r = &wire.Reply{Reason: err.Error()}
		}
		said <- r.Reason
	}
	go ask()
	<-first
	for range waiting {
		go ask()
	}
	longsQueued(t, s.prefill, waiting)
	closed := make(chan error, 1)
	go func() { closed <- s.prefill.Close(ctxOf(t, within)) }()
	<-s.prefill.ctx.Done()
	release()
	got := map[string]int{}
	for range 1 + waiting {
		got[<-said]++
	}
	if closing := fmt.Sprintf("agent %s is closing", s.p); got["answer"] != 1 || got[closing] != waiting {
		t.Errorf("those who ask are told %v", got)
	}
	if err := <-closed; err != nil {
		t.Error(err)
	}
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
	longsQueued(t, prefill, askers*each-1)
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
