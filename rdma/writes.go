// A stripe becomes writes of the device, a chain at a time, and ends with its mark.

package rdma

import (
	"fmt"
	"math"

	defect "github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// writeLimits bound what a cursor fills.
type writeLimits struct {
	maxPieces int    // pieces of one write, the device's max_sge
	maxWrite  uint64 // bytes of one write, at most 2 GiB, the most that verbs take
	// maxBytes is what one fill should carry: it begins no write once it has so
	// much. So a fill may exceed it by less than a write, which keeps writes large.
	maxBytes uint64
}

// cursor turns a stripe into writes, a chain at a time. It is a value: a copy is a cursor
// of its own, until one of the two gets further ranges. Once the stripe is whole, its
// last write carries the immediate. So each stripe, even an empty one, ends with a mark
// that follows its bytes.
type cursor struct {
	ranges []stripeRange // those given so far, none without bytes, in the order in which they are written
	whole  bool          // no further range will be given
	imm    uint32        // the mark of the last write
	next   int           // the range after the one that is being written
	pairs  []kv.Pair
	pair   int     // the pair that holds the next byte
	skip   uint64  // bytes of that pair that are done
	plan   kv.Plan // the range's, if any: then pairs has only what the present fill has cut off the plan so far
	end    uint64  // of the range in its plan
	left   uint64  // bytes of the range that are left
	done   bool    // the write with the immediate was filled
}

// ready says whether fill has something to do.
func (c *cursor) ready() bool { return c.left > 0 || c.next < len(c.ranges) || c.whole && !c.done }

// rewind goes back to the stripe's first byte.
func (c *cursor) rewind() { *c = cursor{ranges: c.ranges, whole: c.whole, imm: c.imm} }

// advance goes on to the next range that has bytes; false if there is none.
func (c *cursor) advance() bool {
	for c.left == 0 {
		if c.next == len(c.ranges) {
			return false
		}
		s := &c.ranges[c.next]
		c.next++
		c.pairs, c.pair, c.skip, c.left = s.pairs, s.first, s.skip, s.length
		c.plan, c.end = s.plan, s.position+s.length
	}
	return true
}

// cut takes the next pieces off the range's plan, as many as window has room for.
func (c *cursor) cut(window []kv.Pair) {
	if defect.On("rdma-lists-plans") {
		window = make([]kv.Pair, 0, c.plan.Pieces())
	}
	c.pairs, c.pair, c.skip = c.plan.Pairs(window[:0], c.end-c.left, c.left), 0, 0
}

// fill makes the stripe's next writes in writes and pieces, whose lengths bound it. Of a
// plan it cuts what these writes need, in window, a few pieces at a time. It returns how many of each it made and how many bytes they carry. First of a write counts
// from the front of pieces. done says that the last write ends the stripe. Pairs that are
// adjacent at the peer under one key share a write, also if they were given one after the
// other. IDs and signals are left to the sendQueue. An error names a pair outside of its
// region: then no write of this call may be posted, and the cursor must be rewound.
func (c *cursor) fill(writes []verbs.Write, pieces []verbs.SGE, window []kv.Pair, local, remote *keyTable, lim writeLimits) (nWrites, nPieces int, bytes uint64, done bool, err error) {
	if len(writes) == 0 || c.done {
		return 0, 0, 0, c.done, nil
	}
	maxPieces := min(max(lim.maxPieces, 1), math.MaxUint16)
	maxWrite := min(max(lim.maxWrite, 1), 1<<31)
	var (
		w        *verbs.Write // the open one
		wBytes   uint64
		endsAt   uint64 // where the open write ends at the peer
		endsHere uint64 // where its last piece ends here
	)
	if c.plan != nil && !defect.On("rdma-window-kept") { // others have had the window since
		c.pairs, c.pair, c.skip = nil, 0, 0
	}
	for c.left > 0 || c.advance() {
		if c.pair == len(c.pairs) {
			room := min(len(window), max(len(writes)-nWrites, 1))
			c.cut(window[:room:room])
		}
		p := &c.pairs[c.pair]
		length := min(p.Length-c.skip, c.left)
		if length == 0 {
			c.pair++
			c.skip = 0
			continue
		}
		src, lkey, n, err := local.at(p.SrcRegion, p.SrcOffset+c.skip, length)
		if err != nil {
			return 0, 0, 0, false, c.wrong(p, "source", err)
		}
		dst, rkey, m, err := remote.at(p.DstRegion, p.DstOffset+c.skip, length)
		if err != nil {
			return 0, 0, 0, false, c.wrong(p, "destination", err)
		}
		n = min(n, m)
		joins := w != nil && dst == endsAt && rkey == w.RemoteKey && wBytes < maxWrite
		extends := joins && src == endsHere && lkey == pieces[nPieces-1].Key
		if joins && !extends && int(w.Pieces) == maxPieces {
			joins = false
		}
		if !joins {
			if nWrites == len(writes) || nPieces == len(pieces) || (nWrites > 0 && bytes >= lim.maxBytes) {
				break
			}
			w = &writes[nWrites]
			*w = verbs.Write{RemoteAddr: dst, RemoteKey: rkey, First: uint32(nPieces)}
			nWrites++
			wBytes = 0
		}
		n = min(n, maxWrite-wBytes)
		if extends {
			pieces[nPieces-1].Length += uint32(n)
		} else {
			if nPieces == len(pieces) {
				break
			}
			pieces[nPieces] = verbs.SGE{Addr: src, Length: uint32(n), Key: lkey}
			nPieces++
			w.Pieces++
		}
		wBytes += n
		bytes += n
		endsAt, endsHere = dst+n, src+n
		c.left -= n
		if c.skip += n; c.skip == p.Length {
			c.pair++
			c.skip = 0
		}
	}
	if c.left > 0 || !c.whole {
		return nWrites, nPieces, bytes, false, nil
	}
	if nWrites == 0 {
		// Only the mark is left. It goes with a write of no bytes, which touches no memory and needs no key.
		writes[0] = verbs.Write{}
		nWrites = 1
	}
	c.done = true
	w = &writes[nWrites-1]
	w.Flags |= verbs.WithImm
	w.Imm = c.imm
	return nWrites, nPieces, bytes, true, nil
}

func (c *cursor) wrong(p *kv.Pair, which string, err error) error {
	if c.plan != nil {
		return fmt.Errorf("the piece with byte %d (%d bytes), its %s: %w", c.end-c.left, p.Length, which, err)
	}
	return fmt.Errorf("pair %d (%d bytes), its %s: %w", c.pair, p.Length, which, err)
}
