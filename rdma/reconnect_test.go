package rdma

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/kvconn/kvconn/core"
)

// TestAskedWhileGivingUp: a D that asks for lanes after it was told that no path is left is answered, and not forgotten
// with what P gives up. What a D that is gone had asked for is forgotten.
func TestAskedWhileGivingUp(t *testing.T) {
	for _, c := range []struct {
		err   error
		wants step
	}{
		{fmt.Errorf("%w: port p0 is down", errNoPath), stepConnect},
		{fmt.Errorf("%w: the memory was another", core.ErrOtherWay), stepConnect},
		{core.ErrAbsent, stepNone},
		{errRefused, stepNone},
		{context.DeadlineExceeded, stepNone},
	} {
		cn := newTestConn(t, 1)
		cn.mu.Lock()
		cn.reconnecting = true // the test reconnects
		cn.tasks |= makeLanes
		cn.breakLane(cn.lanes[0], errors.New("test"))
		cn.lost = nil // as D has said
		cn.giveUp(c.err)
		if next := cn.next(); next != c.wants {
			t.Errorf("after %v the next step is %d, want %d", c.err, next, c.wants)
		}
		cn.tasks = 0
		cn.mu.Unlock()
	}
}
