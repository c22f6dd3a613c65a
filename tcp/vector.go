// Many pieces of memory go into one call of the kernel: the vector of readv and writev, and the cursor that fills it.

package tcp

import (
	"sync"
	"syscall"
	"unsafe"

	"github.com/kvconn/kvconn/kv"
)

// maxVector is the kernel's limit of entries in one readv or writev (IOV_MAX).
const maxVector = 1024

// iovec is the kernel's struct iovec. The memory belongs to the host process,
// not to Go's heap, so its address is kept as a number.
type iovec struct {
	base uintptr
	len  uintptr
}

// run is a contiguous piece of registered memory.
type run struct {
	base uintptr
	len  uint64
}

func runsOf(l *kv.Layout, segs []kv.Segment) []run {
	out := make([]run, len(segs))
	for i, s := range segs {
		out[i] = run{uintptr(l.Regions[s.Region].Base + s.Offset), s.Length}
	}
	return out
}

// sourceRuns appends the sender's half of a plan to out, and says how many bytes that is.
// Pieces that are adjacent here are merged, from the run first on, though they may not be
// adjacent at the receiver.
func sourceRuns(out []run, first int, l *kv.Layout, pairs []kv.Pair) (_ []run, bytes uint64) {
	var last kv.Memory // of the last run
	for _, p := range pairs {
		bytes += p.Length
		r := run{uintptr(l.Regions[p.SrcRegion].Base + p.SrcOffset), p.Length}
		memory := l.Regions[p.SrcRegion].Memory
		if n := len(out); n > first && out[n-1].base+uintptr(out[n-1].len) == r.base && memory == last {
			out[n-1].len += r.len
			continue
		}
		out, last = append(out, r), memory
	}
	return out, bytes
}

// pieces is room for what a plan is cut into at a time.
type pieces struct{ pairs [maxVector]kv.Pair }

var allPieces = sync.Pool{New: func() any { return new(pieces) }}

func takePieces() *pieces { return allPieces.Get().(*pieces) }

func (p *pieces) give() { allPieces.Put(p) }

// cursor walks over runs from one byte on.
type cursor struct {
	runs []run
	off  uint64 // bytes of runs[0] that are done
}

// fill puts at most limit bytes into v, up to its capacity, and says how many.
func (c *cursor) fill(v []iovec, limit uint64) ([]iovec, uint64) {
	total := uint64(0)
	off := c.off
	for _, r := range c.runs {
		if len(v) == cap(v) || total == limit {
			break
		}
		n := min(r.len-off, limit-total)
		if n > 0 {
			v = append(v, iovec{r.base + uintptr(off), uintptr(n)})
		}
		total += n
		off = 0
	}
	return v, total
}

// advance moves past n bytes.
func (c *cursor) advance(n uint64) {
	for n > 0 {
		left := c.runs[0].len - c.off
		if n < left {
			c.off += n
			return
		}
		n -= left
		c.runs, c.off = c.runs[1:], 0
	}
}

// drop removes n bytes from the front of v. It changes v.
func drop(v []iovec, n uintptr) []iovec {
	for len(v) > 0 && n >= v[0].len {
		n -= v[0].len
		v = v[1:]
	}
	if n > 0 {
		v[0].base += n
		v[0].len -= n
	}
	return v
}

// vectored is readv or writev (trap) on a non-blocking descriptor.
func vectored(trap, fd uintptr, v []iovec) (uintptr, syscall.Errno) {
	for {
		n, _, errno := syscall.Syscall(trap, fd, uintptr(unsafe.Pointer(&v[0])), uintptr(len(v)))
		if errno != syscall.EINTR {
			return n, errno
		}
	}
}
