package devices_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/node"
	"github.com/kvconn/kvconn/rig/timed"
)

// TestCloseInItsTime: whatever is stuck, Close returns within close_timeout_s.
func TestCloseInItsTime(t *testing.T) {
	const closes = 3 * time.Second
	halts := func(s *side) (free func()) {
		s.Halt(true)
		return func() { s.Halt(false) }
	}
	withholds := func(s *side, call string) (free func()) {
		s.Block(call)
		return s.Unblock
	}
	for what, stick := range map[string]func(p, d *side) (stuck *side, free func()){
		"prefill's device halts":                         func(p, d *side) (*side, func()) { return p, halts(p) },
		"decode's device halts":                          func(p, d *side) (*side, func()) { return d, halts(d) },
		"prefill's driver does not take its memory back": func(p, d *side) (*side, func()) { return p, withholds(p, "cuMemFreeHost") },
	} {
		t.Run(what, func(t *testing.T) {
			timed.Within(t, closes+2*time.Second, "Close", func() time.Duration {
				var sides [2]*side
				for i, role := range []string{node.RolePrefill, node.RoleDecode} {
					c := config(role)
					c.StallTimeout, c.CloseTimeout = node.Seconds(time.Hour), node.Seconds(closes)
					sides[i] = open(t, c, i, 0)
				}
				p, d := sides[0], sides[1]
				stuck, release := stick(p, d)
				t.Cleanup(release)
				for i := range blocks { // more transfers than one
					id := core.TransferID(fmt.Sprint(i))
					p.offer(id, i, 1, 0)
					d.load(id, p, i, 1, 0)
				}
				eventually(t, "something is stuck, or all has ended", func() bool {
					return p.Count("stuck") > 0 || p.Count("blocked") > 0 || len(p.GetFinished()) > 0
				})
				began := time.Now()
				closed := closing(stuck)
				err := ends(t, closed)
				took := time.Since(began)
				if errors.Is(err, core.ErrClosed) {
					t.Errorf("closed twice: %v", err)
				}
				t.Log(took, err)
				release()
				for _, s := range sides {
					_ = s.Agent.Close()
				}
				p.settled()
				return took
			})
		})
	}
}
