package core

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// tickLoads ends loads that have kept the engine's blocks for too long. A P that lives, says
// that it works, and sends a byte now and then must not keep them for ever. Nor may a driver of D's that does not answer keep P's:
// P hears of the end at once. D's engine gets its blocks when the fence has returned.
func (m *Machine) tickLoads(now time.Time) {
	var late []TransferID
	for id, ld := range m.loads.byID {
		if m.slow(now, ld) || m.stuck(now, ld) {
			late = append(late, id)
		}
	}
	slices.Sort(late)
	for _, id := range late {
		ld := m.loads.get(id)
		if ld == nil { // another part of the same fan-in may have taken it along
			continue
		}
		reason := fmt.Sprintf("prefill agent %s has not sent it within %v (load_timeout_s); the load is %s", ld.peer, m.opt.Load, ld.state)
		if !m.slow(now, ld) {
			reason = fmt.Sprintf("the decode agent's memory was not ready within %v (moment_timeout_s): "+
				"its driver does not answer, most likely; the load is %s", m.opt.MomentTimeout, ld.state)
		}
		m.endLoad(now, ld, ending{Failed, reason}, true)
		m.settle(now)
	}
}

func (m *Machine) slow(now time.Time, ld *load) bool {
	return (ld.state == loadAwaiting || ld.state.armed()) && !now.Before(ld.endBy) && !fault.On("waits-for-slow")
}

func (m *Machine) stuck(now time.Time, ld *load) bool {
	held := ld.state == loadExpecting || ld.state == loadRestarting
	return held && now.Sub(ld.held) >= m.opt.MomentTimeout && !fault.On("held-for-ever")
}
