package half

import "time"

// outcome is what a half tells who stands above. Only Above knows whether the engine
// has named the half or the half is a part. Above hears of a half's outcomes after the
// half's turn and before another half's turn: those of the last turn at the end of the step.
type outcome struct {
	claim *claim // one of these three is set
	load  *load
	offer *Offer
	over  bool // the half has ended; else its end has begun
}

// tell has who stands above hear, with the row that a half has just taken, what has become of the half.
func (h *Set) tell(half string, id ID, o outcome) {
	word := "Lost"
	if o.over {
		word = "Ended"
	}
	h.taken.word(half, id, word)
	h.outcomes = append(h.outcomes, o)
}

// Settle takes the outcomes to Above, which may end other halves, whose outcomes follow.
func (h *Set) Settle(now time.Time) {
	for i := 0; i < len(h.outcomes); i++ {
		switch o := h.outcomes[i]; {
		case o.load != nil:
			h.above.LoadEnded(now, o.load.report(now), o.over)
		case o.claim != nil:
			h.above.ClaimEnded(o.claim.report(now), o.over)
		default:
			h.above.OfferEnded(now, o.offer)
		}
	}
	clear(h.outcomes)
	h.outcomes = h.outcomes[:0]
}
