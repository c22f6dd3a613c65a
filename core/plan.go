package core

import "fmt"

// Segment is a contiguous run of bytes in one region: Offset from the region's
// base, Length bytes.
type Segment struct {
	Region uint32
	Offset uint64
	Length uint64
}

// Pair is one contiguous copy from the sender's region to the receiver's.
type Pair struct {
	SrcRegion, DstRegion uint32
	SrcOffset, DstOffset uint64 // bytes from each region's base
	Length               uint64
}

// A transfer's bytes have one linear order that both sides know without
// talking: region after region as registered, within a region block after
// block as the load lists them. A position in this order names a byte on
// either side, which is all that a TCP frame carries.

// Segments lists, in the transfer's linear order, where blocks lie in this
// layout; runs that are adjacent in memory are merged. The ids must have passed
// CheckBlocks.
func (l *Layout) Segments(blocks [][]BlockID) []Segment { return l.SegmentsOf(nil, blocks) }

// SegmentsOf is Segments of some of the regions; nil is all.
func (l *Layout) SegmentsOf(regions []uint32, blocks [][]BlockID) []Segment {
	out := make([]Segment, 0, l.upperBound(regions, blocks))
	for n := range l.count(regions) {
		i := n
		if regions != nil {
			i = int(regions[n])
		}
		r := &l.Regions[i]
		if int(r.Group) >= len(blocks) {
			continue
		}
		ids := blocks[r.Group]
		dense := r.BlockStride == r.BlockBytes
		for k := 0; k < len(ids); {
			n := 1
			if dense {
				for k+n < len(ids) && ids[k+n] == ids[k]+BlockID(n) {
					n++
				}
			}
			out = append(out, Segment{Region: uint32(i), Offset: uint64(ids[k]) * r.BlockStride, Length: uint64(n) * r.BlockBytes})
			k += n
		}
	}
	return out
}

// Plan pairs the sender's blocks with the receiver's, in the transfer's linear
// order, and merges runs that are adjacent on both sides. peer is the receiver's
// layout. Both layouts must have
// passed CheckPeer, both lists the same length per group and be in range.
func (l *Layout) Plan(src [][]BlockID, peer []Shape, dst [][]BlockID) ([]Pair, error) {
	return l.PlanOf(nil, src, peer, dst)
}

// PlanOf is Plan of some of the regions; nil is all.
func (l *Layout) PlanOf(regions []uint32, src [][]BlockID, peer []Shape, dst [][]BlockID) ([]Pair, error) {
	if len(src) != len(dst) {
		return nil, fmt.Errorf("plan: %d groups here, %d at the peer", len(src), len(dst))
	}
	for g := range src {
		if len(src[g]) != len(dst[g]) {
			return nil, fmt.Errorf("plan: group %d has %d blocks here, %d at the peer", g, len(src[g]), len(dst[g]))
		}
	}
	out := make([]Pair, 0, l.upperBound(regions, src))
	for n := range l.count(regions) {
		i := n
		if regions != nil {
			i = int(regions[n])
		}
		r, p := &l.Regions[i], &peer[i]
		if int(r.Group) >= len(src) {
			continue
		}
		s, d := src[r.Group], dst[r.Group]
		dense := r.BlockStride == r.BlockBytes && p.BlockStride == r.BlockBytes
		for k := 0; k < len(s); {
			n := 1
			if dense {
				for k+n < len(s) && s[k+n] == s[k]+BlockID(n) && d[k+n] == d[k]+BlockID(n) {
					n++
				}
			}
			out = append(out, Pair{
				SrcRegion: uint32(i), DstRegion: uint32(i),
				SrcOffset: uint64(s[k]) * r.BlockStride, DstOffset: uint64(d[k]) * p.BlockStride,
				Length: uint64(n) * r.BlockBytes,
			})
			k += n
		}
	}
	return out, nil
}

func (l *Layout) count(regions []uint32) int {
	if regions == nil {
		return len(l.Regions)
	}
	return len(regions)
}

// upperBound is the number of runs when nothing merges: one allocation then
// holds every plan.
func (l *Layout) upperBound(regions []uint32, blocks [][]BlockID) int {
	n := 0
	for _, i := range regions {
		if g := int(l.Regions[i].Group); g < len(blocks) {
			n += len(blocks[g])
		}
	}
	if regions != nil {
		return n
	}
	for g, ids := range blocks {
		n += len(ids) * len(l.Groups[g].Regions)
	}
	return n
}
