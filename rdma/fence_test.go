package rdma

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
	"github.com/kvconn/kvconn/rig/coretest"
)

// TestDrainPatience: the time for P's answer to a revoke counts from the revoke on, also
// if P is asked about another revoke first.
func TestDrainPatience(t *testing.T) {
	tr := newTestConn(t, 0).t
	asked, answer := make(chan time.Time), make(chan struct{})
	tr.signal = func(ctx context.Context, to core.AgentID, msg []byte) ([]byte, error) {
		until, _ := ctx.Deadline()
		asked <- until
		<-answer
		return (&reply{}).MarshalMsg(nil)
	}
	r := &tr.receiver
	r.init(tr, 4)
	src := &source{r: r, peer: "p", lanes: map[uint32]*lane{}, dying: map[uint32]*lane{}, live: map[uint64]*expect{}}
	src.lanes[1] = newTestConn(t, 1).lanes[0]
	r.sources["p"] = src
	var all []*expect
	for _, id := range []core.TransferID{"first", "second"} {
		if _, err := r.expect(id, "p", nil); err != nil {
			t.Fatal(err)
		}
		all = append(all, r.expected[id])
	}
	src.mu.Lock()
	src.watching.Stop()
	src.mu.Unlock()
	for i, e := range all {
		src.revoke(e)
		if i > 0 {
			src.mu.Lock()
			e.patience = e.patience.Add(-drainBound / 2) // P has let the revoke before wait so long
			src.mu.Unlock()
			answer <- struct{}{}
		}
		if until := <-asked; until.After(e.patience.Add(drainBound / 4)) {
			t.Errorf("P may take %v more than the bound for revoke %d", until.Sub(e.patience), i)
		}
	}
	answer <- struct{}{}
	for _, e := range all {
		<-e.fenced
	}
}

// TestCloseEndsADismissedRevoke: a revoke waits for a P that was dismissed since. When the transport
// closes, the wait ends with it: Close does not know that P any more.
func TestCloseEndsADismissedRevoke(t *testing.T) {
	tr := newTestConn(t, 0).t
	r := &tr.receiver
	r.init(tr, 4)
	src := &source{r: r, peer: "p", lanes: map[uint32]*lane{}, dying: map[uint32]*lane{}, live: map[uint64]*expect{}}
	r.sources["p"] = src
	if _, err := r.expect("t", "p", nil); err != nil {
		t.Fatal(err)
	}
	e := r.expected["t"]
	src.mu.Lock()
	e.ended, e.patience = true, time.Now().Add(time.Hour) // as revoke has it, and P has said that bytes are on their way
	src.mu.Unlock()
	awaited := make(chan struct{})
	go func() {
		defer close(awaited)
		src.await([]*expect{e})
	}()
	r.dismiss("p")
	select {
	case <-e.fenced:
		t.Fatal("the dismissal has fenced it: this test is of no use")
	default:
	}
	r.close()
	tr.cancel()
	for _, c := range []<-chan struct{}{awaited, e.fenced} {
		select {
		case <-c:
		case <-time.After(30 * time.Second):
			t.Fatal("the revoke waits after Close")
		}
	}
}

// TestCloseFencesBesideALane: a lane of one P is not destroyed. When the transport closes, the transfers of the others are fenced all the same,
// and their revokes return.
func TestCloseFencesBesideALane(t *testing.T) {
	tr := newTestConn(t, 0).t
	r := &tr.receiver
	const others = 8
	r.init(tr, others)
	var all []*expect
	for i := range others {
		id := core.TransferID(fmt.Sprint("t", i))
		peer := core.AgentID("p of " + id)
		r.sources[peer] = &source{r: r, peer: peer, lanes: map[uint32]*lane{}, dying: map[uint32]*lane{}, live: map[uint64]*expect{}}
		if _, err := r.expect(id, peer, nil); err != nil {
			t.Fatal(err)
		}
		all = append(all, r.expected[id])
	}
	stands := &lane{id: 1, still: make(chan struct{})}
	r.sources["stands"] = &source{r: r, peer: "stands", lanes: map[uint32]*lane{}, dying: map[uint32]*lane{1: stands}, live: map[uint64]*expect{}}
	closed := make(chan error, 1)
	go func() { closed <- r.close() }()
	for _, e := range all {
		select {
		case <-e.fenced:
		case <-time.After(30 * time.Second):
			t.Fatalf("transfer %q waits for another prefill agent's lane", string(e.id))
		}
		if err := tr.Revoke(e.id); err != nil {
			t.Error(err)
		}
	}
	select {
	case err := <-closed:
		t.Errorf("the close does not wait for the lane: %v", err)
	default:
	}
	close(stands.still)
	if err := <-closed; err != nil {
		t.Error(err)
	}
}

// TestLaneThatLives: a lane could not be put into error. That its receives have come back does not make it still: bytes need none.
func TestLaneThatLives(t *testing.T) {
	for _, lives := range []bool{false, true} {
		c := newTestConn(t, 1)
		r := &c.t.receiver
		r.init(c.t, 4)
		l := c.lanes[0]
		l.retired, l.lives, l.posted, l.still = true, lives, 1, make(chan struct{})
		src := &source{r: r, peer: "p", lanes: map[uint32]*lane{}, dying: map[uint32]*lane{l.id: l}, live: map[uint64]*expect{}}
		src.count(l, []verbs.Completion{{Status: verbs.Success, Opcode: verbs.OpReceiveImm, ID: receiveID}})
		still := false
		select {
		case <-l.still:
			still = true
		default:
		}
		if still == lives {
			t.Errorf("it lives: %v, and counts as still: %v", lives, still)
		}
	}
}

// unflushed is a GPU that does not answer a flush.
type unflushed struct{ GPUs }

func (unflushed) Check() error    { return nil }
func (unflushed) Flush(int) error { return fmt.Errorf("a test: %w", core.ErrMayLand) }

// TestUnflushed: a GPU does not answer a flush. A revoke says that bytes may land, before Close and after it, and so does Close. Nobody is told
// an end of a transfer that has failed, nor of one that has arrived.
func TestUnflushed(t *testing.T) {
	tr := newTestConn(t, 0).t
	tr.cfg.GPUs = unflushed{}
	sink := tr.sink.(*coretest.Recorder)
	r := &tr.receiver
	r.init(tr, 8)
	src := &source{r: r, peer: "p", lanes: map[uint32]*lane{}, dying: map[uint32]*lane{}, live: map[uint64]*expect{}}
	r.sources["p"] = src
	for _, id := range []core.TransferID{"revoked", "lost", "arrived", "closed"} {
		if _, err := r.arm(id, "p", 0, 0, 1); err != nil {
			t.Fatal(err)
		}
		e := r.expected[id]
		src.mu.Lock()
		src.watching.Stop()
		src.mu.Unlock()
		switch id {
		case "lost":
			e.begun = time.Now()
			src.disconnect(errors.New("a test"))
		case "arrived":
			src.mu.Lock()
			r.take(e)
			src.fenced(e)
			src.mu.Unlock()
			e.tell(tr.landed(1))
		case "closed":
			if err := r.close(); err != nil {
				t.Error(err)
			}
		}
		if err := tr.Revoke(id); !errors.Is(err, core.ErrMayLand) {
			t.Errorf("the revoke of %q: %v", string(id), err)
		}
	}
	if all := sink.All("received", ""); len(all) > 0 {
		t.Errorf("an end was told: %+v", all)
	}
	if !errors.Is(tr.lands, core.ErrMayLand) {
		t.Errorf("Close would say %v", tr.lands)
	}
}

// TestLaneThatStands: a lane can neither be destroyed nor put into error. Who revokes a transfer that was under way then hears of it.
func TestLaneThatStands(t *testing.T) {
	tr := newTestConn(t, 0).t
	r := &tr.receiver
	r.init(tr, 4)
	src := &source{r: r, peer: "p", lanes: map[uint32]*lane{}, dying: map[uint32]*lane{}, live: map[uint64]*expect{}}
	r.sources["p"] = src
	if _, err := r.expect("t", "p", nil); err != nil {
		t.Fatal(err)
	}
	l := newTestConn(t, 1).lanes[0]
	l.still = make(chan struct{})
	l.once.Do(func() {
		l.stands = fmt.Errorf("a test: %w", core.ErrMayLand)
		close(l.dead)
	})
	tr.mu.Lock()
	tr.shut = true // nobody else destroys it
	tr.mu.Unlock()
	src.mu.Lock()
	src.watching.Stop()
	src.lanes[l.id] = l
	src.cut()
	src.mu.Unlock()
	if err := tr.Revoke("t"); !errors.Is(err, core.ErrMayLand) {
		t.Errorf("the revoke: %v", err)
	}
}
