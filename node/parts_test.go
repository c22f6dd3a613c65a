//go:build invariants

package node

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/wire"
)

// partsTaken notes how many transfers a machine is told of in one step, or in one hold of the agent's lock.
type partsTaken struct {
	clock *countedClock
	holds map[int]int // by the hold of the lock
	seen  map[core.TransferID]int
}

func (p *partsTaken) step(_ time.Time, e core.Event, _ []core.Action) {
	var ids []core.TransferID
	switch v := e.(type) {
	case core.RenewMessage:
		ids = slices.Concat(v.Loads, v.Claims)
	case core.FinishMessage:
		ids = []core.TransferID{v.ID}
	}
	p.holds[p.clock.asked] += len(ids)
	for _, id := range ids {
		p.seen[id]++
	}
}

// TestMessagesOfManyTransfers: of the longest messages a few transfers are looked up at a time,
// each once. One transfer more is not read, and a peer that was not met has none looked up.
func TestMessagesOfManyTransfers(t *testing.T) {
	names := func(form string, n int) []string {
		list := make([]string, n)
		for i := range list {
			list[i] = fmt.Sprintf(form, i)
		}
		return list
	}
	renew := func(loads, claims int) *wire.Request {
		return &wire.Request{Kind: wire.KindRenew, Renew: &wire.Renew{Loads: names("load-%d", loads), Claims: names("claim-%d", claims)}}
	}
	finish := func(n int) *wire.Request {
		req := &wire.Request{Kind: wire.KindFinish}
		for _, id := range names("finish-%d", n) {
			req.Finishes = append(req.Finishes, wire.Finish{TransferID: id})
		}
		return req
	}
	for _, c := range []struct {
		message *wire.Request
		from    string
		named   int // -1: the message is not read
	}{
		{renew(1024, 1024), "m", 2048}, {renew(1025, 0), "m", -1}, {renew(0, 1025), "m", -1},
		{finish(4096), "m", 4096}, {finish(4097), "m", -1},
		{renew(1024, 1024), "d", 0}, {finish(4096), "d", 0},
	} {
		b, err := c.message.MarshalMsg(nil)
		if err != nil {
			t.Fatal(err)
		}
		what := fmt.Sprintf("kind %d of %d bytes from %q", c.message.Kind, len(b), c.from)
		req := new(wire.Request)
		if err := wire.Decode(b, req); (err != nil) != (c.named < 0) {
			t.Errorf("%s: %v", what, err)
		}
		if c.named < 0 {
			continue
		}
		a, _ := agentWithoutBus(t)
		met := helloOf(nil)
		met.From = "m"
		if rep := a.server.serve("via", met); rep.Code != 0 {
			t.Fatalf("a hello that fits is refused: %+v", rep)
		}
		taken := &partsTaken{clock: &countedClock{Clock: a.machine.clock}, holds: map[int]int{}, seen: map[core.TransferID]int{}}
		a.machine.clock, a.machine.inner = taken.clock, machine.New(a.machine.inner.Layout(), core.Options{OnStep: taken.step})
		req.From = c.from
		rep := a.server.serve("via", req)
		if req.Kind == wire.KindRenew && len(rep.Statuses) != 2048 {
			t.Errorf("%s: %d statuses", what, len(rep.Statuses))
		}
		for _, n := range taken.holds {
			if n > core.MaxLocked || n > 64 {
				t.Errorf("%s: %d are looked up at a time", what, n)
			}
		}
		for id, n := range taken.seen {
			if n != 1 {
				t.Errorf("%s: %q is looked up %d times", what, id, n)
			}
		}
		if len(taken.seen) != c.named {
			t.Errorf("%s: %d are looked up, %d should be", what, len(taken.seen), c.named)
		}
	}
}
