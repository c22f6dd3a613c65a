package hostmem

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/kv"
)

// Check says which region has a block that this process may not read, or may not write if
// transfers land in it. It looks at what the kernel knows and leaves the memory alone.
// A file that ends before its mapping shows only at a transfer.
func Check(regions []kv.Region, write bool) error {
	var err error
	for range 3 { // the kernel gives its list in parts; the engine may map other memory meanwhile
		list, failed := mappings()
		if failed != nil {
			return &UnknownError{failed}
		}
		if err = check(list, regions, write); err == nil {
			return nil
		}
	}
	return err
}

// UnknownError: the kernel does not tell this process about its memory.
type UnknownError struct{ cause error }

func (e *UnknownError) Error() string {
	return "what may be done with the regions' memory is not known: " + e.cause.Error()
}

func (e *UnknownError) Unwrap() error { return e.cause }

func check(list []mapping, regions []kv.Region, write bool) error {
	for i := range regions {
		r := &regions[i]
		if r.Memory != kv.HostMemory {
			continue
		}
		end := r.Base + r.Extent()
		for at := r.Base; at < end; {
			g := find(list, at, end, write)
			if g == nil {
				break
			}
			if block, hit := blockIn(r, g); hit {
				todo := "a prefill engine's caches must be readable"
				if write {
					todo = "a decode engine's caches must be readable and writable"
				}
				return fmt.Errorf("region %q (group %d) at %#x to %#x: the bytes from %#x to %#x are %s, among them block %d of %d: %s",
					r.Name, r.Group, r.Base, end, g.from, g.to, g.why, block, r.NumBlocks, todo)
			}
			at = g.to
		}
	}
	return nil
}

// blockIn is the first block of a region with bytes in a gap. What lies between blocks may
// be anything.
func blockIn(r *kv.Region, g *gap) (block uint64, hit bool) {
	block = (g.from - r.Base) / r.BlockStride
	if g.from >= r.Base+block*r.BlockStride+r.BlockBytes {
		block++
	}
	return block, block < uint64(r.NumBlocks) && r.Base+block*r.BlockStride < g.to
}

// Span is contiguous memory.
type Span struct{ Base, Length uint64 }

// FaultError says which region's memory the kernel would not read or write for a transfer.
type FaultError struct{ text string }

func (e *FaultError) Error() string { return e.text }

// Fault explains why the kernel did not read the spans, or write them, for this process.
// cause is the kernel's errno. At least one span is of a region.
func Fault(regions []kv.Region, spans []Span, write bool, cause error) error {
	verb := "read"
	if write {
		verb = "written"
	}
	why := cause.Error()
	if at, reason := faulty(spans, write); reason != "" {
		spans, why = []Span{{Base: at}}, reason
	}
	for _, s := range spans {
		for i := range regions {
			if r := &regions[i]; s.Base >= r.Base && s.Base-r.Base < r.Extent() && (s.Base-r.Base)%r.BlockStride < r.BlockBytes {
				return &FaultError{fmt.Sprintf("region %q cannot be %s at %#x: %s", r.Name, verb, s.Base, why)}
			}
		}
	}
	return &FaultError{fmt.Sprintf("memory of no region cannot be %s at %#x: %s", verb, spans[0].Base, why)}
}

// faulty finds the first span that cannot be used, and says why.
func faulty(spans []Span, write bool) (at uint64, why string) {
	list, err := mappings()
	for _, s := range spans {
		if g := find(list, s.Base, s.Base+s.Length, write); err == nil && g != nil {
			return g.from, "the memory is " + g.why
		}
	}
	page := uint64(unix.Getpagesize())
	advice := unix.MADV_POPULATE_READ
	if write {
		advice = unix.MADV_POPULATE_WRITE
	}
	populate := func(from, length uint64) bool {
		_, _, errno := unix.Syscall(unix.SYS_MADVISE, uintptr(from), uintptr(length), uintptr(advice))
		return errno == 0 || errno == unix.EINTR || errno == unix.EAGAIN
	}
	if !populate(0, 0) { // a kernel before 5.14
		return 0, ""
	}
	for _, s := range spans {
		from := s.Base &^ (page - 1)
		if populate(from, s.Base+s.Length-from) {
			continue
		}
		for ; from < s.Base+s.Length; from += page {
			if !populate(from, page) {
				return max(from, s.Base), "the memory is mapped, but there is nothing behind it (a file that ends before?)"
			}
		}
	}
	return 0, ""
}
