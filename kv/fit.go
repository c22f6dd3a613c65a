// A load must fit the offer that it meets: P must have the groups, regions and blocks that D wants.

package kv

import "fmt"

// CheckPeerLoad says why a peer's load can fit no offer of this layout. The match is that of
// this layout with the peer's; without one both are alike, here and below.
func (s *Selection) CheckPeerLoad(l *Layout, m *Match) error {
	if len(s.Blocks) > len(l.Groups) {
		return fmt.Errorf("the load has %d KV cache groups, %d are registered here", len(s.Blocks), len(l.Groups))
	}
	for g, ids := range s.Blocks {
		from, to := m.ratio(g).sources(0, len(ids), OrZero(s.Tokens, g))
		if n := l.Groups[g].NumBlocks; to-from > uint64(n) || len(ids) > MaxBlocks {
			return fmt.Errorf("the load wants %d blocks of group %d, which has %d here", to-from, g, n)
		}
	}
	regions := len(l.Regions)
	if m != nil {
		regions = m.regions
	}
	if err := checkRegions(s.Regions, regions); err != nil {
		return fmt.Errorf("the load is of %w", err)
	}
	return nil
}

// Wanted is the part of an offered selection that a load asks for.
func (s *Selection) Wanted(m *Match, load *Selection) (src Selection, err error) {
	if len(load.Blocks) > len(s.Blocks) {
		return src, fmt.Errorf("the load has %d KV cache groups, the offer %d", len(load.Blocks), len(s.Blocks))
	}
	src = Selection{First: make([]uint32, len(load.Blocks)), Blocks: make([][]BlockID, len(load.Blocks))}
	for g, dst := range load.Blocks {
		from, to := m.ratio(g).sources(OrZero(load.First, g), len(dst), OrZero(load.Tokens, g))
		has := uint64(OrZero(s.First, g))
		switch end := has + uint64(len(s.Blocks[g])); {
		case from == to:
			continue
		case from < has:
			return src, fmt.Errorf("the load wants blocks %d to %d of group %d, the offer begins with block %d", from, to, g, has)
		case to > end:
			return src, fmt.Errorf("the load wants blocks %d to %d of group %d, the offer has %d", from, to, g, end)
		}
		src.First[g], src.Blocks[g] = uint32(from), s.Blocks[g][from-has:to-has]
	}
	return src, nil
}

// BeginsFor says whether what has been offered of a transfer so far begins where its load
// does. The selection has an element for each of the load's groups (OfGroups).
func (s *Selection) BeginsFor(m *Match, load *Selection) error {
	for g, ids := range load.Blocks {
		if from, to := m.ratio(g).sources(OrZero(load.First, g), len(ids), OrZero(load.Tokens, g)); len(s.Blocks[g]) > 0 && from < to && from < uint64(s.First[g]) {
			return fmt.Errorf("the load wants blocks %d to %d of group %d, the offer begins with block %d", from, to, g, s.First[g])
		}
	}
	return nil
}
