// The kernel gives each page its memory before it is registered, on several processors and not page after page.

package rdma

import (
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/hostmem"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/kv"
)

// touchChunk is what a goroutine of pretouch takes at a time.
const touchChunk = 32 << 20

// pretouch makes the kernel give each page of the ranges its memory, by at most workers
// goroutines, and waits for them. Registering does the same, but one page after the
// other. Contents stay as they are, also if others write meanwhile. An error names memory
// that cannot be written, and so cannot be registered. The ranges must stay mapped.
func pretouch(ranges []memRange, workers int) error {
	// A kernel before 5.14 does not know the call, and fails it also for no bytes.
	if populate(0, 0) != nil {
		return touchAll(ranges, workers, addNothing)
	}
	return touchAll(ranges, workers, populate)
}

// touchAll gives touch whole pages, a chunk at a time.
func touchAll(ranges []memRange, workers int, touch func(base, length uintptr) error) error {
	page := uint64(unix.Getpagesize())
	var chunks []memRange
	for _, r := range ranges {
		if !r.ends() {
			continue
		}
		last := (r.Base + r.Length - 1) &^ (page - 1)
		for at := r.Base &^ (page - 1); ; at += touchChunk {
			if last-at < touchChunk {
				chunks = append(chunks, memRange{at, last - at + page})
				break
			}
			chunks = append(chunks, memRange{at, touchChunk})
		}
	}
	var (
		next   atomic.Int64
		wg     sync.WaitGroup
		failed atomic.Pointer[error]
	)
	for range min(max(workers, 1), len(chunks)) {
		wg.Add(1)
		safe.Go("pretouch", func() {
			defer wg.Done()
			for failed.Load() == nil {
				i := int(next.Add(1)) - 1
				if i >= len(chunks) {
					return
				}
				if err := touch(uintptr(chunks[i].Base), uintptr(chunks[i].Length)); err != nil {
					err = &touchError{chunks[i], err}
					failed.CompareAndSwap(nil, &err)
				}
			}
		})
	}
	wg.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

// touchError is of memory that the kernel could not write. A device could not write it either.
type touchError struct {
	memRange
	cause error
}

func (e *touchError) Error() string {
	return fmt.Sprintf("memory %v cannot be written to have its pages: %v", e.memRange, e.cause)
}

func (e *touchError) Unwrap() error { return e.cause }

// regionsIn is where the regions of a layout lie in a range.
func regionsIn(l *kv.Layout, in memRange) (spans []hostmem.Span) {
	for _, r := range regionRanges(l) {
		from, to := max(r.Base, in.Base), min(r.Base+r.Length, in.Base+in.Length)
		if from < to {
			spans = append(spans, hostmem.Span{Base: from, Length: to - from})
		}
	}
	return spans
}

// populate does what page faults of writes do, without the writes.
func populate(base, length uintptr) error {
	if _, _, errno := unix.Syscall(unix.SYS_MADVISE, base, length, unix.MADV_POPULATE_WRITE); errno != 0 {
		return errno
	}
	return nil
}

// addNothing makes the kernel add 0 to a word of each page, by futex. A fault in the
// kernel is an error. A fault of this process would end the host, which owns the memory.
// futex also wakes threads that wait on that word, but none waits on a word of a KV
// cache.
func addNothing(base, length uintptr) error {
	const futexWakeOpPrivate, opAdd = 5 | 128, 1 << 28
	var none uint32
	for at := base; at-base < length; at += uintptr(unix.Getpagesize()) {
		if _, _, errno := unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&none)), futexWakeOpPrivate, 0, 0, at, opAdd); errno != 0 {
			return errno
		}
	}
	return nil
}
