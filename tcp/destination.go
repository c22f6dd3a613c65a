package tcp

import (
	"slices"

	"github.com/kvconn/kvconn/kv"
)

// destination says where the bytes of a transfer land: by a list of runs or, if the pieces are very many,
// by a plan. With a plan each stream keeps only the pieces that it reads into now.
type destination struct {
	runs []run
	ends []uint64 // ends[i]: position after runs[i]
	plan kv.Plan
}

func listed(runs []run) destination {
	p := destination{runs: runs, ends: make([]uint64, len(runs))}
	var total uint64
	for i, r := range runs {
		total += r.len
		p.ends[i] = total
	}
	return p
}

func (p *destination) bytes() uint64 {
	switch {
	case p.plan != nil:
		return kv.PlanBytes(p.plan)
	case len(p.ends) == 0:
		return 0
	}
	return p.ends[len(p.ends)-1]
}

// pieces is the most runs that there may be.
func (p *destination) pieces() int {
	if p.plan != nil {
		return p.plan.Pieces()
	}
	return len(p.runs)
}

// cursor walks from a position on, of a frame that has so many bytes left. It may end before
// the frame, with the stream's window.
func (s *inStream) cursor(in *inbound, position, left uint64) cursor {
	if in.plan == nil {
		i, _ := slices.BinarySearchFunc(in.ends, position, func(end, p uint64) int {
			if end <= p {
				return -1
			}
			return 1
		})
		return cursor{runs: in.runs[i:], off: position - (in.ends[i] - in.runs[i].len)}
	}
	pieces := takePieces()
	defer pieces.give()
	s.window = destinationRuns(s.window[:0], s.r.t.layout, in.plan.Pairs(pieces.pairs[:0], position, left))
	s.cuts += len(s.window)
	return cursor{runs: s.window}
}

// destinationRuns appends the receiver's half of pairs to out.
func destinationRuns(out []run, l *kv.Layout, pairs []kv.Pair) []run {
	for i := range pairs {
		p := &pairs[i]
		out = append(out, run{uintptr(l.Regions[p.DstRegion].Base + p.DstOffset), p.Length})
	}
	return out
}
