package core

import "time"

// outcome is what a half tells the layer above, which knows whether the engine has named the
// half or it is a part. A half knows nothing of that layer: the layer hears of the half's
// outcomes when the half has had its turn, and before another half has one.
type outcome struct {
	claim *claim // of these three, one
	load  *load
	offer *offer
	over  bool // the half has ended; else its end has begun
}

// settle takes the outcomes to the layer, which may end other halves, whose outcomes follow.
func (m *Machine) settle(now time.Time) {
	if len(m.outcomes) > 0 {
		m.settleAll(now)
	}
}

func (m *Machine) settleAll(now time.Time) {
	for i := 0; i < len(m.outcomes); i++ {
		switch o := m.outcomes[i]; {
		case o.load != nil:
			m.loadEnded(now, o.load, o.over)
		case o.claim != nil:
			m.claimEnded(now, o.claim, o.over)
		default:
			m.offerEnded(now, o.offer)
		}
	}
	clear(m.outcomes)
	m.outcomes = m.outcomes[:0]
}
