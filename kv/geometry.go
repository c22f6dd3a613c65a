// What lies where in a block: which tokens and heads of a region, in which order; and the limits of what a peer may say
// of it.

package kv

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
)

// Limits of a layout; a layout over a limit is refused whole.
const (
	MaxRegions = 1 << 16
	MaxGroups  = 16
	// MaxBlocks bounds the block ids of one group in one transfer: the tokens of the
	// longest prompts, where a block has one.
	MaxBlocks     = 1 << 18
	MaxRegionName = 256
	// RegionAlign is the least alignment of addresses, strides and lengths: a double word,
	// which RDMA and DMA engines need for full speed.
	RegionAlign = 4
)

// Shape is a region without its address. A peer finds out by it which bytes of two layouts
// are the same thing.
type Shape struct {
	Name        string
	BlockStride uint64
	BlockBytes  uint64
	NumBlocks   uint32
	Group       uint32

	Tokens, Heads, FirstHead, TotalHeads uint32
	TokenStride, HeadStride              uint64
	IndexKind                            IndexKind
}

// Limits of a region's geometry.
const (
	MaxBlockTokens = 1 << 20
	MaxHeads       = 1 << 16 // of a model
)

// A block of a region is Tokens × Heads items: item (t, h) lies TokenStride*t +
// HeadStride*h bytes after the block's start. Items lie densely in one of two
// orders: token after token with its heads side by side (NHD), or head after head
// with its tokens side by side (HND). With one head, as of a latent, they are the
// same.

// ItemBytes is the length of what a block holds of one token and head; 0 for an
// opaque block.
func (s *Shape) ItemBytes() uint64 {
	if s.Tokens == 0 || s.Heads == 0 {
		return 0
	}
	return s.BlockBytes / (uint64(s.Tokens) * uint64(s.Heads))
}

// heads are those that the region holds, from first up to end; an opaque block
// counts as one.
func (s *Shape) heads() (first, end uint32) {
	if s.Tokens == 0 {
		return 0, 1
	}
	return s.FirstHead, s.FirstHead + s.Heads
}

func (s *Shape) order() string {
	switch {
	case s.Tokens == 0:
		return "opaque"
	case s.TokenStride == uint64(s.Heads)*s.ItemBytes():
		return "NHD"
	}
	return "HND"
}

func (s *Shape) String() string { return fmt.Sprintf("region %q of group %d", s.Name, s.Group) }

// geometry puts a shape's numbers into words.
func (s *Shape) geometry() string {
	of := "blocks"
	if s.IndexKind != IndexBlock {
		of = s.IndexKind.String()
	}
	if s.Tokens == 0 {
		return fmt.Sprintf("opaque %s of %d bytes", of, s.BlockBytes)
	}
	return fmt.Sprintf("%s of %d tokens, heads %d to %d of %d, items of %d bytes, %s",
		of, s.Tokens, s.FirstHead, s.FirstHead+s.Heads-1, s.TotalHeads, s.ItemBytes(), s.order())
}

// complete fills in TotalHeads where the region names no heads: it then holds all of the
// model's.
func (s *Shape) complete() {
	if s.Tokens > 0 && s.TotalHeads == 0 && s.FirstHead == 0 {
		s.TotalHeads = s.Heads
	}
}

// checkGeometry says what is wrong with a shape's numbers. The shape may be a peer's.
func (s *Shape) checkGeometry() error {
	if s.Tokens == 0 {
		if s.Heads != 0 || s.TokenStride != 0 || s.HeadStride != 0 || s.FirstHead != 0 || s.TotalHeads != 0 {
			return fmt.Errorf("%v: its blocks have 0 tokens, but %d heads, strides %d and %d, head %d of %d: set all of these to 0 for an opaque block, or set tokens",
				s, s.Heads, s.TokenStride, s.HeadStride, s.FirstHead, s.TotalHeads)
		}
		return nil
	}
	items := uint64(s.Tokens) * uint64(s.Heads)
	switch {
	case s.Tokens > MaxBlockTokens || s.Heads == 0 || s.Heads > MaxHeads:
		return fmt.Errorf("%v: blocks of %d tokens and %d heads: want 1 to %d and 1 to %d", s, s.Tokens, s.Heads, MaxBlockTokens, MaxHeads)
	case s.BlockBytes == 0 || s.BlockBytes%items != 0 || s.BlockBytes/items%RegionAlign != 0:
		return fmt.Errorf("%v: a block of %d bytes cannot hold %d tokens of %d heads in items of a multiple of %d bytes", s, s.BlockBytes, s.Tokens, s.Heads, RegionAlign)
	case s.TotalHeads > MaxHeads || uint64(s.FirstHead)+uint64(s.Heads) > uint64(s.TotalHeads):
		return fmt.Errorf("%v: it has %d heads from head %d on, but there are %d heads in all (at most %d)", s, s.Heads, s.FirstHead, s.TotalHeads, MaxHeads)
	}
	item := s.BlockBytes / items
	nhd := s.TokenStride == uint64(s.Heads)*item && s.HeadStride == item
	hnd := s.TokenStride == item && s.HeadStride == uint64(s.Tokens)*item
	if !nhd && !hnd {
		return fmt.Errorf("%v: a token's stride is %d bytes and a head's %d, but items of %d bytes need %d and %d (NHD) or %d and %d (HND)",
			s, s.TokenStride, s.HeadStride, item, uint64(s.Heads)*item, item, item, uint64(s.Tokens)*item)
	}
	return nil
}

// checkIndex says what is wrong with what the ids of a shape name. The shape may be a
// peer's.
func (s *Shape) checkIndex() error {
	ring := s.IndexKind.ring()
	switch {
	case s.IndexKind > IndexSlot && ring == 0:
		return fmt.Errorf("%v: its ids name %v: this kvconn knows blocks, rows, slots and entries of rings (0, 1, 2, and 3 + 256 * the ring's entries)", s, s.IndexKind)
	case ring > 0 && s.Tokens > 1:
		return fmt.Errorf("%v: its ids name %v, and a block has %d tokens: an entry has one, or is opaque", s, s.IndexKind, s.Tokens)
	case ring > 0 && s.NumBlocks%ring != 0:
		return fmt.Errorf("%v: its ids name %v, but it has %d entries: want a multiple of the ring's", s, s.IndexKind, s.NumBlocks)
	}
	return nil
}

// checkShapes checks the shapes that a peer may have sent, and returns their order by name
// and the tokens of each group's blocks.
func checkShapes(shapes []Shape) (order []uint32, tokens [MaxGroups]uint32, err error) {
	if len(shapes) > MaxRegions {
		return nil, tokens, fmt.Errorf("%d regions, at most %d are supported", len(shapes), MaxRegions)
	}
	var firstOf [MaxGroups]*Shape
	for i := range shapes {
		s := &shapes[i]
		s.complete()
		if s.Group >= MaxGroups {
			return nil, tokens, fmt.Errorf("%v: group must be below %d", s, MaxGroups)
		}
		if err := errors.Join(s.checkGeometry(), s.checkIndex()); err != nil {
			return nil, tokens, err
		}
		if first := firstOf[s.Group]; first == nil {
			firstOf[s.Group] = s
		} else if first.IndexKind != s.IndexKind {
			return nil, tokens, fmt.Errorf("the ids of %v name %v, those of %v name %v: regions of one group share their ids", s, s.IndexKind, first, first.IndexKind)
		}
		t := &tokens[s.Group]
		if *t != 0 && s.Tokens != 0 && *t != s.Tokens {
			return nil, tokens, fmt.Errorf("%v has blocks of %d tokens, other regions of its group of %d: they share their block ids", s, s.Tokens, *t)
		}
		*t = max(*t, s.Tokens)
	}
	order, err = index(shapes)
	return order, tokens, err
}

// index sorts shapes by group, name and heads. Regions that stand twice are an error.
func index(shapes []Shape) ([]uint32, error) {
	order := make([]uint32, len(shapes))
	for i := range order {
		order[i] = uint32(i)
	}
	slices.SortFunc(order, func(a, b uint32) int {
		x, y := &shapes[a], &shapes[b]
		return cmp.Or(compareNames(x, y), cmp.Compare(x.FirstHead, y.FirstHead))
	})
	for k := 1; k < len(order); k++ {
		a, b := &shapes[order[k-1]], &shapes[order[k]]
		if compareNames(a, b) != 0 {
			continue
		}
		_, end := a.heads()
		if first, _ := b.heads(); first < end {
			return nil, fmt.Errorf("%v is registered twice (%s, and %s): regions of one name must hold different heads", b, a.geometry(), b.geometry())
		}
		if a.ItemBytes() != b.ItemBytes() || a.TotalHeads != b.TotalHeads {
			return nil, fmt.Errorf("%v is registered with %s, and with %s", b, a.geometry(), b.geometry())
		}
	}
	return order, nil
}

func compareNames(a, b *Shape) int {
	return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Name, b.Name))
}

// nameByPlace is a mutant's: it names each region by its number.
func nameByPlace(shapes []Shape) {
	for i := range shapes {
		shapes[i].Name = fmt.Sprint(i)
	}
}
