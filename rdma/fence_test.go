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
