package natsbus

import (
	"fmt"
	"maps"
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
func askedFor(from core.AgentID, bytes int) *inboundRequest {
	return &inboundRequest{from: from, m: &nats.Msg{Data: make([]byte, bytes)}}
}

// owners are the owners of what waits, in its order.
func (q *longQueue) owners() string {
	var out []string
	for _, v := range q.queue {
		out = append(out, ownerOf(v.from))
	}
	return strings.Join(out, " ")
}

// has gives it another timeout.
func (q *longQueue) has(timeout time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.timeout = timeout
}

// TestLongRequestsTakeTurns: a round answers one long request of each owner. An owner that comes when others have many requests waiting
// is in the next round, whoever waits.
func TestLongRequestsTakeTurns(t *testing.T) {
	q := newLongQueue(time.Hour, ownerOf)
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
	if v, _ := q.next(); v.from != "a-1" {
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
		v, _ := q.next()
		answered += " " + ownerOf(v.from)
	}
	if answered != " f new0 new1 new2 f new3" {
		t.Errorf("answered are%s", answered)
	}
}

// TestLongQueueIsBounded: of all long requests that wait so many bytes are held, and one owner may have them all. If there is no room, the
// newest of who has the most give way to who has less: as many as it needs, or none if that is not enough. To an owner of whom nothing
// waits the newest of those who have two give way too.
func TestLongQueueIsBounded(t *testing.T) {
	q := newLongQueue(time.Hour, ownerOf)
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
	put("a-3", 3*part, 1, "a b c a a a") // c has less than it would have then
	put("d", 3*part, 3, "a b c d")       // it has more than a, but nothing else
	put("e", 7*part, 1, "a b c d")       // nobody has two
	put("d", part, 1, "a b c d")         // it has the most already
	put("e", part, 1, "a b d e")
	put("e", part, 0, "a b d e e")
	put("b", part, 0, "a b d e e b")
	put("f", 2*part, 1, "a b e f e b") // d gives way, which has more, and not those who have two
	want := map[string]waiting{"a": {1, part}, "b": {2, 2 * part}, "e": {2, 2 * part}, "f": {1, 2 * part}}
	if q.bytes != 7*part || !maps.Equal(q.of, want) {
		t.Errorf("%d bytes wait, of %v", q.bytes, q.of)
	}
	for v, _ := q.next(); v != nil; v, _ = q.next() {
	}
	if q.bytes != 0 || len(q.of) != 0 || q.unanswered() != 0 {
		t.Errorf("%d bytes of %v wait, and nothing does", q.bytes, q.of)
	}
	for i := range maxLongRequests {
		q.put(askedFor(core.AgentID(fmt.Sprint("s", i)), 1))
	}
	if n, _ := q.put(askedFor("t", 1)); n != 1 || len(q.queue) != maxLongRequests {
		t.Errorf("%d requests wait", len(q.queue))
	}
	q.next()
	q.put(askedFor("s7", 1))
	if n, _ := q.put(askedFor("t", 100)); n != 1 || len(q.queue) != maxLongRequests || q.of["t"].requests != 1 || q.of["s7"].requests != 1 {
		t.Errorf("%d requests wait, of s7 %v, of t %v", len(q.queue), q.of["s7"], q.of["t"])
	}
}

// TestLateLongRequests: a hello that has waited too long is late, and its turn goes to its owner's newest request, unless that is late too. What
// is no hello is never late.
func TestLateLongRequests(t *testing.T) {
	q := newLongQueue(time.Hour, ownerOf)
	put := func(from core.AgentID, late bool, req *wire.Request) {
		t.Helper()
		data, err := req.MarshalMsg(nil)
		if err != nil {
			t.Fatal(err)
		}
		v := &inboundRequest{from: from, m: &nats.Msg{Data: data}}
		if q.put(v); late {
			v.came = v.came.Add(-2 * q.timeout)
		}
	}
	load := &wire.Request{Kind: wire.KindLoad, Load: &wire.Load{}}
	for _, from := range []core.AgentID{"a-1", "a-2", "a-3", "a-4", "b-1", "b-2", "c-1"} {
		put(from, from != "a-4", longHello("e"))
	}
	put("d-1", true, load)
	answered := ""
	for v, late := q.next(); v != nil; v, late = q.next() {
		answered += fmt.Sprint(" ", v.from)
		if late {
			answered += " late"
		}
	}
	if want := " a-1 late a-4 b-1 late c-1 late d-1 a-2 late b-2 late a-3 late"; answered != want {
		t.Errorf("answered are%s, want%s", answered, want)
	}
	if q.bytes != 0 || len(q.of) != 0 {
		t.Errorf("%d bytes of %v wait, and nothing does", q.bytes, q.of)
	}
	for text, want := range map[string]bool{"": false, "k": false, "\x81\xa1k": false, "\x81\xa1h\x01": false, "\x81\xa1k\x01": true,
		"\x81\xa1k\x02": false} {
		if isHello([]byte(text)) != want {
			t.Errorf("%q is a hello: %v", text, !want)
		}
	}
}

// TestLateHelloIsToldSo: a late hello is not handled, and its requester is told to ask again.
func TestLateHelloIsToldSo(t *testing.T) {
	s := newSealedPair(t)
	first, release := holdLongRequests(s.prefill)
	defer release()
	var late sync.WaitGroup
	late.Go(func() { _, _ = s.decode.Request(ctxOf(t, within), "", s.p, longHello("e")) })
	<-first
	late.Go(func() {
		r, err := s.decode.Request(ctxOf(t, within), "", s.p, longHello("e"))
		if err != nil || r.Code == 0 || r.Again != wire.AgainLater || !strings.Contains(r.Reason, "is overloaded") {
			t.Errorf("%+v, %v", r, err)
		}
	})
	awaitLongQueued(t, s.prefill, 1)
	s.prefill.longQueue.has(0)
	release()
	late.Wait()
}

// TestLongRequestsWait: at an agent's own server and in a cluster, one long request is answered at a time, and short ones beside it.
// All long ones get their answers.
func TestLongRequestsWait(t *testing.T) {
	t.Run("cluster", func(t *testing.T) {
		s := newSealedPair(t)
		longRequestsWait(t, s.prefill, func(name string) (*Bus, core.Via) {
			return newBus(t, Options{Identity: named(name), ClusterURL: s.url, Token: "right", ConnectTimeout: time.Minute}), ""
		})
	})
	t.Run("port", func(t *testing.T) {
		leaktest.Check(t)
		p := newPort(t, "127.0.0.1:0", ServerOptions{})
		prefill := newBus(t, Options{Identity: named("P"), Server: p.Server})
		serve(prefill)
		register(t, prefill, "e")
		longRequestsWait(t, prefill, func(name string) (*Bus, core.Via) {
			b := newBus(t, Options{Identity: named(name)})
			_, via, err := b.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url(), EngineID: "e"})
			if err != nil {
				t.Fatal(err)
			}
			return b, via
		})
	})
}

// holdLongRequests has an agent answer long requests when release is called. first is closed when the first of them is being answered.
func holdLongRequests(prefill *Bus) (first chan struct{}, release func()) {
	prefill.longQueue.has(time.Hour)
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

// awaitLongQueued waits until so many long requests wait.
func awaitLongQueued(t *testing.T, b *Bus, want int) {
	t.Helper()
	eventually(t, fmt.Sprint(want, " wait"), func() error {
		b.longQueue.mu.Lock()
		defer b.longQueue.mu.Unlock()
		if n := len(b.longQueue.queue); n != want {
			return fmt.Errorf("%d wait", n)
		}
		return nil
	})
}

// TestLongRequestIsOvertaken: while a sealed long request waits, its agent's short ones overtake it, more of them than an agent
// remembers numbers of. It is answered all the same.
func TestLongRequestIsOvertaken(t *testing.T) {
	s := newSealedPair(t)
	first, release := holdLongRequests(s.prefill)
	defer release()
	var long sync.WaitGroup
	ask := func(bound time.Duration, req *wire.Request) {
		t.Helper()
		if r, err := s.decode.Request(ctxOf(t, bound), "", s.p, req); err != nil || r.Reason != "answer" {
			t.Errorf("%+v, %v", r, err)
		}
	}
	long.Go(func() { ask(10*within, longHello("e")) }) // it waits for all short ones
	<-first
	long.Go(func() { ask(10*within, longHello("e")) }) // it waits for all short ones
	awaitLongQueued(t, s.prefill, 1)
	for range 64 * (replayWords + 1) {
		ask(within, hello("e"))
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
	first, release := holdLongRequests(s.prefill)
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
	awaitLongQueued(t, s.prefill, waiting)
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

func longRequestsWait(t *testing.T, prefill *Bus, open func(name string) (*Bus, core.Via)) {
	prefill.longQueue.has(time.Hour)
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
	const requesters, each = 4, 3
	var all sync.WaitGroup
	for i := range requesters {
		b, via := open(fmt.Sprint("D", i))
		for range each {
			all.Go(func() {
				if r, err := b.Request(ctxOf(t, within), via, named("P").ID(), longHello("e")); err != nil || r.Reason != "answer" {
					t.Errorf("%+v, %v", r, err)
				}
			})
		}
	}
	awaitLongQueued(t, prefill, requesters*each-1)
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
