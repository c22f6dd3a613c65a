package core

import "time"

// outcome is what a half tells the layer above. Only that layer knows whether the engine
// has named the half or the half is a part. The layer hears of a half's outcomes after the
// half's turn and before another half's turn.
type outcome struct {
	claim *claim // one of these three is set
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
