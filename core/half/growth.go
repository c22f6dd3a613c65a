package half

import (
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// growth is a part of an offer whose blocks are ready from a moment on. It counts only when the
// growths before it count: a block is ready when all work that was queued for it is done, on
// every stream.
type growth struct {
	after   core.Moment // 0: it has passed
	ready   []uint32    // as in PartialOffer
	regions []uint32    // as in PartialOffer
	whole   bool        // the engine has offered all blocks
}

// maxGrowths bounds the growths of an offer that wait for their moments.
const maxGrowths = 4096

// grows says whether a growth counts at once. If not, the offer keeps the growth until its moment has passed.
func (h *Set) grows(now time.Time, of *Offer, g growth) bool {
	if fault.On("growth-at-once") && !g.whole || fault.On("offer-at-once") && g.whole {
		g.after = 0
	}
	if g.after == 0 && len(of.growths) == 0 {
		return true
	}
	g.ready, g.regions = slices.Clone(g.ready), slices.Clone(g.regions) // the caller's
	of.growths = append(of.growths, g)
	h.await(now, g.after, core.SideOffer, of.id)
	return false
}

// offerPassed is called when a moment has passed: the growths that have waited for it now count.
func (h *Set) offerPassed(now time.Time, of *Offer, at core.Moment) {
	for i := range of.growths {
		if g := &of.growths[i]; g.after == at || fault.On("any-moment") && g.after != 0 {
			if g.after != at {
				h.awaitNot(g.after)
			}
			g.after = 0
			if fault.On("growth-before-others") && !g.whole {
				of.grow(h.layout, g)
			}
		}
	}
	whole, n := false, 0
	for ; n < len(of.growths) && of.growths[n].after == 0; n++ {
		if whole = of.growths[n].whole; !whole {
			of.grow(h.layout, &of.growths[n])
		}
	}
	if of.growths = of.growths[n:]; len(of.growths) == 0 {
		of.growths = nil
	}
	if whole {
		h.complete(now, of)
	} else {
		h.extend(now, of)
	}
}

// awaitNothing ends all waits of an offer for moments.
func (h *Set) awaitNothing(of *Offer) {
	for i := range of.growths {
		h.awaitNot(of.growths[i].after)
	}
	of.growths = nil
}
