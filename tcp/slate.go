package tcp

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/internal/callprobe"
)

// slate is memory through which a record goes. The kernel copies between it and the engine's
// blocks, as between them and a socket: a block that is not there is an EFAULT, and not the end
// of this process. So the memory is also a file.
type slate struct {
	fd  int
	mem []byte // recordBytes of plain text
	box []byte // empty, with room for the records of a header and of mem
}

func newSlate() (*slate, error) {
	err, fd := callprobe.Check(unix.SYS_MEMFD_CREATE), -1
	if err == nil { // a filter of system calls lets the process live
		fd, err = unix.MemfdCreate("kvconn", unix.MFD_CLOEXEC)
	}
	if err != nil {
		return nil, fmt.Errorf("memory for encrypted records: %w", err)
	}
	s := &slate{fd: fd, box: make([]byte, 0, sealedHeader+recordBytes+tagBytes)}
	if err = unix.Fallocate(fd, 0, 0, recordBytes); err == nil { // else a write to mem could end this process
		s.mem, err = unix.Mmap(fd, 0, recordBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("%d bytes of memory for encrypted records: %w", recordBytes, err)
	}
	return s, nil
}

func (s *slate) free() {
	_ = unix.Munmap(s.mem)
	_ = unix.Close(s.fd)
}

// slates keeps some that no stream uses. A stream holds one only within a frame.
type slates struct {
	mu     sync.Mutex
	spare  []*slate
	closed bool
}

const maxSpareSlates = 16

func (l *slates) take() (*slate, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := len(l.spare); n > 0 {
		s := l.spare[n-1]
		l.spare = l.spare[:n-1]
		return s, nil
	}
	return newSlate()
}

func (l *slates) give(s *slate) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || len(l.spare) == maxSpareSlates {
		s.free()
		return
	}
	l.spare = append(l.spare, s)
}

func (l *slates) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for _, s := range l.spare {
		s.free()
	}
	l.spare = nil
}
