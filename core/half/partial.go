// While prefill goes on, the engine gives the blocks that are ready, and P writes those that D has asked for.

package half

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/kv"
)

// MayGrow says why no partial offer can add to an offer of this transfer, if none can.
func (of *Offer) MayGrow(id ID) error {
	switch {
	case !of.offered.IsZero():
		return fmt.Errorf("%w: transfer %q is offered already, so no partial offer can add to it", core.ErrDuplicate, string(id))
	case len(of.pending) >= maxPending:
		return fmt.Errorf("%w: %d partial offers of transfer %q wait for their moments", core.ErrOverload, len(of.pending), string(id))
	}
	return nil
}

// Grow takes a partial offer, whose blocks follow those that the engine has given before.
func (h *Set) Grow(now time.Time, of *Offer, r *core.PartialOffer) {
	if of.ready == nil {
		of.ready = make([]uint32, len(h.layout.Regions))
		of.held = of.held.OfGroups(len(h.layout.Groups))
	}
	for g, ids := range r.Blocks {
		if len(of.held.Blocks[g]) == 0 {
			of.held.First[g] = kv.OrZero(r.First, g)
		}
		of.held.Blocks[g] = append(of.held.Blocks[g], ids...)
	}
	of.prompt = cmp.Or(of.prompt, r.Prompt)
	if of.state.ends() {
		return // nothing of it is sent any more, whenever it is ready
	}
	if g := (pendingBlocks{after: r.After, ready: r.Ready, regions: r.Regions}); h.readyNow(now, of, g) {
		of.markReady(h.layout, &g)
		h.extend(now, of)
	}
}

// CheckPartialOffer refuses a partial offer that does not continue what the offer has; of is nil if there is no offer.
func (h *Set) CheckPartialOffer(of *Offer, r *core.PartialOffer) error {
	groups := len(h.layout.Groups)
	if err := cmp.Or(h.layout.CheckBlocks(r.Blocks), of.checkPrompt(r.Prompt)); err != nil {
		return err
	}
	if max(len(r.Ready), len(r.Computing)) > groups || len(r.First) > groups {
		return fmt.Errorf("ready has %d groups, computing %d and first_block %d, but %d groups are registered", len(r.Ready), len(r.Computing), len(r.First), groups)
	}
	if err := h.layout.CheckRegions(r.Regions); err != nil {
		return err
	}
	for g := range groups {
		first, have := uint64(kv.OrZero(r.First, g)), 0
		var held []kv.BlockID
		if of != nil && g < len(of.held.Blocks) && len(of.held.Blocks[g]) > 0 {
			held = of.held.Blocks[g]
			first, have = uint64(of.held.First[g]), len(held)
		}
		if g < len(r.Blocks) {
			if err := h.layout.CheckEntries(g, held, first+uint64(have), r.Blocks[g]); err != nil {
				return err
			}
			have += len(r.Blocks[g])
		}
		if n := uint64(max(kv.OrZero(r.Ready, g), kv.OrZero(r.Computing, g))); n > first+uint64(have) {
			return fmt.Errorf("blocks up to %d of group %d are said to be ready or being computed, but block ids are given up to %d only", n, g, first+uint64(have))
		}
		if have > kv.MaxBlocks {
			return fmt.Errorf("%d blocks of group %d, at most %d are supported", have, g, kv.MaxBlocks)
		}
	}
	return nil
}

// checkPrompt refuses a second prompt of one transfer.
func (of *Offer) checkPrompt(prompt uint64) error {
	if of != nil && prompt != 0 && of.prompt != 0 && prompt != of.prompt {
		return fmt.Errorf("its prompt has the fingerprint %016x, but its earlier offers had %016x: give each request a transfer_id of its own", prompt, of.prompt)
	}
	return nil
}

// CheckPartial refuses an offer with another prompt, or other blocks, than its partial
// offers had.
func (of *Offer) CheckPartial(r *core.OfferRequest) error {
	if err := of.checkPrompt(r.Prompt); err != nil || of.ready == nil {
		return err
	}
	for g, ids := range of.held.Blocks {
		if len(ids) == 0 {
			continue
		}
		if g >= len(r.Blocks) || len(r.Blocks[g]) < len(ids) || !slices.Equal(r.Blocks[g][:len(ids)], ids) && !fault.On("other-blocks") || kv.OrZero(r.First, g) != of.held.First[g] {
			return fmt.Errorf("its first %d blocks of group %d differ from the blocks that were offered before: withdraw the transfer first", len(ids), g)
		}
	}
	return nil
}

func (of *Offer) markReady(l *kv.Layout, g *pendingBlocks) {
	more := func(region uint32) {
		n := kv.OrZero(g.ready, int(l.Regions[region].Group))
		if fault.On("partial-unready") {
			n = of.held.First[0] + uint32(len(of.held.Blocks[0]))
		}
		of.ready[region] = max(of.ready[region], n)
	}
	if g.regions == nil || fault.On("partial-all-layers") {
		for i := range of.ready {
			more(uint32(i))
		}
	}
	for _, region := range g.regions {
		more(region)
	}
}

// extend gives the transport the blocks that have become ready, if D has asked for them.
func (h *Set) extend(now time.Time, of *Offer) {
	if of.load == nil || of.ready == nil || !of.state.growing() {
		return
	}
	if err := h.samePrompt(of); err != nil && !fault.On("partial-any-prompt") {
		h.EndOffer(now, of, whenMisfits, Ending{core.Refused, err.Error()})
		return
	}
	begin := of.sent
	if begin == nil && !slices.ContainsFunc(of.ready, func(n uint32) bool { return n > 0 }) || slices.Equal(begin, of.ready) {
		return
	}
	if err := of.held.BeginsFor(of.load.Match, &of.load.Selection); err != nil { // of a group whose first blocks have come just now, too
		h.EndOffer(now, of, whenMisfits, Ending{core.Refused, err.Error()})
		return
	}
	next := of.state
	if begin == nil {
		h.Count.Partial++
		if next = offerPartial; of.state == offerAwaiting {
			next = offerFinishing
		}
		of.sendAt, of.deadline = now, now.Add(of.load.Lease)
	}
	if fault.On("partial-from-the-start") && len(begin) > 0 {
		begin = make([]uint32, len(begin))
	}
	of.sent = slices.Clone(of.ready)
	w := of.reads(kv.Selection{First: slices.Clone(of.held.First), Blocks: slices.Clone(of.held.Blocks)})
	w.Begin, w.End, w.Extends = begin, of.sent, begin != nil
	if w.Extends && fault.On("extended-twice") {
		h.offerTo(of, whenGrown, next, w, w)
		return
	}
	h.offerTo(of, whenGrown, next, w)
}
