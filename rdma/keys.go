// Where a region's bytes lie, and under which key a card reaches them, here and at the peer.

package rdma

import (
	"fmt"
	"sort"

	"github.com/kvconn/kvconn/kv"
)

// memRange is a contiguous range of memory: Length bytes from address Base.
type memRange struct {
	Base, Length uint64
}

func (r memRange) String() string { return fmt.Sprintf("%#x+%d", r.Base, r.Length) }

// ends says whether the range is not empty and ends within the address space.
func (r memRange) ends() bool { return r.Length > 0 && r.Base+r.Length > r.Base }

// keyRange is memory that a device has registered under one key: the local key
// on this side, the remote key on the peer's.
type keyRange struct {
	memRange
	Key uint32
}

// regionRanges is where a layout's regions lie in this process.
func regionRanges(l *kv.Layout) []memRange {
	out := make([]memRange, len(l.Regions))
	for i := range l.Regions {
		out[i] = memRange{l.Regions[i].Base, l.Regions[i].Extent()}
	}
	return out
}

// keyTable finds the address and the key of a region's bytes on one side and one
// device. It does not change, so it may be read from any goroutine.
type keyTable struct {
	where   string // "here", "at the peer": whose region an error names
	regions []keyedRegion
	keys    []keyRange // sorted by address, apart from each other
}

// keyedRegion is covered by one or more keys without a gap.
type keyedRegion struct {
	memRange
	first, last uint32 // indices of the keys at its first and at its last byte
}

// newKeyTable checks that keys, sorted by address, cover all regions. Both may come
// from a peer, so nothing in them is believed; an error names the region or key. It
// keeps keys.
func newKeyTable(where string, regions []memRange, keys []keyRange) (*keyTable, error) {
	if len(regions) > kv.MaxRegions {
		return nil, fmt.Errorf("%d regions %s, at most %d are supported", len(regions), where, kv.MaxRegions)
	}
	end := uint64(0)
	for i, k := range keys {
		if !k.ends() {
			return nil, fmt.Errorf("key %d %s: %v is empty or leaves the address space", i, where, k.memRange)
		}
		if k.Base < end {
			return nil, fmt.Errorf("key %d %s: %v begins before %#x, where the key before it ends", i, where, k.memRange, end)
		}
		end = k.Base + k.Length
	}
	t := &keyTable{where: where, regions: make([]keyedRegion, len(regions)), keys: keys}
	for i, r := range regions {
		if !r.ends() {
			return nil, fmt.Errorf("region %d %s: %v is empty or leaves the address space", i, where, r)
		}
		first := t.find(r.Base, 0)
		at := r.Base
		last := first
		for ; ; last++ {
			if last == len(keys) || keys[last].Base > at {
				return nil, fmt.Errorf("region %d %s: %v is not registered from %#x on", i, where, r, at)
			}
			if at = keys[last].Base + keys[last].Length; at >= r.Base+r.Length {
				break
			}
		}
		t.regions[i] = keyedRegion{r, uint32(first), uint32(last)}
	}
	return t, nil
}

// find is the index of the first key, from the given one on, that ends after addr.
func (t *keyTable) find(addr uint64, from int) int {
	keys := t.keys[from:]
	return from + sort.Search(len(keys), func(i int) bool { return keys[i].Base+keys[i].Length > addr })
}

// at says where length bytes of a region lie from offset on: the address of the
// first, its key, and how many of the bytes that key covers. If they are not all within
// the region, the result is an error.
func (t *keyTable) at(region uint32, offset, length uint64) (addr uint64, key uint32, covered uint64, err error) {
	if int(region) >= len(t.regions) || offset > t.regions[region].Length || length > t.regions[region].Length-offset {
		return 0, 0, 0, t.outside(region, offset, length)
	}
	r := &t.regions[region]
	addr = r.Base + offset
	k := &t.keys[r.first]
	if addr-k.Base >= k.Length {
		// The address after the region's last byte, with length 0, belongs to the region's last key.
		k = &t.keys[min(t.find(addr, int(r.first)), int(r.last))]
	}
	return addr, k.Key, min(length, k.Base+k.Length-addr), nil
}

func (t *keyTable) outside(region uint32, offset, length uint64) error {
	if int(region) >= len(t.regions) {
		return fmt.Errorf("region %d: there are %d %s", region, len(t.regions), t.where)
	}
	return fmt.Errorf("region %d: %d bytes from offset %d leave it: it has %d bytes %s",
		region, length, offset, t.regions[region].Length, t.where)
}
