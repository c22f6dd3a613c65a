// Regions become the fewest ranges that a device can register.

package rdma

import (
	"cmp"
	"os"
	"slices"
)

// mrAlign is where a range that is too long for one registration is cut: at a huge
// page, so that no two registrations share one.
const mrAlign = 2 << 20

// mergeRanges returns the ranges to register in place of the given ones, on a device
// that takes at most so many bytes (max_mr_size) in one range; 0 is no limit.
func mergeRanges(ranges []memRange, most uint64) []memRange {
	page := uint64(os.Getpagesize())
	return splitRanges(mergePages(ranges, page), most, page)
}

// mergePages returns the fewest ranges that hold all of the given ones and no page more. Ranges
// that overlap, adjoin or meet in a page become one. The results begin and end as the
// given ranges do, so that a peer's key opens no byte before or after. Empty ranges are
// left out, and none may leave the address space. page is a power of two.
func mergePages(ranges []memRange, page uint64) []memRange {
	sorted := slices.DeleteFunc(slices.Clone(ranges), func(r memRange) bool { return r.Length == 0 })
	slices.SortFunc(sorted, func(a, b memRange) int { return cmp.Compare(a.Base, b.Base) })
	out := sorted[:0]
	for _, r := range sorted {
		if n := len(out); n > 0 {
			// Both ends are the last byte: one past it may be 0.
			last := &out[n-1]
			end, rEnd := last.Base+(last.Length-1), r.Base+(r.Length-1)
			if r.Base <= end || r.Base/page-end/page == 0 || r.Base-end == 1 {
				last.Length = max(end, rEnd) - last.Base + 1
				continue
			}
		}
		out = append(out, r)
	}
	return out
}

// splitRanges cuts ranges that are longer than most bytes, at multiples of mrAlign, or of
// page if most is less than mrAlign. 0 is no limit, less than a page counts as a page.
func splitRanges(ranges []memRange, most, page uint64) []memRange {
	if most == 0 {
		return ranges
	}
	most = max(most, page)
	align := page
	if most >= mrAlign {
		align = mrAlign
	}
	var out []memRange
	for _, r := range ranges {
		for r.Length > most {
			n := most - (r.Base+most)%align
			out = append(out, memRange{r.Base, n})
			r = memRange{r.Base + n, r.Length - n}
		}
		out = append(out, r)
	}
	return out
}

// rangeBytes is the sum of lengths.
func rangeBytes(ranges []memRange) uint64 {
	var n uint64
	for _, r := range ranges {
		n += r.Length
	}
	return n
}
