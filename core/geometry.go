package core

import "fmt"

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
