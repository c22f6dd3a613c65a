package kv

import (
	"fmt"

	"github.com/kvconn/kvconn/internal/fault"
)

// Selection is "these blocks", from the engine's call to the transport. D's says where a
// load's bytes go. P's says what an offer holds; only First and Blocks count in it. All
// lists but Regions have an element per KV cache group. A list that is shorter, or nil,
// has zeros behind its end. A Selection that was handed over does not change.
type Selection struct {
	First  []uint32    // position in the prompt of the group's first block, in blocks of this side
	Blocks [][]BlockID // in the prompt's order
	// Tokens of the prompt, from its start: nothing behind them is copied. If the number is
	// 0, or the group's blocks are opaque, all is copied that the blocks have room for.
	Tokens  []uint32
	Regions []uint32 // numbers of this side's regions, ascending; nil: all that both sides have
}

// Count is the number of blocks of all groups.
func (s *Selection) Count() (n int) {
	for _, ids := range s.Blocks {
		n += len(ids)
	}
	return n
}

// OfGroups is the selection with an element for each of so many groups.
func (s *Selection) OfGroups(n int) Selection {
	out := Selection{First: make([]uint32, n), Blocks: make([][]BlockID, n)}
	copy(out.First, s.First)
	copy(out.Blocks, s.Blocks)
	return out
}

// Check says why an engine's selection cannot be of this layout.
func (s *Selection) Check(l *Layout) error {
	if err := l.CheckBlocks(s.Blocks); err != nil {
		return err
	}
	if s.First != nil && len(s.First) != len(s.Blocks) {
		return fmt.Errorf("first_block has %d groups, block_ids have %d", len(s.First), len(s.Blocks))
	}
	for g, ids := range s.Blocks {
		if err := l.CheckEntries(g, nil, uint64(OrZero(s.First, g)), ids); err != nil {
			return err
		}
	}
	return nil
}

// CheckLoad is Check for a selection that bytes land in.
func (s *Selection) CheckLoad(l *Layout) error {
	if err := s.Check(l); err != nil {
		return err
	}
	if err := l.CheckUnique(s.Blocks); err != nil {
		return err
	}
	if s.Tokens != nil && len(s.Tokens) != len(s.Blocks) {
		return fmt.Errorf("tokens has %d groups, block_ids have %d", len(s.Tokens), len(s.Blocks))
	}
	for g, n := range s.Tokens {
		// Whatever P's blocks are like, there is then something to copy.
		if begin := uint64(OrZero(s.First, g)) * uint64(l.Groups[g].Tokens); n != 0 && len(s.Blocks[g]) > 0 && begin >= uint64(n) {
			return fmt.Errorf("the prompt has %d tokens in group %d, but the first block is that of token %d", n, g, begin)
		}
	}
	return nil
}

// Cut is what a load takes from a rank that gives some of this layout's regions. Without
// any region, P is only told that D needs nothing.
func (s *Selection) Cut(l *Layout, regions []uint32) Selection {
	n := len(regions)
	if fault.On("found-whole") && n > 0 || fault.On("found-unneeded") && n == 0 {
		n = len(l.Regions)
	}
	switch n {
	case 0:
		return Selection{Tokens: s.Tokens}
	case len(l.Regions):
		return *s
	}
	out := Selection{First: s.First, Tokens: s.Tokens, Regions: regions, Blocks: make([][]BlockID, len(s.Blocks))}
	for _, r := range regions {
		if g := int(l.Regions[r].Group); g < len(s.Blocks) {
			out.Blocks[g] = s.Blocks[g]
		}
	}
	return out
}

// OrZero is an element of a list of a Selection, which may end before it: then it is 0.
func OrZero(list []uint32, i int) uint32 {
	if i < len(list) {
		return list[i]
	}
	return 0
}
