package local

import (
	"encoding/binary"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A validityPage is a page of P's for each write. While P keeps the blocks, the page's first word is a number
// that no other write has had. D reads this word after the blocks: as the last part of each call of process_vm_readv,
// which reads in order, or by a call of its own after a copy out of a mapping. If D finds the number, P had the blocks when
// D read them, and D need not ask P. If D finds another number, or cannot read it, D throws away what it has copied.
//
// Each call that copies blocks also reads a byte of the page first, and the kernel ends a call at the first byte that it may
// not read. So once P has invalidated the page, a call of D's that begins mostly copies nothing, even if D has not heard that P
// has invalidated it. This only spares work: the kernel may lack a mapping for a protected page, and a mapped copy has no such byte.
type validityPage struct {
	address   uint64
	area      *pageArea
	protected bool
}

// word is the place of a page's number.
func (one *validityPage) word() *uint64 {
	return (*uint64)(unsafe.Pointer(&one.area.mem[one.offset()]))
}

func (one *validityPage) offset() int {
	return int(one.address - uint64(uintptr(unsafe.Pointer(&one.area.mem[0]))))
}

// pageArea is the memory of some pages.
type pageArea struct {
	mem  []byte
	lost bool // a page of it stays invalid for ever: D may still try to read there
}

// validityPages keeps the pages that no write uses.
type validityPages struct {
	mu    sync.Mutex
	areas []*pageArea
	free  []*validityPage
	lost  int
	freed bool   // Close has given all memory back: no page is there any more
	last  uint64 // the last number given; the first is random, so a process that gets P's process number has none of them
}

const (
	pagesAtOnce = 64                 // of an area
	mostLost    = 1024               // of all D agents; each protected one is a mapping of the process, which may have some 65,000
	numbers     = 0x9e3779b97f4a7c15 // from one number to the next: odd, so that none comes again, and every byte changes
)

// take gives a valid page, and its number, which is not 0.
func (g *validityPages) take() (*validityPage, uint64, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.freed {
		return nil, 0, errClosed
	}
	if len(g.free) == 0 {
		page := os.Getpagesize()
		mem, err := unix.Mmap(-1, 0, pagesAtOnce*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			return nil, 0, fmt.Errorf("local: %d validity pages for writes: %w", pagesAtOnce, err)
		}
		_ = unix.Madvise(mem, unix.MADV_DONTFORK) // a child's copy of the blocks is no proof
		if g.last == 0 {
			t := newRandom()
			g.last = binary.NativeEndian.Uint64(t[:])
		}
		area := &pageArea{mem: mem}
		g.areas = append(g.areas, area)
		for i := range pagesAtOnce {
			g.free = append(g.free, &validityPage{address: uint64(uintptr(unsafe.Pointer(&mem[i*page]))), area: area})
		}
	}
	last := len(g.free) - 1
	one := g.free[last]
	g.free = g.free[:last]
	if g.last += numbers; g.last == 0 {
		g.last += numbers
	}
	atomic.StoreUint64(one.word(), g.last)
	return one, g.last, nil
}

// invalidate takes the page's number away, and has the kernel refuse each call of D's that begins with this page.
func (g *validityPages) invalidate(one *validityPage) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if one.protected || g.freed {
		return
	}
	atomic.StoreUint64(one.word(), 0)
	one.protected = one.protect(unix.PROT_NONE) == nil // false if the kernel has no room for one more mapping
}

func (one *validityPage) protect(prot int) error {
	from := one.offset()
	return unix.Mprotect(one.area.mem[from:from+os.Getpagesize()], prot)
}

// give takes back a page that D does not read any more.
func (g *validityPages) give(one *validityPage) {
	if one == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.freed {
		return
	}
	if one.protected && one.protect(unix.PROT_READ|unix.PROT_WRITE) != nil {
		one.area.lost = true
		return
	}
	one.protected = false
	atomic.StoreUint64(one.word(), 0)
	g.free = append(g.free, one)
}

// lose leaves a page invalid, because D has not said that it does not read it any more. If too many pages are
// lost, lose gives this one back nevertheless. If D then begins a copy late, D throws the copy away, since it
// finds another number, or since P does not say that it has kept the blocks.
func (g *validityPages) lose(one *validityPage) {
	if one == nil {
		return
	}
	g.invalidate(one)
	g.mu.Lock()
	spent := g.lost >= mostLost
	if !spent {
		g.lost++
		one.area.lost = true
	}
	g.mu.Unlock()
	if spent {
		g.give(one)
	}
}

// freeAll gives the memory back, except for areas with a lost page: D could read what would lie at that page's address next.
func (g *validityPages) freeAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, a := range g.areas {
		if !a.lost {
			_ = unix.Munmap(a.mem)
		}
	}
	g.areas, g.free, g.freed = nil, nil, true
}
