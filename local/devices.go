package local

import (
	"cmp"
	"slices"

	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/kv"
)

// Devices are the GPUs on which regions of a layout lie.
type Devices interface {
	// Of is the device of a region, -1 for host memory.
	Of(region uint32) int
	// All are the devices, by that number.
	All() []*cuda.Device
}

// places say which registered memory lies on which device. The zero value knows of none.
type places struct {
	devices []*cuda.Device
	ranges  []placed // by address
}

type placed struct {
	from, to uint64
	device   int
}

func placesOf(d Devices, l *kv.Layout) (p places) {
	if d == nil {
		return p
	}
	p.devices = d.All()
	for i := range l.Regions {
		if on, r := d.Of(uint32(i)), &l.Regions[i]; on >= 0 {
			p.ranges = append(p.ranges, placed{r.Base, r.Base + r.Extent(), on})
		}
	}
	slices.SortFunc(p.ranges, func(a, b placed) int { return cmp.Compare(a.from, b.from) })
	merged := p.ranges[:0] // regions may be strided views of one storage
	for _, r := range p.ranges {
		if n := len(merged) - 1; n >= 0 && merged[n].to >= r.from && merged[n].device == r.device {
			merged[n].to = max(merged[n].to, r.to)
			continue
		}
		merged = append(merged, r)
	}
	p.ranges = merged
	return p
}

// any says whether there is a device.
func (p *places) any() bool { return len(p.devices) > 0 }

// of is the device of an address, -1 for host memory.
func (p *places) of(address uint64) int {
	i, _ := slices.BinarySearchFunc(p.ranges, address, func(r placed, a uint64) int {
		if r.to <= a {
			return -1
		}
		return 1
	})
	if i == len(p.ranges) || address < p.ranges[i].from {
		return -1
	}
	return p.ranges[i].device
}

// alike are the first entries of a vector that lie in one memory.
func (p *places) alike(vec []iovec) (device, entries int, bytes uint64) {
	device = p.of(uint64(vec[0].base))
	for i := range vec {
		if i > 0 && p.of(uint64(vec[i].base)) != device {
			return device, i, bytes
		}
		bytes += uint64(vec[i].len)
	}
	return device, len(vec), bytes
}

// some cuts the first bytes of a vector off.
func some(vec []iovec, bytes uint64) []iovec {
	for i := range vec {
		if n := uint64(vec[i].len); n >= bytes {
			vec[i].len = uintptr(bytes)
			return vec[:i+1]
		}
		bytes -= uint64(vec[i].len)
	}
	return vec
}

// runsOf are the same as a device's runs.
func runsOf(vec []iovec) []cuda.Run {
	out := make([]cuda.Run, len(vec))
	for i := range vec {
		out[i] = cuda.Run{Addr: vec[i].base, Len: uint64(vec[i].len)}
	}
	return out
}
