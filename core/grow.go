package core

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// grown is what an engine has given of a transfer while it still works on the
// request. Its blocks are of the transfer until Retract's reading has ended, or,
// once it is offered, until the Report.
type grown struct {
	ready []uint32 // per region: blocks of the prompt, from its start, that are there
	sent  []uint32 // what of it the write under way was given; nil: nothing is under way
}

// Grow says that a part of a transfer is there: what a D has asked for of it moves
// while the engine computes the rest. Offer must follow, with these blocks and the
// others; or Retract, if the engine takes them back. The end of a transfer that was
// given up meanwhile is told by Offer; here it is no error.
func (m *Machine) Grow(now time.Time, r GrowRequest) error {
	if err := checkID(r.ID); err != nil {
		return err
	}
	if m.closed {
		return ErrClosed
	}
	if _, gone := m.ended.byID[r.ID]; gone {
		return nil
	}
	list := m.halfOf(r.ID)
	for _, of := range list {
		if !of.offered.IsZero() {
			return fmt.Errorf("%w: transfer %q is offered already, nothing can be added", ErrDuplicate, string(r.ID))
		}
	}
	var before *offer
	if len(list) > 0 {
		before = list[0] // all parts of a transfer are given the same
	}
	if err := m.checkGrow(before, &r); err != nil {
		return fmt.Errorf("%w: transfer %q: %w", ErrInvalid, string(r.ID), err)
	}
	if before == nil || slices.ContainsFunc(list, func(of *offer) bool { return of.state == offerEarly }) {
		if err := m.announce(now, r.ID); err != nil {
			return err
		}
	}
	m.reportWant(r.ID, OK, "", 0) // the engine did not wait for it
	for _, of := range m.halfOf(r.ID) {
		m.grow(now, of, &r)
	}
	return nil
}

// halfOf is P's half of a transfer, or the parts of it that have not ended.
func (m *Machine) halfOf(id TransferID) []*offer {
	if w := m.wholes[id]; w != nil {
		return m.live(w)
	}
	if of := m.offers[id]; of != nil {
		return []*offer{of}
	}
	return nil
}

func (m *Machine) checkGrow(of *offer, r *GrowRequest) error {
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
		return fmt.Errorf("%d groups are ready, %d are being computed, first blocks are of %d: %d groups are registered", len(r.Ready), len(r.Computing), len(r.First), groups)
	}
	if err := checkRegions(r.Regions, len(m.layout.Regions)); err != nil {
		return err
	}
	for g := range groups {
		first, have := uint64(at(r.First, g)), 0
		if of != nil && g < len(of.blocks) && len(of.blocks[g]) > 0 {
			first, have = uint64(of.first[g]), len(of.blocks[g])
		}
		if g < len(r.Blocks) {
			have += len(r.Blocks[g])
		}
		if n := uint64(max(at(r.Ready, g), at(r.Computing, g))); n > first+uint64(have) {
			return fmt.Errorf("blocks up to %d of group %d are ready or being computed, those up to %d are given", n, g, first+uint64(have))
		}
		if have > MaxBlocks {
			return fmt.Errorf("%d blocks of group %d, at most %d are supported", have, g, MaxBlocks)
		}
	}
	return nil
}

func (m *Machine) grow(now time.Time, of *offer, r *GrowRequest) {
	if of.ready == nil {
		groups := len(m.layout.Groups)
		of.ready = make([]uint32, len(m.layout.Regions))
		of.first, of.blocks = make([]uint32, groups), make([][]BlockID, groups)
	}
	for g, ids := range r.Blocks {
		if len(of.blocks[g]) == 0 {
			of.first[g] = at(r.First, g)
		}
		of.blocks[g] = append(of.blocks[g], ids...)
	}
	more := func(region uint32) {
		n := at(r.Ready, int(m.layout.Regions[region].Group))
		if fault.On("grows-unready") {
			n = of.first[0] + uint32(len(of.blocks[0]))
		}
		of.ready[region] = max(of.ready[region], n)
	}
	if r.Regions == nil || fault.On("grows-all-layers") {
		for i := range of.ready {
			more(uint32(i))
		}
	}
	for _, region := range r.Regions {
		more(region)
	}
	of.prompt = cmp.Or(of.prompt, r.Prompt)
	m.extend(now, of)
}

// checkPrompt: the engine says one prompt of a transfer, however often it says it.
func (of *offer) checkPrompt(prompt uint64) error {
	if prompt != 0 && of.prompt != 0 && prompt != of.prompt {
		return fmt.Errorf("its prompt has the fingerprint %016x, and had %016x before; give each request a transfer_id of its own", prompt, of.prompt)
	}
	return nil
}

// extend gives the transport what has become ready, if D has asked for it.
func (m *Machine) extend(now time.Time, of *offer) {
	if of.load == nil || of.ready == nil || of.state != offerPrefill && of.state != offerGrowing {
		return
	}
	if err := m.samePrompt(of); err != nil && !fault.On("grows-any-prompt") {
		m.endOffer(now, of, Refused, err.Error(), true)
		return
	}
	begin := of.sent
	if fault.On("grows-from-the-start") && len(begin) > 0 {
		begin = make([]uint32, len(begin))
	}
	if of.state == offerPrefill && !slices.ContainsFunc(of.ready, func(n uint32) bool { return n > 0 }) || slices.Equal(begin, of.ready) {
		return
	}
	if err := firstOf(of.first, of.blocks, of.load); err != nil { // of a group whose first blocks have come just now, too
		m.endOffer(now, of, Refused, err.Error(), true)
		return
	}
	if of.state == offerPrefill {
		m.count.Grown++
		of.state, of.sendAt, of.deadline = offerGrowing, now, now.Add(of.load.Lease)
	}
	of.sent = slices.Clone(of.ready)
	w := m.writeOf(of)
	w.SrcFirst, w.Src, w.Begin, w.End, w.Extends = slices.Clone(of.first), slices.Clone(of.blocks), begin, of.sent, begin != nil
	m.act(w)
}

// firstOf says whether what has been given of a transfer begins where its load does.
func firstOf(begin []uint32, blocks [][]BlockID, l *LoadMessage) error {
	for g, ids := range l.Blocks {
		if from, to := l.Match.ratio(g).sources(at(l.First, g), len(ids), at(l.Tokens, g)); len(blocks[g]) > 0 && from < to && from < uint64(begin[g]) {
			return fmt.Errorf("the load wants blocks %d to %d of group %d, the offer begins with block %d", from, to, g, begin[g])
		}
	}
	return nil
}

// checkGrown: an offer is of the prompt that was said before, and has the blocks that
// were given.
func (of *offer) checkGrown(r *OfferRequest) error {
	if err := of.checkPrompt(r.Prompt); err != nil || of.ready == nil {
		return err
	}
	for g, ids := range of.blocks {
		if len(ids) == 0 {
			continue
		}
		if g >= len(r.Blocks) || len(r.Blocks[g]) < len(ids) || !slices.Equal(r.Blocks[g][:len(ids)], ids) && !fault.On("other-blocks") || at(r.First, g) != of.first[g] {
			return fmt.Errorf("its first %d blocks of group %d are not those that it had while it grew; take them back first", len(ids), g)
		}
	}
	return nil
}

// finishGrowing gives the transport the rest of a write that has begun.
func (m *Machine) finishGrowing(now time.Time, of *offer) {
	first, src, err := m.joinHalves(of)
	if err != nil {
		m.endOffer(now, of, Refused, err.Error(), true)
		return
	}
	of.state = offerSending
	w := m.writeOf(of)
	w.SrcFirst, w.Src, w.Begin, w.Extends = first, src, fault.Pick("ends-from-the-start", of.sent, nil), true
	m.act(w)
}

// Retract takes back the blocks that Grow gave, for instance because the engine
// preempts the request. They are the engine's again when Reading says no. The
// request is still known, and D loads it from the beginning when it grows again or
// is offered.
func (m *Machine) Retract(now time.Time, id TransferID) error {
	if err := checkID(id); err != nil {
		return err
	}
	for i, of := range m.halfOf(id) {
		if fault.On("forgets-shares") && i > 0 {
			break
		}
		if !of.offered.IsZero() {
			return fmt.Errorf("%w: transfer %q is offered: its blocks are free with its report, which a cancel brings about", ErrInvalid, string(id))
		}
		of.first, of.blocks, of.grown = nil, nil, grown{}
		switch {
		case of.state == offerGrowing:
			m.count.Retracted++
			of.state, of.retracted, of.ends = offerStopping, true, of.landed
			if !fault.On("not-stopped") {
				m.act(StopWrite{ID: of.id})
			}
		case of.state == offerStopping && !of.retracted: // for its end
			of.retracted, of.ends = true, true
		}
	}
	return nil
}

// Reading says whether blocks that were given before a Retract may still be read.
func (m *Machine) Reading(id TransferID) bool {
	return slices.ContainsFunc(m.halfOf(id), func(of *offer) bool {
		return of.state == offerGrowing || of.state == offerStopping && (of.retracted || of.offered.IsZero()) && !(fault.On("not-read") && of.retracted)
	})
}

// maxVoided is more loads than a lane of D may repeat in the time that it insists.
const maxVoided = 64

// startOver: a retracted write's blocks are read no more, D is to load anew.
func (m *Machine) startOver(now time.Time, of *offer) {
	of.retracted = false
	void := digest(of.load.Grant)
	of.voided = append(of.voided[max(0, len(of.voided)-maxVoided+1):], void)
	if fault.On("anew-untold") {
		of.voided = nil
	} else {
		m.act(SendFinish{Peer: of.peer, ID: of.id, Code: StartOver, Reason: void})
	}
	of.load, of.sendAt = nil, time.Time{}
	of.state, of.deadline = offerPrefill, now.Add(m.opt.Lease)
	if !of.offered.IsZero() {
		of.state = offerReady
	}
}

// clone is blocks to which others can be added without a change of the original.
func clone(blocks [][]BlockID) [][]BlockID {
	out := slices.Clone(blocks)
	for g := range out {
		out[g] = slices.Clip(out[g])
	}
	return out
}

// digest names a grant: a StartOver is of one load, and void for a later one.
func digest(grant []byte) string {
	sum := sha256.Sum256(grant)
	return fmt.Sprintf("%x", sum[:8])
}

// loadAnew takes P's word that it has taken back what it had begun to send.
func (m *Machine) loadAnew(ld *load, which string) {
	if (ld.state != loadRequesting && ld.state != loadWaiting) || digest(ld.grant) != which && !fault.On("anew-at-every-word") {
		return
	}
	m.count.Retries++
	m.seq++
	ld.seq = m.seq // what P says to the old load is void
	if fault.On("anew-without-fence") {
		ld.state = loadExpecting
		m.act(Expect{ID: ld.id, Peer: ld.peer, First: ld.first, Blocks: ld.blocks, Tokens: ld.tokens, Regions: ld.regions})
		return
	}
	ld.again, ld.anew = true, true
	m.fence(ld)
}
