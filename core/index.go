package core

import (
	"fmt"

	"github.com/kvconn/kvconn/internal/fault"
)

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

// CheckEntries says which entries of a ring are not where their positions in the prompt
// lie. first is the position of ids[0], held are the group's entries of earlier calls. A
// part of a ring that wraps is a list whose ids begin anew in the middle.
func (l *Layout) CheckEntries(g int, held []BlockID, first uint64, ids []BlockID) error {
	ring := l.Regions[l.Groups[g].Regions[0]].IndexKind.ring()
	if ring == 0 || len(ids) == 0 || fault.On("ring-unchecked") {
		return nil
	}
	if n := len(held) + len(ids); n > int(ring) {
		return fmt.Errorf("%d entries in group %d, whose rings have %d: later positions would lie on earlier ones", n, g, ring)
	}
	of := ids[0] / ring
	if len(held) > 0 {
		of = held[0] / ring
	}
	for i, id := range ids {
		position := first + uint64(i)
		if want := uint32(position % uint64(ring)); id/ring != of || id%ring != want {
			return fmt.Errorf("id %d of group %d is entry %d of ring %d, but position %d of the prompt lies in entry %d of ring %d (rings of %d entries)",
				id, g, id%ring, id/ring, position, want, of, ring)
		}
	}
	return nil
}

// nameByPlace is a mutant's: it names each region by its number.
func nameByPlace(shapes []Shape) {
	for i := range shapes {
		shapes[i].Name = fmt.Sprint(i)
	}
}
