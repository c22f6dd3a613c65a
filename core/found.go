package core

import (
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// ResolvedParts answers Resolve of an engine of which this agent loads in parts:
// from now on the half is one of several.
func (m *Machine) ResolvedParts(now time.Time, id TransferID, seq uint64, found []FoundPart) {
	ld := m.loads[id]
	if ld == nil || ld.seq != seq || ld.state != loadResolving || ld.join != nil {
		return
	}
	if ld.given {
		for i := range found {
			if fault.On("found-not-told") || fault.On("found-first-told") && i > 0 {
				break
			}
			m.act(SendFinish{Peer: found[i].Peer, ID: found[i].Share.Part(id), Code: ld.code, Reason: ld.reason})
		}
		m.reportLoad(now, ld)
		return
	}
	j := &join{id: id, token: ld.token, parts: partIDs(id, found), of: ld.from, found: found, claim: ld.claim, started: ld.started, blocks: countBlocks(ld.blocks), adding: true}
	j.left = len(found)
	if fault.On("found-claim-lost") {
		j.found = nil
	}
	m.dropLoad(ld)
	m.joins[id] = j
	for i := range found {
		f := &found[i]
		part := m.layout.cut(ld.first, ld.blocks, f)
		m.seq++
		of := *ld // what was claimed or tried before
		of.id, of.seq, of.join, of.from = j.parts[i], m.seq, j, f.From
		of.first, of.blocks, of.regions = part.First, part.Blocks, part.Regions
		m.keepLoad(&of)
		m.Resolved(now, of.id, of.seq, f.Peer, f.Opened, OK, "")
	}
	m.partsBegun(now, j)
}

// loadFound is Load of what was claimed, and found to be in parts.
func (m *Machine) loadFound(now time.Time, old *join, r LoadRequest) {
	parts := make([]LoadPart, len(old.found))
	for i := range parts {
		parts[i] = m.layout.cut(r.First, r.Blocks, &old.found[i])
	}
	m.beginParts(now, &join{id: r.ID, parts: partIDs(r.ID, old.found), of: old.of, found: old.found, token: r.Token, blocks: countBlocks(r.Blocks)}, parts, &r)
}

func partIDs(id TransferID, found []FoundPart) []TransferID {
	out := make([]TransferID, len(found))
	for i := range out {
		out[i] = found[i].Share.Part(id)
	}
	return out
}

// cut is what of a load goes between this agent and one of those that were found.
func (l *Layout) cut(first []uint32, blocks [][]BlockID, f *FoundPart) LoadPart {
	p := LoadPart{From: f.From, Share: f.Share}
	n := len(f.Regions)
	if fault.On("found-whole") && n > 0 || fault.On("found-unneeded") && n == 0 {
		n = len(l.Regions)
	}
	switch n {
	case 0: // P is only told that nothing is needed
		return p
	case len(l.Regions):
		p.First, p.Blocks = first, blocks
		return p
	}
	p.First, p.Regions, p.Blocks = first, f.Regions, make([][]BlockID, len(blocks))
	for g := range blocks {
		if l.has(f.Regions, uint32(g)) {
			p.Blocks[g] = blocks[g]
		}
	}
	return p
}
