// Some worlds give transports plans in place of lists, and cut them anywhere.

package sim

import (
	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// planned is what a write has now, as a list or by windows of a plan, which a transport may
// ask for.
func (a *agent) planned(v core.Write) (pairs []kv.Pair, extents []kv.Extent, err error) {
	if a.w.cutting.IntN(2) == 0 {
		return v.Match.PairsBetween(v.Src, v.Dst, v.Begin, v.End)
	}
	plan, err := v.Match.Plan(v.Src, v.Dst, v.Begin, v.End)
	if err != nil {
		return nil, nil, err
	}
	for _, e := range plan.Extents() {
		cut := a.windows(plan, e)
		pairs, e.Pairs = append(pairs, cut...), len(cut)
		extents = append(extents, e)
	}
	return pairs, extents, nil
}

// landing is where a load lands, in the one form or the other.
func (a *agent) landing(m *kv.Match, to kv.Selection) (list []kv.Segment, err error) {
	if a.w.cutting.IntN(2) == 0 {
		return m.Segments(to)
	}
	plan, err := m.Landing(to)
	if err != nil {
		return nil, err
	}
	for _, e := range plan.Extents() {
		for _, p := range a.windows(plan, e) {
			list = append(list, kv.Segment{Region: p.DstRegion, Offset: p.DstOffset, Length: p.Length})
		}
	}
	return list, nil
}

// windows cuts an extent off a plan, a few pieces at a time. A window may begin within a piece.
func (a *agent) windows(plan kv.Plan, e kv.Extent) (out []kv.Pair) {
	for position := e.Position; position < e.Position+e.Bytes; {
		pairs := plan.Pairs(make([]kv.Pair, 0, 1+a.w.cutting.IntN(4)), position, uint64(1+a.w.cutting.IntN(4*cellBytes)))
		if last := &pairs[len(pairs)-1]; last.Length > cellBytes && a.w.cutting.IntN(2) == 0 {
			last.Length = cellBytes
		}
		for _, p := range pairs {
			position += p.Length
		}
		out = append(out, pairs...)
	}
	return out
}
