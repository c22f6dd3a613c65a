package local

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/hostmem"
	"github.com/kvconn/kvconn/internal/fault"
)

// views are mappings of a P's memory files, to be read only.
type views struct {
	t    *Transport
	list []view // by P's addresses
}

// view is one of them. It never moves.
type view struct {
	base uint64 // in P's process
	mem  []byte
}

// mapped counts the bytes of all views of a transport, which Config.MaxMapped bounds.
type mapped struct {
	mu    sync.Mutex
	bytes uint64
}

func (m *mapped) take(n, most uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n > most-m.bytes {
		return fmt.Errorf("%d bytes beside the %d that are mapped already are more than this agent maps of its peers' memory (%d)", n, m.bytes, most)
	}
	m.bytes += n
	return nil
}

func (m *mapped) give(n uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bytes -= n
}

// seals are what D demands of a file. Whoever touches a mapping behind the end of its file gets a signal, so
// the file must not shrink.
const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL

// open implements memoryAccess.
func (v *views) open(m *memory, file *os.File) error {
	if len(m.handle) != 8 {
		return fmt.Errorf("a file's handle has %d bytes, want 8", len(m.handle))
	}
	offset := binary.BigEndian.Uint64(m.handle)
	if err := holds(int(file.Fd()), offset, m.size); err != nil && !fault.On("local-unsealed") {
		return err
	}
	if err := v.t.mapped.take(m.size, v.t.cfg.MaxMapped); err != nil {
		return err
	}
	mem, err := unix.Mmap(int(file.Fd()), int64(offset), int(m.size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		v.t.mapped.give(m.size)
		return fmt.Errorf("the file cannot be mapped: %w", err)
	}
	i, _ := v.search(m.base)
	v.list = slices.Insert(v.list, i, view{m.base, mem})
	return nil
}

// holds checks that a file has and keeps so many bytes from an offset on. What the kernel says of it counts alone. The seals
// come first: only memory files have any, and to ask a file system in user space for more may take for ever.
func holds(fd int, offset, n uint64) error {
	has, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return fmt.Errorf("the file is no memory file: it has no seals: %w", err)
	}
	var kind unix.Statfs_t
	var is unix.Stat_t
	if err := errors.Join(unix.Fstatfs(fd, &kind), unix.Fstat(fd, &is)); err != nil {
		return fmt.Errorf("what the file is cannot be known: %w", err)
	}
	switch {
	case kind.Type != unix.TMPFS_MAGIC || is.Mode&unix.S_IFMT != unix.S_IFREG:
		return fmt.Errorf("the file is no memory file of small pages (file system %#x, mode %#o)", kind.Type, is.Mode)
	case has&seals != seals:
		return fmt.Errorf("the file may shrink while it is read: it has the seals %#x, and %#x are needed (F_SEAL_SHRINK, F_SEAL_SEAL)", has, seals)
	case offset%uint64(os.Getpagesize()) != 0 || offset+n < offset || offset+n > uint64(is.Size):
		return fmt.Errorf("the file has %d bytes, and not %d from %d on", is.Size, n, offset)
	}
	return nil
}

func (v *views) search(address uint64) (i int, found bool) {
	return slices.BinarySearchFunc(v.list, address, func(w view, a uint64) int {
		if w.base < a {
			return -1
		}
		if w.base > a {
			return 1
		}
		return 0
	})
}

// at is what lies at an address of P's, up to the end of its view; nil: nothing.
func (v *views) at(address uint64) []byte {
	i, found := v.search(address)
	if !found {
		i--
	}
	if i < 0 || address-v.list[i].base >= uint64(len(v.list[i].mem)) {
		return nil
	}
	return v.list[i].mem[address-v.list[i].base:]
}

// copy implements memoryAccess. P's validity page holds up nothing here. D looks at it behind the batch, or asks P, and throws away
// what it has read too late.
func (v *views) copy(c *copier, b *batch) (done uint64, err error) {
	from := cursor{b.runs, b.off}
	was := debug.SetPanicOnFault(true)
	defer debug.SetPanicOnFault(was)
	defer func() {
		if p := recover(); p != nil {
			err = v.fault(p, c, b, done)
		}
	}()
	for done < b.bytes {
		c.into, _ = b.into.cut(c.into[:0], b.position+done, b.bytes-done, c.pairs)
		for _, to := range c.into {
			for to.len > 0 {
				r := &from.runs[0]
				src := v.at(r.base + from.off)
				if src == nil {
					return done, &unreadable{r.base + from.off, b.position + done}
				}
				n, past := copyOf(b.into.total, unsafe.Slice(*(**byte)(unsafe.Pointer(&to.base)), to.len), src[:min(uint64(len(src)), r.len-from.off)])
				b.past += uint64(past)
				done, to = done+uint64(n), iovec{to.base + uintptr(n), to.len - uintptr(n)}
				from.advance(uint64(n))
			}
		}
	}
	return done, nil
}

// fault is the error for memory that the processor could not reach, since an engine has given its caches back. Memory that a
// view maps always has its pages: it is P's, and holds has made sure of that.
func (v *views) fault(cause any, c *copier, b *batch, done uint64) error {
	at, ok := cause.(interface{ Addr() uintptr })
	if !ok {
		panic(cause)
	}
	for _, w := range v.list {
		if from := uintptr(unsafe.Pointer(&w.mem[0])); at.Addr() >= from && at.Addr()-from < uintptr(len(w.mem)) {
			return &unreadable{w.base + uint64(at.Addr()-from), b.position + done}
		}
	}
	list := make([]hostmem.Span, len(c.into))
	for i := range c.into {
		list[i] = hostmem.Span{Base: uint64(c.into[i].base), Length: uint64(c.into[i].len)}
	}
	return hostmem.Fault(c.t.layout.Regions, list, true, syscall.EFAULT)
}

// close implements memoryAccess.
func (v *views) close() {
	for _, w := range v.list {
		v.t.mapped.give(uint64(len(w.mem)))
		_ = unix.Munmap(w.mem)
	}
	v.list = nil
}
