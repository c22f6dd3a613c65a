package natsbus

import (
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestBudget: over the limit the connection that holds the most is ended, once, whoever asked for more. What a connection gives back
// counts no more, nor what one held that has left. What one that is being ended still holds ends nobody else, up to twice the limit.
func TestBudget(t *testing.T) {
	b := newBudget(100)
	var ended []string
	of := func(name string) *share {
		return b.newShare(core.Account(name), func() { ended = append(ended, name) })
	}
	greedy, second, third := of("greedy"), of("second"), of("third")
	want := func(what string, total, ending int64, names ...string) {
		t.Helper()
		if b.total != total || b.ending != ending || !slices.Equal(ended, names) {
			t.Fatalf("%s: %d bytes are held, %d of them by those who are ended: %v; want %d, %d and %v", what, b.total, b.ending, ended, total, ending, names)
		}
	}
	greedy.add(60)
	second.add(30)
	third.add(10)
	want("up to the limit", 100, 0)
	third.add(1)
	want("over it", 101, 60, "greedy")
	third.add(59)
	want("the others have what is on its way back", 160, 60, "greedy")
	greedy.add(5)
	want("what the ended one still asks for", 165, 65, "greedy")
	greedy.add(-10)
	want("what the ended one gives back", 155, 55, "greedy")
	second.add(1)
	want("the others go over it", 156, 125, "greedy", "third")
	second.add(44)
	want("up to twice the limit", 200, 125, "greedy", "third")
	second.add(1)
	want("over that", 201, 201, "greedy", "third", "second")
	second.add(1)
	want("nobody is left", 202, 202, "greedy", "third", "second")
	greedy.release()
	greedy.release()
	third.release()
	want("they have left", 77, 77, "greedy", "third", "second")
	third.add(10) // a goroutine of the connection's outlived its end
	want("who has left counts no more", 77, 77, "greedy", "third", "second")
	late := of("late")
	late.add(100)
	want("others have room", 177, 77, "greedy", "third", "second")
	second.release()
	late.release()
	want("all have left", 0, 0, "greedy", "third", "second")
	if n := b.shares.Holders(); n != 0 {
		t.Errorf("%d connections are still counted", n)
	}
}

// TestEndedOnce: for what an account holds too much it loses one connection: what that one still holds ends no other of the account.
func TestEndedOnce(t *testing.T) {
	b := newBudget(100)
	var ended []string
	of := func(account core.Account, name string) *share {
		return b.newShare(account, func() { ended = append(ended, name) })
	}
	large, small, other := of("a", "large"), of("a", "small"), of("b", "other")
	large.add(50)
	small.add(35)
	other.add(16)
	if !slices.Equal(ended, []string{"large"}) {
		t.Fatalf("%v are ended", ended)
	}
	other.add(50)
	if !slices.Equal(ended, []string{"large", "other"}) {
		t.Errorf("the other has 66, and the small one 35: %v are ended", ended)
	}
}

// TestEndedForAnother: what connections of one account hold that are being ended costs no other account one, also if that account holds little
// besides. Over twice the limit the account loses its own.
func TestEndedForAnother(t *testing.T) {
	const limit, large, little = 32 << 20, 8<<20 + perRequest, 2 * perRequest
	b := newBudget(limit)
	var ended []string
	of := func(account core.Account, name string) *share {
		return b.newShare(account, func() { ended = append(ended, name) })
	}
	gateway, honest := of("gateway", "gateway"), of("honest", "honest")
	gateway.add(100 << 10)
	honest.add(2 << 10)
	of("a", "idle")
	var shares []*share
	ask := func(name string, n int64) {
		s := of("a", name)
		shares = append(shares, s)
		s.add(n)
	}
	for i := range 8 {
		ask(fmt.Sprint("large ", i), large)
	}
	for i := range 4 {
		ask(fmt.Sprint("little ", i), little)
	}
	want := []string{"large 3", "large 4", "large 5", "large 6", "large 7", "large 2", "large 1", "large 0", "little 3"}
	if !slices.Equal(ended, want) || b.total <= 2*limit {
		t.Fatalf("of %d bytes %v are ended, want %v", b.total, ended, want)
	}
	honest.add(perRequest)
	gateway.add(perRequest)
	gateway.add(limit - (b.total - b.ending)) // up to the limit, beside those
	if b.total-b.ending != limit || !slices.Equal(ended, want) {
		t.Errorf("others ask for more, up to %d bytes: %v are ended", b.total-b.ending, ended)
	}
	honest.add(1)
	if want = append(want, "gateway"); !slices.Equal(ended, want) {
		t.Errorf("they hold more than the limit themselves: %v are ended", ended)
	}
	for _, s := range shares {
		s.release()
	}
	gateway.release()
	ask("again", large)
	if !slices.Equal(ended, want) || b.ending != 0 {
		t.Errorf("when all have left, %v are ended, and %d bytes are held by those", ended, b.ending)
	}
}

// TestSmallHolders: an account counts with all that its connections hold. Very many that hold little each lose them, one after another, and
// one that holds more than each of them, and less than all, goes on. Within one account the largest connection is ended.
func TestSmallHolders(t *testing.T) {
	const holders, each, large = 200, 16 << 10, 1 << 20 // the product's bounds are ten times as large
	b := newBudget(holders * each)
	var ended []string
	of := func(account core.Account, name string) *share {
		return b.newShare(account, func() { ended = append(ended, name) })
	}
	honest, small := of("honest", "honest"), make([]*share, holders)
	for i := range small {
		small[i] = of("attacker", fmt.Sprint("small ", i))
		small[i].add(each)
	}
	if len(ended) > 0 {
		t.Fatalf("up to the limit %v are ended", ended)
	}
	leave := func() (name string) {
		t.Helper()
		if len(ended) != 1 {
			t.Fatalf("%d connections are ended at once: %v", len(ended), ended)
		}
		name, ended = ended[0], nil
		return name
	}
	honest.add(large)
	for i := holders - 1; b.total > b.limit; i-- { // its next pieces, until there is room
		if got, want := leave(), fmt.Sprint("small ", i); got != want {
			t.Fatalf("%s is ended, want %s", got, want)
		}
		small[i].release()
		if b.total > b.limit {
			honest.add(1)
		}
	}
	if honest.ended || b.total <= b.limit-each {
		t.Errorf("the honest one is ended: %v; %d bytes are held of %d", honest.ended, b.total, b.limit)
	}
	late := of("attacker", "late")
	late.add(each)
	if name := leave(); name != "late" { // it is the newest
		t.Errorf("a small one comes, and %s is ended", name)
	}
	late.release()
	second := of("honest", "second") // now the honest account asks for more than all others hold
	second.add(holders * each)
	if name := leave(); name != "second" {
		t.Errorf("%s is ended", name)
	}
	second.release()
	for range holders { // nothing is given back: the next ends are others' until the honest one holds the most
		if honest.add(large); honest.ended {
			break
		}
	}
	if !honest.ended {
		t.Error("one that holds the most of all stays")
	}
}

// TestWindow: a client has so many requests without an answer; the next waits for an answer, or
// until the oldest has waited too long, or until the client is gone. Each counts with its bytes
// and with what it costs beside them. An answer of the client's counts so until it is passed on.
func TestWindow(t *testing.T) {
	s := newBudget(1<<30).newShare("A", func() { t.Error("its connection is ended") })
	w := newWindow(s, newRegistryQueries())
	w.left = time.Hour
	open := func(reply string) error {
		_, err := w.open(reply, 100, false)
		return err
	}
	waits := func(reply string) chan error {
		t.Helper()
		opened := make(chan error, 1)
		go func() { opened <- open(reply) }()
		eventually(t, "one more waits", func() error {
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.freed == nil {
				return fmt.Errorf("%d requests are pending", len(w.pending))
			}
			return nil
		})
		return opened
	}
	held := func(what string, requests int) {
		t.Helper()
		w.mu.Lock()
		n := len(w.pending)
		w.mu.Unlock()
		s.of.mu.Lock()
		defer s.of.mu.Unlock()
		if n != requests || s.bytes != int64(requests)*(100+perRequest) {
			t.Errorf("%s: %d requests of %d bytes are held, want %d", what, n, s.bytes, requests)
		}
	}
	for i := range maxUnanswered {
		if err := open(fmt.Sprint("a", i)); err != nil {
			t.Fatal(err)
		}
	}
	held("as many as may be", maxUnanswered)
	if err := open("a7"); !errors.Is(err, errProtocol) {
		t.Errorf("a second request with one subject for its answer: %v", err)
	}
	next := waits("next")
	w.answered([]byte("unknown"))
	w.answered([]byte("a3"))
	if err := <-next; err != nil {
		t.Errorf("after an answer: %v", err)
	}
	held("one for another", maxUnanswered)
	done, err := w.open("", 100, false) // an answer goes by them
	if err != nil || s.bytes != (maxUnanswered+1)*(100+perRequest) {
		t.Errorf("with an answer %d bytes are held, %v", s.bytes, err)
	}
	done()
	held("the answer is passed on", maxUnanswered)
	last := waits("last")
	w.close()
	w.close()
	if err := <-last; !errors.Is(err, errGone) {
		t.Errorf("who has gone: %v", err)
	}
	if err := open("later"); !errors.Is(err, errGone) {
		t.Errorf("after its end: %v", err)
	}

	late := newWindow(newBudget(1<<30).newShare("A", func() {}), newRegistryQueries())
	late.left = time.Millisecond
	for i := range 2*maxUnanswered + 1 { // none is answered
		if _, err := late.open(fmt.Sprint("a", i), 0, false); err != nil {
			t.Fatal(err)
		}
		if n := len(late.pending); n > maxUnanswered {
			t.Fatalf("%d requests are held", n)
		}
	}
	synctest.Test(t, func(t *testing.T) { // a few that nobody answers count only for so long, though there is room
		few := newBudget(1<<30).newShare("A", func() {})
		w := newWindow(few, newRegistryQueries())
		for _, at := range []struct {
			after   time.Duration
			pending int
		}{{0, 1}, {time.Millisecond, 2}, {answerWithin - 2*time.Millisecond, 3}, {answerWithin, 1}} {
			time.Sleep(at.after)
			if _, err := w.open(fmt.Sprint(time.Now()), 100, false); err != nil {
				t.Fatal(err)
			}
			if n := len(w.pending); n != at.pending || few.bytes != int64(n)*(100+perRequest) {
				t.Errorf("%v later %d requests of %d bytes are held, want %d", at.after, n, few.bytes, at.pending)
			}
		}
	})
	if left := newWindow(s, nil).left; left != answerWithin {
		t.Errorf("an answer has %v", left)
	}
}

// TestUnreadAnswers: what is kept for a client that does not read is bounded, beside one long
// message. Then its connection ends, and what was kept is counted for nobody.
func TestUnreadAnswers(t *testing.T) {
	for what, head := range map[string]string{"short ones": "MSG a 1 0\r\n\r\n", "a long one first": fmt.Sprintf("MSG a 1 %d\r\n", 4<<20)} {
		budget := newBudget(1 << 30)
		kept := budget.newShare("A", func() {})
		client, to := net.Pipe() // nobody reads
		long := 0
		if strings.HasSuffix(head, "4194304\r\n") {
			long = 4 << 20
		}
		from := &hostile{text: []byte(head + strings.Repeat("x", long) + "\r\n")}
		flood := &hostile{text: []byte("MSG a 1 5\r\nhello\r\n"), endless: true}
		o := newClientWriter(io.MultiReader(from, flood), to, newWindow(kept, newRegistryQueries()), kept)
		if err := o.run(); !errors.Is(err, errUnread) {
			t.Errorf("%s: %v", what, err)
		}
		if read, most := from.read+flood.read, maxUnread+long+len(head)+2*readSize; read > most || read < maxUnread+long-readSize {
			t.Errorf("%s: %d bytes were kept, at most %d may", what, read, most)
		}
		kept.release()
		if budget.total != 0 {
			t.Errorf("%s: %d bytes are still counted", what, budget.total)
		}
		_ = client.Close()
	}
}

// TestPacedPiece: one read takes no more than a piece, whatever its caller has room for: its wait
// stays short.
func TestPacedPiece(t *testing.T) {
	c := newPaced(&hostile{text: make([]byte, 1<<20), endless: true})
	if n, err := c.Read(make([]byte, 1<<20)); n != pacePiece || err != nil {
		t.Errorf("%d bytes, %v", n, err)
	}
}

// TestLongBufferIsNotKept: after a long message its memory is free.
func TestLongBufferIsNotKept(t *testing.T) {
	for range 100 { // the pool forgets some of what it is given
		r := takeBuffer()
		r.bytes = append(r.bytes[:0], make([]byte, maxBuffer+1)...)
		r.release()
		r = takeBuffer()
		if cap(r.bytes) > maxBuffer {
			t.Fatalf("%d bytes are kept", cap(r.bytes))
		}
		r.bytes = append(r.bytes, 1)
		r.release()
		if r = takeBuffer(); len(r.bytes) != 0 {
			t.Fatalf("%d bytes of the message before are there", len(r.bytes))
		}
	}
}

// TestShortRequestsWait: of very many short requests that no handler has taken a host is read no
// further, too; see TestRequestFlood for long ones.
func TestShortRequestsWait(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	nc := newBus(t, Options{Identity: named("P"), Server: p.Server}).homeLink().nc
	sub, err := nc.SubscribeSync("x")
	if err != nil {
		t.Fatal(err)
	}
	var heard atomic.Pointer[nats.Subscription]
	c := newGuarded(&hostile{text: []byte("PING\r\n"), endless: true}, &heard)
	if c.full() {
		t.Error("before it listens it is full")
	}
	heard.Store(sub)
	pending := func(n int) {
		t.Helper()
		eventually(t, fmt.Sprint(n, " wait"), func() error {
			if count, _, err := sub.Pending(); err != nil || count != n {
				return fmt.Errorf("%d wait, %w", count, err)
			}
			return nil
		})
	}
	for range maxWaitingCount {
		if err := nc.Publish("x", nil); err != nil {
			t.Fatal(err)
		}
	}
	pending(maxWaitingCount)
	if c.full() {
		t.Errorf("%d short requests are too many", maxWaitingCount)
	}
	if err := nc.Publish("x", nil); err != nil {
		t.Fatal(err)
	}
	pending(maxWaitingCount + 1)
	if !c.full() {
		t.Errorf("more than %d short requests may wait", maxWaitingCount)
	}
	read := make(chan error, 1)
	go func() {
		_, err := c.Read(make([]byte, 10))
		read <- err
	}()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := <-read; !errors.Is(err, net.ErrClosed) {
		t.Errorf("its end while it waits: %v", err)
	}
	if _, err := sub.NextMsg(within); err != nil {
		t.Fatal(err)
	}
	if c.full() {
		t.Error("after one was taken it is still full")
	}
}
