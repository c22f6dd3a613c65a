// If another process can open some of P's memory, D needs no leave to read P's process for that memory.
// After its verdict P lists these memories. Each belongs to a space, a number from 1 on:
// D opens all memories of one space in one way, and a frame names the space that its runs lie in.
// Addresses in runs stay those of P's process. D answers for each memory whether it has opened it.
// Memory that D has not opened belongs to processMemory, if D may read P's process and P allows it.

package local

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// memoryKind is the way in which D opens a memory.
type memoryKind uint32

// memoryFile is a memory file of the kernel (memfd_create), whose descriptor comes with it. Its handle is the
// offset in the file, 8 bytes.
const memoryFile memoryKind = 1

// described says whether a descriptor comes with a memory of a kind.
func (k memoryKind) described() bool { return k == memoryFile || k == memoryDeviceFile }

// memory is one that P has and others may open.
type memory struct {
	space      uint32
	kind       memoryKind
	base, size uint64 // in P's process
	handle     []byte
	open       func() (*os.File, error) // P's: the descriptor that goes with it
}

func (m *memory) String() string {
	return fmt.Sprintf("memory %#x to %#x (space %d)", m.base, m.base+m.size, m.space)
}

const (
	memorySize   = 4 + 4 + 8 + 8 + 2 // before the handle
	mostMemories = 4096              // of one P
	mostHandle   = 256
	mostReason   = 512 // bytes of D's why not
)

func (m *memory) bytes() []byte {
	b := binary.BigEndian.AppendUint32(make([]byte, 0, memorySize+len(m.handle)), m.space)
	b = binary.BigEndian.AppendUint32(b, uint32(m.kind))
	b = binary.BigEndian.AppendUint64(b, m.base)
	b = binary.BigEndian.AppendUint64(b, m.size)
	b = binary.BigEndian.AppendUint16(b, uint16(len(m.handle)))
	return append(b, m.handle...)
}

// parseMemory reads the part before the handle, and says how long that is.
func parseMemory(b []byte) (m memory, handle int, err error) {
	m = memory{space: binary.BigEndian.Uint32(b), kind: memoryKind(binary.BigEndian.Uint32(b[4:])),
		base: binary.BigEndian.Uint64(b[8:]), size: binary.BigEndian.Uint64(b[16:])}
	handle = int(binary.BigEndian.Uint16(b[24:]))
	switch {
	case m.space == processMemory:
		err = errors.New("a memory of space 0, which is the process's own")
	case m.size == 0 || m.base+m.size < m.base:
		err = fmt.Errorf("a memory of %d bytes at %#x", m.size, m.base)
	case handle > mostHandle:
		err = fmt.Errorf("a memory with a handle of %d bytes, at most %d are read", handle, mostHandle)
	}
	return m, handle, err
}

// sayMemories lists P's memories.
func sayMemories(conn *net.UnixConn, list []memory) error {
	if _, err := conn.Write(binary.BigEndian.AppendUint32(nil, uint32(len(list)))); err != nil {
		return err
	}
	for i := range list {
		if err := list[i].say(conn); err != nil {
			return fmt.Errorf("%v: %w", &list[i], err)
		}
	}
	return nil
}

// say sends D a memory, in one message, so that the descriptor comes with the first byte.
func (m *memory) say(conn *net.UnixConn) error {
	var rights []byte
	if m.open != nil {
		file, err := m.open()
		if err != nil { // D hears why
			return lacking(err).say(conn)
		}
		defer file.Close()
		rights = unix.UnixRights(int(file.Fd()))
	}
	b := m.bytes()
	n, _, err := conn.WriteMsgUnix(b, rights, nil)
	if err == nil && n < len(b) {
		_, err = conn.Write(b[n:])
	}
	return err
}

// hearMemories reads P's list. take is called for each, and closes no descriptor.
func hearMemories(conn *net.UnixConn, take func(m *memory, file *os.File) error) error {
	var head [memorySize]byte
	if err := none(receive(conn, head[:4])); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > mostMemories {
		return fmt.Errorf("%d memories, at most %d are read", n, mostMemories)
	}
	for range n {
		file, err := receive(conn, head[:])
		if err == nil {
			err = hearMemory(conn, head[:], file, take)
		}
		if file != nil {
			_ = file.Close()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func hearMemory(conn *net.UnixConn, head []byte, file *os.File, take func(m *memory, file *os.File) error) error {
	m, handle, err := parseMemory(head)
	if err != nil {
		return err
	}
	m.handle = make([]byte, handle)
	if err := none(receive(conn, m.handle)); err != nil {
		return err
	}
	return take(&m, file)
}

// none refuses a descriptor where there is to be none.
func none(file *os.File, err error) error {
	if file != nil {
		_ = file.Close()
		err = errors.New("a descriptor in the middle of its words")
	}
	return err
}

// receive reads just so many bytes, and the descriptor that comes with them, if any. The kernel
// keeps those for which there is no room, and says so.
func receive(conn *net.UnixConn, b []byte) (file *os.File, err error) {
	rights := make([]byte, unix.CmsgSpace(4))
	for got := 0; got < len(b) && err == nil; {
		n, k, flags, _, e := conn.ReadMsgUnix(b[got:], rights)
		got += max(n, 0)
		for _, fd := range descriptors(rights[:k]) {
			if f := os.NewFile(uintptr(fd), "a peer's memory"); file == nil {
				file = f
			} else {
				_ = f.Close()
				err = errDescriptors
			}
		}
		switch {
		case e != nil:
			err = e
		case flags&unix.MSG_CTRUNC != 0:
			err = errDescriptors
		case n == 0:
			err = io.ErrUnexpectedEOF
		}
	}
	if err != nil && file != nil {
		_ = file.Close()
		file = nil
	}
	return file, err
}

var errDescriptors = errors.New("it has sent several descriptors at once, or this process can have no more")

// descriptors returns the descriptors of a control message. This process has all of them now, and must close them.
func descriptors(control []byte) (fds []int) {
	list, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil
	}
	for i := range list {
		if some, err := unix.ParseUnixRights(&list[i]); err == nil {
			fds = append(fds, some...)
		}
	}
	return fds
}

// sayAnswer tells P which memories are open: for each, in their order, a reason, or nothing.
func sayAnswer(conn *net.UnixConn, reasons []string) error {
	b := make([]byte, 0, 2*len(reasons))
	for _, why := range reasons {
		why = why[:min(len(why), mostReason)]
		b = append(binary.BigEndian.AppendUint16(b, uint16(len(why))), why...)
	}
	_, err := conn.Write(b)
	return err
}

func hearAnswer(conn *net.UnixConn, n int) (reasons []string, err error) {
	for range n {
		b, err := read(conn, 2)
		if err != nil {
			return nil, err
		}
		size := int(binary.BigEndian.Uint16(b))
		if size > mostReason {
			return nil, fmt.Errorf("a reason of %d bytes, at most %d are read", size, mostReason)
		}
		if b, err = read(conn, size); err != nil {
			return nil, err
		}
		reasons = append(reasons, string(b))
	}
	return reasons, nil
}

// spaces are the memories that a D has opened, by address: what P says lies where.
type spaces []spaceRange

// spaceRange is memory of one space.
type spaceRange struct {
	base, end uint64
	space     uint32
}

// spacesOf sorts memories, and makes one of those that are adjacent in one space.
func spacesOf(list []memory) (all spaces, err error) {
	for i := range list {
		m := &list[i]
		all = append(all, spaceRange{m.base, m.base + m.size, m.space})
	}
	slices.SortFunc(all, func(a, b spaceRange) int { return cmp.Compare(a.base, b.base) })
	k := 0
	for i := range all {
		if k > 0 && all[k-1].end > all[i].base {
			return nil, fmt.Errorf("memory %#x to %#x, and other memory from %#x on", all[k-1].base, all[k-1].end, all[i].base)
		}
		if k > 0 && all[k-1].end == all[i].base && all[k-1].space == all[i].space {
			all[k-1].end = all[i].end
			continue
		}
		all[k] = all[i]
		k++
	}
	return all[:k], nil
}

// at returns the space that an address lies in, and the address at which that space, or the gap between two spaces, ends.
func (all spaces) at(address uint64) (space uint32, end uint64) {
	i, found := slices.BinarySearchFunc(all, address, func(s spaceRange, a uint64) int { return cmp.Compare(s.base, a) })
	if !found {
		i--
	}
	if i >= 0 && address < all[i].end {
		return all[i].space, all[i].end
	}
	if i+1 < len(all) {
		return processMemory, all[i+1].base
	}
	return processMemory, math.MaxUint64
}

// cut takes as much of a piece as lies in one space, and gives the rest.
func (all spaces) cut(p piece) (head, rest piece) {
	if len(all) == 0 || len(p.runs) == 0 {
		return p, piece{}
	}
	space, end := all.at(p.runs[0].base)
	base, to := p.runs[0].base, p.position
	for i := range p.runs {
		r := &p.runs[i]
		if r.base < base || r.base >= end {
			var s uint32
			if s, end = all.at(r.base); s != space {
				return piece{p.position, space, p.runs[:i:i]}, piece{to, processMemory, p.runs[i:]}
			}
		}
		base = r.base
		if n := end - r.base; n < r.len { // a border within a run: the run becomes two
			first := append(slices.Clone(p.runs[:i]), run{r.base, n})
			*r = run{end, r.len - n}
			return piece{p.position, space, first}, piece{to + n, processMemory, p.runs[i:]}
		}
		to += r.len
	}
	p.space = space
	return p, piece{}
}
