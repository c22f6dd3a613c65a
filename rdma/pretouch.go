package rdma

import (
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/internal/safe"
)

// touchChunk is what a goroutine of pretouch takes at a time.
const touchChunk = 32 << 20

// pretouch has the kernel give each page of the ranges its memory now, by at most
// workers goroutines: registering does the same, but one page after the other.
// Contents stay as they are, also under writers. It waits for all. An error names
// memory that cannot be written: registering it will fail too. The ranges must
// stay mapped meanwhile.
func pretouch(ranges []memRange, workers int) error {
	// Of no bytes it is an error only where the kernel, before 5.14, has none of it.
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
					err = fmt.Errorf("memory %v cannot be written to have its pages: %w", chunks[i], err)
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

// populate is what page faults of writes do, without the writes.
func populate(base, length uintptr) error {
	if _, _, errno := unix.Syscall(unix.SYS_MADVISE, base, length, unix.MADV_POPULATE_WRITE); errno != 0 {
		return errno
	}
	return nil
}

// addNothing adds 0 to a word of each page, by the kernel's hand: a fault in it is
// an error, while one of our own would end the host, which owns the memory. Beside
// the addition that futex does there it wakes at most who waits on that word,
// which nobody does in a KV cache.
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
