package kv

import "fmt"

// TooMuch says why a peer's load can fit no offer of this layout; "" if it can. The match is
// that of this layout with the peer's; without one both are alike, here and below.
func (s *Selection) TooMuch(l *Layout, m *Match) string {
	if len(s.Blocks) > len(l.Groups) {
		return fmt.Sprintf("the load has %d KV cache groups, %d are registered here", len(s.Blocks), len(l.Groups))
	}
	for g, ids := range s.Blocks {
		from, to := m.ratio(g).sources(0, len(ids), At(s.Tokens, g))
		if n := l.Groups[g].NumBlocks; to-from > uint64(n) || len(ids) > MaxBlocks {
			return fmt.Sprintf("the load wants %d blocks of group %d, which has %d here", to-from, g, n)
		}
	}
	regions := len(l.Regions)
	if m != nil {
		regions = m.regions
	}
	if err := checkRegions(s.Regions, regions); err != nil {
		return "the load is of " + err.Error()
	}
	return ""
}

// Wanted is the part of an offered selection that a load asks for.
func (s *Selection) Wanted(m *Match, load *Selection) (src Selection, err error) {
	if len(load.Blocks) > len(s.Blocks) {
		return src, fmt.Errorf("the load has %d KV cache groups, the offer %d", len(load.Blocks), len(s.Blocks))
	}
	src = Selection{First: make([]uint32, len(load.Blocks)), Blocks: make([][]BlockID, len(load.Blocks))}
	for g, dst := range load.Blocks {
		from, to := m.ratio(g).sources(At(load.First, g), len(dst), At(load.Tokens, g))
		has := uint64(At(s.First, g))
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
// does.
func (s *Selection) BeginsFor(m *Match, load *Selection) error {
	for g, ids := range load.Blocks {
		if from, to := m.ratio(g).sources(At(load.First, g), len(ids), At(load.Tokens, g)); len(s.Blocks[g]) > 0 && from < to && from < uint64(s.First[g]) {
			return fmt.Errorf("the load wants blocks %d to %d of group %d, the offer begins with block %d", from, to, g, s.First[g])
		}
	}
	return nil
}
