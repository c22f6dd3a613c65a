package tcp

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/internal/callprobe"
)

// recordBuffer is memory through which a record goes. The kernel copies between it and the engine's
// blocks, as between them and a socket: a block that is not there is an EFAULT, and not the end
// of this process. So the memory is also a file.
type recordBuffer struct {
	fd  int
	mem []byte // recordBytes of plain text
	box []byte // empty, with room for the records of a header and of mem
}

func newRecordBuffer() (*recordBuffer, error) {
	err, fd := callprobe.Check(unix.SYS_MEMFD_CREATE), -1
	if err == nil { // a filter of system calls lets the process live
		fd, err = unix.MemfdCreate("kvconn", unix.MFD_CLOEXEC)
	}
	if err != nil {
		return nil, fmt.Errorf("memory for encrypted records: %w", err)
	}
	s := &recordBuffer{fd: fd, box: make([]byte, 0, sealedHeader+recordBytes+tagBytes)}
	if err = unix.Fallocate(fd, 0, 0, recordBytes); err == nil { // else a write to mem could end this process
		s.mem, err = unix.Mmap(fd, 0, recordBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("%d bytes of memory for encrypted records: %w", recordBytes, err)
	}
	return s, nil
}

func (s *recordBuffer) free() {
	_ = unix.Munmap(s.mem)
	_ = unix.Close(s.fd)
}

// recordBuffers keeps some that no stream uses. A stream holds one only within a frame.
type recordBuffers struct {
	mu     sync.Mutex
	spare  []*recordBuffer
	create func() (*recordBuffer, error) // see newRecordBuffer
	closed bool
}

const maxSpareBuffers = 16

func (l *recordBuffers) take() (*recordBuffer, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := len(l.spare); n > 0 {
		s := l.spare[n-1]
		l.spare = l.spare[:n-1]
		return s, nil
	}
	return l.create()
}

func (l *recordBuffers) give(s *recordBuffer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || len(l.spare) == maxSpareBuffers {
		s.free()
		return
	}
	l.spare = append(l.spare, s)
}

func (l *recordBuffers) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for _, s := range l.spare {
		s.free()
	}
	l.spare = nil
}
