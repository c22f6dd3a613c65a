// All halves of one machine, and Above, by which they tell who stands above them.

package half

import (
	"cmp"
	"iter"
	"maps"
	"reflect"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/invariants"
	"github.com/kvconn/kvconn/kv"
)

// ID names a half, on the wire and in the transports. Above gives it. A half passes it on and cannot take it apart: this package
// does not know whether the id is that of a part, nor of which transfer. The engine knows the transfer by the name that Above.Name gives.
type ID core.TransferID

// Above stands above the halves. It alone knows what the engine has named, and which halves are the parts of one transfer.
type Above interface {
	// Meet is called when a peer names a half that is not there, or that may be one of several. It makes the halves of the
	// transfer's parts, if the transfer has parts. The code is the answer to the peer.
	Meet(now time.Time, who Party, id ID) (core.Code, string)
	// Divided has a half go on as the halves of these ids. Its report says how far it had come. The half has ended, and the new
	// ones have not begun.
	Divided(now time.Time, whole core.Report, ids []core.TransferID, found []core.FoundPart)

	Name(id ID) core.TransferID     // of the transfer, as the engine knows it
	Shares(id ID) []core.TransferID // the offers of the transfer, this one among them, some of which may have ended
	Demanded(id ID) bool            // P's engine waits for the transfer's loads
	Loaded(id ID)                   // an offer has its load now

	// These three tell how a half has ended or, if over is false, that its end has begun. Above may then end other halves.
	ClaimEnded(r core.Report, over bool)
	LoadEnded(now time.Time, r core.Report, over bool)
	OfferEnded(now time.Time, of *Offer)
	Forgotten(id ID) // the halves of an early transfer are gone as if they had not come
}

// Set is all halves of one machine.
type Set struct {
	opt    core.Options
	layout *kv.Layout
	above  Above
	seq    uint64
	awake  time.Time // last time that this process is known to have run
	Count  core.Counters

	// D's half.
	claims          halves[*claim]
	loads           halves[*load]
	pendingFinishes halves[*asked]
	peers           map[core.AgentID]*peer // the P agents that claims and loads wait for

	// P's half.
	offers      map[ID]*Offer
	early       int                     // offers that no call of the engine backs yet
	earlyBlocks int                     // block ids that they hold
	earlyOf     greedy                  // who has brought them
	earlyLoads  greedy                  // and their loads, each with the weight of its block ids
	probes      map[core.AgentID]*probe // the D agents that P asks whether they live
	Ended       Tombstones

	moments map[core.Moment]*awaited // that halves wait for

	ends    int  // offers that this step has ended
	yielded bool // Resume is to come

	outcomes []outcome // Settle takes them
	actions  []core.Action
	taken    observer
}

// New makes a Set for one registered layout; the options have their defaults.
func New(layout *kv.Layout, opt core.Options, above Above) *Set {
	return &Set{
		opt: opt, layout: layout, above: above, taken: observer{tell: opt.OnTransition},
		claims: newHalves[*claim](), loads: newHalves[*load](), pendingFinishes: newHalves[*asked](), peers: map[core.AgentID]*peer{},
		offers: map[ID]*Offer{}, moments: map[core.Moment]*awaited{}, earlyOf: newGreedy(), earlyLoads: newGreedy(), probes: map[core.AgentID]*probe{},
		Ended: newTombstones(opt.MaxTransfers),
	}
}

// Begin begins a step.
func (h *Set) Begin(e core.Event) {
	if h.taken.tell != nil {
		h.taken.event = reflect.TypeOf(e).Name()
	}
	h.ends = 0
	if _, load := e.(core.LoadMessage); load && h.actions == nil {
		h.actions = make([]core.Action, 0, 2) // most have an answer and a Write
	}
}

// End ends a step and returns its actions. If answer is not nil, it is the first of them.
func (h *Set) End(answer core.Action) []core.Action {
	if answer != nil {
		h.actions = slices.Insert(h.actions, 0, answer)
	}
	h.taken.end()
	actions := h.actions
	h.actions = nil
	return actions
}

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

// Len is how many halves there are, and what P must still hear of others.
func (h *Set) Len() int {
	return len(h.claims.byID) + len(h.loads.byID) + len(h.pendingFinishes.byID) + len(h.offers)
}

// Decodes says whether D has a claim or a load of this id, or a pending finish: an end that P must still hear of.
func (h *Set) Decodes(id ID) (claim, load, pendingFinish bool) {
	return h.claims.byID[id] != nil, h.loads.byID[id] != nil, h.pendingFinishes.byID[id] != nil
}

// Offer is P's half of this id; nil if there is none.
func (h *Set) Offer(id ID) *Offer { return h.offers[id] }

// WholeClaims is how many claims are with a whole engine.
func (h *Set) WholeClaims() int { return h.claims.whole() }

// WholeLoads is the number of loads that are with a whole engine, those included that were cancelled and that P must still hear of.
func (h *Set) WholeLoads() int { return h.loads.whole() + h.pendingFinishes.whole() }

// Backed is how many offers P's engine has announced or offered.
func (h *Set) Backed() int { return len(h.offers) - h.early }

// Offers is how many offers there are.
func (h *Set) Offers() int { return len(h.offers) }

// IDs are those of all halves of a side, a claim's for SideClaim; for checks.
func (h *Set) IDs(of core.Side) iter.Seq[ID] {
	switch of {
	case core.SideClaim:
		return maps.Keys(h.claims.byID)
	case core.SideLoad:
		return maps.Keys(h.loads.byID)
	}
	return maps.Keys(h.offers)
}

// name is the name of a half's transfer in texts: the one that the engine uses.
func (h *Set) name(id ID) string { return string(h.above.Name(id)) }

// begin is called before a half is added. If there is none yet, the machine may have got no Tick for long, so its time begins now.
func (h *Set) begin(now time.Time) {
	if h.Len() == 0 {
		h.awake = now
	}
}

// Tick takes the time.
func (h *Set) Tick(now time.Time) {
	h.noticePause(now)
	h.tickMoments(now)
	h.tickOffers(now)
	h.tickProbes(now)
	h.tickLookups(now)
	h.tickLoads(now)
	h.tickPeers(now)
}

// Close ends all halves.
func (h *Set) Close(now time.Time) {
	end, ofOffers := Ending{core.Closed, "the decode agent was closed"}, Ending{core.Closed, "the prefill agent was closed"}
	h.endAll(now, func(c *claim) { h.DropClaim(c.id, Always, end) }, func(ld *load) { h.EndLoad(now, ld.id, end) },
		func(of *Offer) { h.EndOffer(now, of, Always, ofOffers) })
}

// Abandon ends all halves at once, and tells nobody but who stands above.
func (h *Set) Abandon(now time.Time) {
	h.endAll(now, func(c *claim) { h.claimTo(c, Always, claimNone) }, func(ld *load) { h.reportLoad(ld, Always) },
		func(of *Offer) { h.reportOffer(now, of, Always, core.TransferStats{}) })
}

func (h *Set) endAll(now time.Time, claim func(*claim), load func(*load), offer func(*Offer)) {
	for c := range turns(h, now, h.claims.byID, nil) {
		claim(c)
	}
	for ld := range turns(h, now, h.loads.byID, nil) {
		load(ld)
	}
	h.voidPendingFinishes() // the end of another part may have made some just now
	h.restPeers()
	for of := range turns(h, now, h.offers, nil) {
		offer(of)
	}
}

// turns yields, one after the other, those of all for which due is true, and settles the outcomes after each. If the turn of one
// ends another one, or makes due false for it, that one gets no turn. If due is nil, all get a turn.
func turns[K cmp.Ordered, T any](h *Set, now time.Time, all map[K]T, due func(T) bool) iter.Seq[T] {
	return func(yield func(T) bool) {
		var ids []K
		for id, v := range all {
			if due == nil || due(v) {
				ids = append(ids, id)
			}
		}
		slices.Sort(ids) // one order, so that a run can be repeated
		for _, id := range ids {
			if v, there := all[id]; there && (due == nil || due(v)) {
				if !yield(v) {
					return
				}
				h.Settle(now)
			}
		}
	}
}

// Remembered keeps a value for each of the newest transfers, for at most limit of them.
type Remembered[K comparable, T any] struct {
	limit int
	byID  map[K]T
	order []K
}

// Remember makes a Remembered.
func Remember[K comparable, T any](limit int) Remembered[K, T] {
	return Remembered[K, T]{limit: limit, byID: map[K]T{}}
}

// Get is a transfer's value.
func (r *Remembered[K, T]) Get(id K) T { return r.byID[id] }

// Len is the number of transfers that have a value.
func (r *Remembered[K, T]) Len() int { return len(r.byID) }

// Put gives a transfer a value. If limit is reached, the oldest transfer's value goes.
func (r *Remembered[K, T]) Put(id K, v T) {
	if _, known := r.byID[id]; !known {
		for len(r.order) >= r.limit {
			delete(r.byID, r.order[0])
			r.order = r.order[1:]
		}
		r.order = append(r.order, id)
	}
	r.byID[id] = v
}

// Check panics when the order contradicts the values; only in builds with the tag "invariants".
func (r *Remembered[K, T]) Check(what string) {
	invariants.Must(len(r.order) == len(r.byID) && len(r.byID) <= r.limit, "%d %s, %d in order", len(r.byID), what, len(r.order))
}

// sortedKeys gives maps one order, so that a run can be repeated.
func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K {
	return slices.Sorted(maps.Keys(m))
}
