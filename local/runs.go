// Where a transfer's bytes lie in P's process, and where they go in D's.

package local

import (
	"cmp"
	"slices"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// run is a contiguous piece of a process's memory.
type run struct{ base, len uint64 }

// destination says where a transfer's bytes go, in the transfer's linear order: by a list of runs or, if the pieces are very many, by a plan.
type destination struct {
	runs   []run
	ends   []uint64 // ends[i]: the position after runs[i]
	total  uint64
	plan   kv.Plan // in place of runs
	layout *kv.Layout
}

// planned makes a destination out of a plan.
func planned(l *kv.Layout, p kv.Plan) destination {
	return destination{plan: p, layout: l, total: kv.PlanBytes(p)}
}

// pieces is an upper bound on the number of runs.
func (d *destination) pieces() int {
	if d.plan != nil {
		return d.plan.Pieces()
	}
	return len(d.runs)
}

func destinationOf(l *kv.Layout, segments []kv.Segment) destination {
	d := destination{runs: make([]run, len(segments)), ends: make([]uint64, len(segments))}
	for i, s := range segments {
		d.runs[i] = run{l.Regions[s.Region].Base + s.Offset, s.Length}
		d.total += s.Length
		d.ends[i] = d.total
	}
	return d
}

// cut puts the places of n bytes, from a position on, into v, as far as v has room, and returns how many bytes
// these are. Only a destination by a plan uses the room for pairs.
func (d *destination) cut(v []iovec, position, n uint64, room []kv.Pair) (_ []iovec, got uint64) {
	if d.plan != nil {
		return d.cutPlan(v, position, n, room)
	}
	i, _ := slices.BinarySearchFunc(d.ends, position, func(end, p uint64) int {
		if end <= p {
			return -1
		}
		return 1
	})
	for ; got < n && len(v) < cap(v); i++ {
		r, off := d.runs[i], uint64(0)
		if begin := d.ends[i] - r.len; begin < position {
			off = position - begin
		}
		k := min(r.len-off, n-got)
		if k > 0 {
			v = append(v, iovec{uintptr(r.base + off), uintptr(k)})
		}
		got += k
	}
	return v, got
}

func (d *destination) cutPlan(v []iovec, position, n uint64, room []kv.Pair) (_ []iovec, got uint64) {
	for got < n && len(v) < cap(v) {
		list := d.plan.Pairs(room[:0:min(cap(room), cap(v)-len(v))], position+got, n-got)
		for i := range list {
			p := &list[i]
			k := min(p.Length, n-got)
			at := uintptr(d.layout.Regions[p.DstRegion].Base + p.DstOffset)
			if last := len(v) - 1; last >= 0 && v[last].base+v[last].len == at && got > 0 {
				v[last].len += uintptr(k)
			} else {
				v = append(v, iovec{at, uintptr(k)})
			}
			got += k
		}
	}
	return v, got
}

// piece is memory of P's whose bytes follow each other in a transfer, from a position on.
type piece struct {
	position uint64
	space    uint32 // of all runs
	runs     []run
}

// bytes is how many a piece has.
func (p *piece) bytes() (n uint64) {
	for i := range p.runs {
		n += p.runs[i].len
	}
	return n
}

// piecesOf is the sender's half of a plan. What is adjacent in memory and in the linear order is
// one run, though it may not be adjacent at the receiver.
func piecesOf(l *kv.Layout, op *core.WriteOp) (pieces []piece, runs int) {
	pairs, end := op.Pairs, uint64(0)
	for _, e := range op.Extents() {
		if e.Pairs == 0 {
			continue
		}
		if len(pieces) == 0 || end != e.Position {
			pieces = append(pieces, piece{position: e.Position, runs: make([]run, 0, e.Pairs)})
			end = e.Position
		}
		p := &pieces[len(pieces)-1]
		for _, pair := range pairs[:e.Pairs] {
			r := run{l.Regions[pair.SrcRegion].Base + pair.SrcOffset, pair.Length}
			end += r.len
			if n := len(p.runs); n > 0 && p.runs[n-1].base+p.runs[n-1].len == r.base {
				p.runs[n-1].len += r.len
				continue
			}
			p.runs = append(p.runs, r)
		}
		pairs = pairs[e.Pairs:]
	}
	for i := range pieces {
		runs += len(pieces[i].runs)
	}
	return pieces, runs
}

// planRange is a part of a plan that is cut into pieces when they are said.
type planRange struct {
	position, end uint64
	plan          kv.Plan
}

// planRanges is the sender's half of a plan that is not a list.
func planRanges(p kv.Plan) (list []planRange) {
	for _, e := range p.Extents() {
		if e.Bytes > 0 {
			list = append(list, planRange{e.Position, e.Position + e.Bytes, p})
		}
	}
	return list
}

// cut takes at most so many runs of a range.
func (w *planRange) cut(l *kv.Layout, most int, room []kv.Pair) (p piece) {
	p = piece{position: w.position, runs: make([]run, 0, most)}
	for len(p.runs) < most && w.position < w.end {
		list := w.plan.Pairs(room[:0:min(cap(room), most-len(p.runs))], w.position, w.end-w.position)
		for i := range list {
			r := run{l.Regions[list[i].SrcRegion].Base + list[i].SrcOffset, min(list[i].Length, w.end-w.position)}
			w.position += r.len
			if last := len(p.runs) - 1; last >= 0 && p.runs[last].base+p.runs[last].len == r.base {
				p.runs[last].len += r.len
				continue
			}
			p.runs = append(p.runs, r)
		}
	}
	return p
}

// regionAt names the region of a layout that an address lies in, for an error.
func regionAt(l *kv.Layout, address uint64) (name string) {
	for i := range l.Regions {
		if r := &l.Regions[i]; address >= r.Base && address-r.Base < r.Extent() {
			name = cmp.Or(name, r.Name)
		}
	}
	return name
}
