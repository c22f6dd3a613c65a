// What others may ask of the halves: how many there are, in which states, and whose blocks are in use.

package half

import (
	"time"

	"github.com/kvconn/kvconn/core"
)

// Sizes counts them; it walks over all loads. What stands above is left out.
func (h *Set) Sizes() core.Sizes {
	s := core.Sizes{
		Loads: len(h.loads.byID) + len(h.claims.byID) + len(h.pendingFinishes.byID), Claims: len(h.claims.byID), Peers: len(h.peers),
		Offers: len(h.offers), Early: h.early, Probes: len(h.probes), Moments: len(h.moments), Ended: h.Ended.Len(),
	}
	for _, c := range h.claims.byID {
		if c.state == claimKept {
			s.Kept++
		}
	}
	for _, ld := range h.loads.byID {
		if ld.state == loadWaiting {
			s.Waiting++
		}
	}
	return s
}

// OldestWait is how long the engine has waited for the report that it has waited for longest.
func (h *Set) OldestWait(now time.Time) time.Duration {
	oldest := now
	for _, ld := range h.loads.byID {
		if ld.started.Before(oldest) {
			oldest = ld.started
		}
	}
	for _, of := range h.offers {
		if !of.offered.IsZero() && of.offered.Before(oldest) {
			oldest = of.offered
		}
	}
	return now.Sub(oldest)
}

// At is the agent at the other end of a half, "" if it is not known, and the half's state, "-" if there is no half.
func (h *Set) At(s core.Side, id ID) (peer core.AgentID, state string) {
	of, ld, c := h.offers[id], h.loads.byID[id], h.claims.byID[id]
	switch {
	case s == core.SideOffer && of != nil:
		return of.peer, of.State()
	case s == core.SideOffer:
	case ld != nil:
		return ld.peer, ld.state.String()
	case c != nil:
		return c.peer, c.state.String()
	case h.pendingFinishes.byID[id] != nil:
		return "", "pending-finish"
	}
	return "", "-"
}

// InUse returns the transfers whose blocks may be read or written, now or later.
func (h *Set) InUse() (names []core.TransferID) {
	for id, ld := range h.loads.byID {
		if ld.Count() > 0 {
			names = append(names, h.above.Name(id))
		}
	}
	for id, of := range h.offers {
		if of.InUse() {
			names = append(names, h.above.Name(id))
		}
	}
	return names
}

// InUse says whether blocks of an offer may be read, now or later.
func (of *Offer) InUse() bool {
	return of.held.Count() > 0 || of.state.sending() || of.state.stopping()
}

// LoadInUse says whether there is a load of that id whose blocks may be written, now or later.
func (h *Set) LoadInUse(id ID) bool {
	ld := h.loads.byID[id]
	return ld != nil && ld.Count() > 0
}
