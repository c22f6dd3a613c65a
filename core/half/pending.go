package half

import (
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// pendingBlocks are blocks of an offer that are ready from a moment on. They count only when those
// before them count: a block is ready when all work that was queued for it is done, on
// every stream.
type pendingBlocks struct {
	after   core.Moment // 0: it has passed
	ready   []uint32    // as in PartialOffer
	regions []uint32    // as in PartialOffer
	whole   bool        // the engine has offered all blocks
}

// maxPending bounds the partial offers of one transfer that wait for their moments.
const maxPending = 4096

// readyNow says whether blocks count at once. If not, the offer keeps them as pending until their moment has passed.
func (h *Set) readyNow(now time.Time, of *Offer, g pendingBlocks) bool {
	if fault.On("pending-at-once") && !g.whole || fault.On("offer-at-once") && g.whole {
		g.after = 0
	}
	if g.after == 0 && len(of.pending) == 0 {
		return true
	}
	g.ready, g.regions = slices.Clone(g.ready), slices.Clone(g.regions) // the caller's
	of.pending = append(of.pending, g)
	h.await(now, g.after, core.SideOffer, of.id)
	return false
}

// offerPassed is called when a moment has passed: the blocks that have waited for it now count.
func (h *Set) offerPassed(now time.Time, of *Offer, at core.Moment) {
	for i := range of.pending {
		if g := &of.pending[i]; g.after == at || fault.On("any-moment") && g.after != 0 {
			if g.after != at {
				h.awaitNot(g.after)
			}
			g.after = 0
			if fault.On("pending-before-others") && !g.whole {
				of.markReady(h.layout, g)
			}
		}
	}
	whole, n := false, 0
	for ; n < len(of.pending) && of.pending[n].after == 0; n++ {
		if whole = of.pending[n].whole; !whole {
			of.markReady(h.layout, &of.pending[n])
		}
	}
	if of.pending = of.pending[n:]; len(of.pending) == 0 {
		of.pending = nil
	}
	if whole {
		h.complete(now, of)
	} else {
		h.extend(now, of)
	}
}

// awaitNothing ends all waits of an offer for moments.
func (h *Set) awaitNothing(of *Offer) {
	for i := range of.pending {
		h.awaitNot(of.pending[i].after)
	}
	of.pending = nil
}
