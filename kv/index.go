package kv

import "fmt"

// IndexKind says what the block ids of a group name. Both sides must mean the same by an id:
// bytes of equal length would else go to the wrong place unseen. The low 8 bits are the
// kind, and those above them the entries of a ring.
type IndexKind uint32

// The kinds of indices.
const (
	IndexBlock IndexKind = 0 // a block of the prompt: the next id is of the tokens that follow
	IndexRow   IndexKind = 1 // a row of a table that has one for each request
	IndexSlot  IndexKind = 2 // a slot that holds the whole state of one request
	// IndexRing is an entry of a ring. The memory holds rings of equal length one after the
	// other. What belongs to position p of the prompt lies in entry p modulo the ring's length.
	IndexRing IndexKind = 3
)

// MaxRing is the most entries of a ring.
const MaxRing = 1<<24 - 1

// Ring is the IndexKind of rings of so many entries, at most MaxRing.
func Ring(entries uint32) IndexKind { return IndexRing | IndexKind(entries)<<8 }

// ring is the number of entries of a ring; 0 if an id names anything else.
func (x IndexKind) ring() uint32 {
	if x&0xff != IndexRing {
		return 0
	}
	return uint32(x >> 8)
}

func (x IndexKind) String() string {
	switch x {
	case IndexBlock:
		return "blocks"
	case IndexRow:
		return "rows"
	case IndexSlot:
		return "slots"
	}
	if x.ring() > 0 {
		return fmt.Sprintf("entries of rings of %d", x.ring())
	}
	return fmt.Sprintf("unknown things (index %#x)", uint32(x))
}
