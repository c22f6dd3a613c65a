package rdma

import (
	"context"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
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
