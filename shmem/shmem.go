// Package shmem allocates memory that another process of the host can map. The memory is a file of
// the kernel's without a name (memfd), so nothing of it is left when its processes have ended. The file
// is sealed: it keeps its size, so that whoever has it mapped gets no signal.
package shmem

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/callprobe"
)

const (
	// Most is how many memories a process has at a time: each takes a descriptor, and a decode agent maps each.
	Most = 1024
	// MostBytes is the most of one memory.
	MostBytes = 1 << 46

	huge = 2 << 20 // a large page of most processors; memory of that size or more begins at a multiple of it
)

// Memory is one allocation. It stays mapped until Free and each Release.
type Memory struct {
	base, size uint64
	file       *os.File // that can be mapped to be read only
	users      int      // the allocation itself, until Free, and those who hold it
	freed      bool
}

// table has all memories of the process by their addresses, also those that are freed and held.
var table struct {
	sync.Mutex
	all []*Memory
}

// Alloc gives zeroed memory of at least n bytes. All of it is there: that there is too little shows now.
func Alloc(n uint64) (*Memory, error) {
	if n == 0 || n > MostBytes {
		return nil, fmt.Errorf("%w: shared memory of %d bytes, want 1 to %d", core.ErrInvalid, n, uint64(MostBytes))
	}
	page := uint64(os.Getpagesize())
	m := &Memory{size: (n + page - 1) / page * page, users: 1}
	if !reserve(m) {
		return nil, fmt.Errorf("%w: shared memory: %d are allocated, the most: allocate fewer that are larger", core.ErrOverload, Most)
	}
	if err := m.make(); err != nil {
		forget(m)
		return nil, fmt.Errorf("shared memory of %d bytes: %w", n, err)
	}
	return m, nil
}

// reserve takes a place in the table, at address 0.
func reserve(m *Memory) bool {
	table.Lock()
	defer table.Unlock()
	if len(table.all) >= Most {
		return false
	}
	table.all = slices.Insert(table.all, 0, m)
	return true
}

func forget(m *Memory) {
	table.Lock()
	defer table.Unlock()
	table.all = slices.DeleteFunc(table.all, func(o *Memory) bool { return o == m })
}

// make creates the file and its mapping.
func (m *Memory) make() error {
	if err := enough(m.size); err != nil {
		return err
	}
	fd, err := create()
	if err != nil {
		return fmt.Errorf("memfd_create: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, int64(m.size)); err != nil {
		return fmt.Errorf("the file's size: %w", err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		return fmt.Errorf("the file's seals: %w", err)
	}
	file, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", fd)) // who gets this one can only read
	if err != nil {
		return fmt.Errorf("the file again, to be read only: %w", err)
	}
	base, err := mapped(fd, m.size)
	if err == nil {
		if err = populate(fd, base, m.size); err != nil {
			_ = unix.MunmapPtr(base, uintptr(m.size))
		}
	}
	if err != nil {
		_ = file.Close()
		return err
	}
	table.Lock()
	defer table.Unlock()
	m.base, m.file = uint64(uintptr(base)), file
	slices.SortFunc(table.all, func(a, b *Memory) int { return cmp.Compare(a.base, b.base) })
	return nil
}

func create() (fd int, err error) {
	if err := callprobe.Check(unix.SYS_MEMFD_CREATE); err != nil {
		return -1, fmt.Errorf("a filter of system calls forbids it, that of its container perhaps: %w", err)
	}
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	if fd, err = unix.MemfdCreate("kvconn", flags|unix.MFD_NOEXEC_SEAL); err == unix.EINVAL { // a kernel before 6.3
		fd, err = unix.MemfdCreate("kvconn", flags)
	}
	return fd, err
}

// mapped maps a file, from a multiple of a large page on if it has at least one. A child of fork does not have it.
func mapped(fd int, size uint64) (unsafe.Pointer, error) {
	room := size
	if size >= huge {
		room += huge
	}
	at, err := unix.MmapPtr(-1, 0, nil, uintptr(room), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("addresses for %d bytes: %w", room, err)
	}
	before := uint64(0)
	if size >= huge {
		before = -uint64(uintptr(at)) % huge
	}
	base := unsafe.Add(at, before)
	if _, err := unix.MmapPtr(fd, 0, base, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		_ = unix.MunmapPtr(at, uintptr(room))
		return nil, fmt.Errorf("mmap: %w", err)
	}
	if before > 0 {
		_ = unix.MunmapPtr(at, uintptr(before))
	}
	if after := room - before - size; after > 0 {
		_ = unix.MunmapPtr(unsafe.Add(base, size), uintptr(after))
	}
	if err := advise(base, size, unix.MADV_DONTFORK); err != nil {
		_ = unix.MunmapPtr(base, uintptr(size))
		return nil, fmt.Errorf("madvise, so that no child has it: %w", err)
	}
	_ = advise(base, size, unix.MADV_HUGEPAGE) // where the kernel has them for shared memory
	return base, nil
}

func advise(base unsafe.Pointer, size uint64, advice int) error {
	for {
		_, _, errno := unix.Syscall(unix.SYS_MADVISE, uintptr(base), uintptr(size), uintptr(advice))
		switch errno {
		case 0:
			return nil
		case unix.EINTR, unix.EAGAIN:
		default:
			return errno
		}
	}
}

// populate has the kernel find all pages. Without them a first touch could end the process.
func populate(fd int, base unsafe.Pointer, size uint64) error {
	const step = 256 << 20
	for off := uint64(0); off < size; off += step {
		n := min(step, size-off)
		err := advise(unsafe.Add(base, off), n, unix.MADV_POPULATE_WRITE)
		if err == unix.EINVAL { // a kernel before 5.14
			err = unix.Fallocate(fd, 0, int64(off), int64(n))
		}
		if err != nil {
			return fmt.Errorf("the host has not got so much memory: %w", err)
		}
	}
	return nil
}

// Base is where the memory begins.
func (m *Memory) Base() uint64 { return m.base }

// Size is how much it has; it is a multiple of a page.
func (m *Memory) Size() uint64 { return m.size }

// Pointer is Base for the host's code.
func (m *Memory) Pointer() unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&m.base)) }

// Bytes is the memory for Go code.
func (m *Memory) Bytes() []byte { return unsafe.Slice((*byte)(m.Pointer()), m.size) }

// File gives a descriptor of the memory that can only be read. It may be called until Free or Release. The caller
// closes it.
func (m *Memory) File() (*os.File, error) {
	fd, err := unix.FcntlInt(m.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "shared memory"), nil
}

// Free gives the memory back that begins there: at once, or when nobody holds it any more.
func Free(base uint64) error {
	table.Lock()
	defer table.Unlock()
	i, found := search(base)
	if base == 0 || !found || table.all[i].freed {
		return fmt.Errorf("%w: no shared memory begins at %#x, or it was freed already", core.ErrInvalid, base)
	}
	table.all[i].freed = true
	table.all[i].drop()
	return nil
}

func search(base uint64) (i int, found bool) {
	return slices.BinarySearchFunc(table.all, base, func(m *Memory, at uint64) int { return cmp.Compare(m.base, at) })
}

// drop is the end of one user; the table is locked.
func (m *Memory) drop() {
	if m.users--; m.users > 0 {
		return
	}
	_ = unix.MunmapPtr(m.Pointer(), uintptr(m.size))
	_ = m.file.Close()
	table.all = slices.DeleteFunc(table.all, func(o *Memory) bool { return o == m })
}

// Hold gives the memories that lie under so many bytes from base on. They stay as they are until each is released,
// also if they are freed. Bytes that are of none are no error; of freed memory they are.
func Hold(base, length uint64) (held []*Memory, err error) {
	table.Lock()
	defer table.Unlock()
	for _, m := range table.all {
		switch {
		case m.base == 0 || m.base >= base+length || m.base+m.size <= base:
		case m.freed:
			for _, h := range held {
				h.drop()
			}
			return nil, fmt.Errorf("the bytes from %#x on lie in shared memory that was freed", max(base, m.base))
		default:
			m.users++
			held = append(held, m)
		}
	}
	return held, nil
}

// Release ends one Hold.
func (m *Memory) Release() {
	table.Lock()
	defer table.Unlock()
	m.drop()
}

// Allocated is how many memories there are, and how many bytes of memory they take.
func Allocated() (memories int, bytes uint64) {
	table.Lock()
	defer table.Unlock()
	for _, m := range table.all {
		bytes += m.size
	}
	return len(table.all), bytes
}
