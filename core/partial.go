package core

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/kv"
)

// PartialOffer is the engine's word that some blocks of a transfer are ready, while it
// computes the rest: those that a D has asked for move meanwhile. An OfferRequest must follow, with
// these blocks and the others, or Withdraw. If the transfer was given up meanwhile, the OfferRequest
// tells its end; here that is no error.
type PartialOffer struct {
	ID     TransferID
	First  []uint32       // per group, with its first blocks: as of Selection
	Blocks [][]kv.BlockID // per group: the blocks that follow those given before
	// Ready is, per group, how many blocks of the prompt, from its start, are ready.
	Ready []uint32
	// Regions in which they are ready, ascending; nil: all.
	Regions []uint32
	Prompt  uint64 // as of OfferRequest, with the first partial offer at the latest; once said, it holds
	// After is the moment from which on they are ready; 0: they are.
	After Moment
	// Computing is as Ready, of the blocks that the engine's step computes: a later
	// PartialOffer says in which regions they are ready. Here it is only checked.
	Computing []uint32
}

func (m *Machine) stepPartialOffer(now time.Time, r PartialOffer) error {
	if err := checkID(r.ID); err != nil {
		return err
	}
	if m.closed {
		return ErrClosed
	}
	if _, gone := m.ended.get(r.ID); gone {
		return nil
	}
	var before *offer // all parts of a transfer are given the same
	for _, of := range m.halfOf(r.ID) {
		if !of.offered.IsZero() {
			return fmt.Errorf("%w: transfer %q is offered already, so no partial offer can add to it", ErrDuplicate, string(r.ID))
		}
		if len(of.growths) >= maxGrowths {
			return fmt.Errorf("%w: %d partial offers of transfer %q wait for their moments", ErrOverload, len(of.growths), string(r.ID))
		}
		before = cmp.Or(before, of)
	}
	if err := m.checkPartialOffer(before, &r); err != nil {
		return fmt.Errorf("%w: transfer %q: %w", ErrInvalid, string(r.ID), err)
	}
	if err := m.announce(now, r.ID); err != nil {
		return err
	}
	m.reportDemand(r.ID, OK, "", 0) // the engine did not wait for it
	for _, of := range m.halfOf(r.ID) {
		of.add(m.layout, &r)
		if of.state.ends() {
			continue // nothing of it is sent any more, whenever it is ready
		}
		if g := (growth{after: r.After, ready: r.Ready, regions: r.Regions}); m.grows(now, of, g) {
			of.grow(m.layout, &g)
			m.extend(now, of)
			m.settle(now)
		}
	}
	return nil
}

func (m *Machine) checkPartialOffer(of *offer, r *PartialOffer) error {
	groups := len(m.layout.Groups)
	if err := m.layout.CheckBlocks(r.Blocks); err != nil {
		return err
	}
	if of != nil {
		if err := of.checkPrompt(r.Prompt); err != nil {
			return err
		}
	}
	if max(len(r.Ready), len(r.Computing)) > groups || len(r.First) > groups {
		return fmt.Errorf("ready has %d groups, computing %d and first_block %d, but %d groups are registered", len(r.Ready), len(r.Computing), len(r.First), groups)
	}
	if err := m.layout.CheckRegions(r.Regions); err != nil {
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
			if err := m.layout.CheckEntries(g, held, first+uint64(have), r.Blocks[g]); err != nil {
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
func (of *offer) checkPrompt(prompt uint64) error {
	if prompt != 0 && of.prompt != 0 && prompt != of.prompt {
		return fmt.Errorf("its prompt has the fingerprint %016x, but its earlier offers had %016x: give each request a transfer_id of its own", prompt, of.prompt)
	}
	return nil
}

// checkPartial refuses an offer with another prompt, or other blocks, than its partial
// offers had.
func (of *offer) checkPartial(r *OfferRequest) error {
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

// add puts the blocks of a partial offer to those that the engine has given before.
func (of *offer) add(l *kv.Layout, r *PartialOffer) {
	if of.ready == nil {
		of.ready = make([]uint32, len(l.Regions))
		of.held = of.held.OfGroups(len(l.Groups))
	}
	for g, ids := range r.Blocks {
		if len(of.held.Blocks[g]) == 0 {
			of.held.First[g] = kv.OrZero(r.First, g)
		}
		of.held.Blocks[g] = append(of.held.Blocks[g], ids...)
	}
	of.prompt = cmp.Or(of.prompt, r.Prompt)
}

// grow counts blocks as ready.
func (of *offer) grow(l *kv.Layout, g *growth) {
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
func (m *Machine) extend(now time.Time, of *offer) {
	if of.load == nil || of.ready == nil || !of.state.growing() {
		return
	}
	if err := of.samePrompt(); err != nil && !fault.On("partial-any-prompt") {
		m.endOffer(now, of, ending{Refused, err.Error()}, true)
		return
	}
	begin := of.sent
	if begin == nil && !slices.ContainsFunc(of.ready, func(n uint32) bool { return n > 0 }) || slices.Equal(begin, of.ready) {
		return
	}
	if err := of.held.BeginsFor(of.load.Match, &of.load.Selection); err != nil { // of a group whose first blocks have come just now, too
		m.endOffer(now, of, ending{Refused, err.Error()}, true)
		return
	}
	if begin == nil {
		m.count.Partial++
		next := offerPartial
		if of.state == offerAwaiting {
			next = offerFinishing
		}
		m.offerTo(of, next)
		of.sendAt, of.deadline = now, now.Add(of.load.Lease)
	}
	if fault.On("partial-from-the-start") && len(begin) > 0 {
		begin = make([]uint32, len(begin))
	}
	of.sent = slices.Clone(of.ready)
	w := of.write(kv.Selection{First: slices.Clone(of.held.First), Blocks: slices.Clone(of.held.Blocks)})
	w.Begin, w.End, w.Extends = begin, of.sent, begin != nil
	m.act(w)
}

// finishPartial gives the transport the rest of a write that has begun.
func (m *Machine) finishPartial(now time.Time, of *offer) {
	src, err := m.joinHalves(of)
	if err != nil {
		m.endOffer(now, of, ending{Refused, err.Error()}, true)
		return
	}
	m.offerTo(of, offerSending)
	w := of.write(src)
	w.Begin, w.Extends = fault.Pick("offer-from-the-start", of.sent, nil), true
	m.act(w)
}
