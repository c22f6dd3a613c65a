package tcp

import (
	"fmt"
	"syscall"
	"time"
	"unsafe"
)

// sealing cuts one frame into records. It gathers a record's bytes from the blocks, or from
// slots, before it seals any of them. So a block that cannot be read leaves no trace in the
// stream.
type sealing struct {
	w      *frameWriter
	box    *box
	buffer *recordBuffer
	left   uint64 // bytes of the frame that are not gathered
	head   uint64 // bytes of the header that are not gathered
	have   int    // bytes that are gathered and not sent
	sent   uint64 // bytes of the frame that are sent, header included
	part   []iovec

	pending []byte // the rest of a record that is sealed and not sent whole
	holds   uint64 // bytes of the frame in that record
	one     [1]iovec
	begun   bool // a record is sealed, so its number is used: if the record is not sent, the stream cannot go on
}

// seal has the writer's frame sent as records, on a sealed stream.
func (w *frameWriter) seal(length uint64) error {
	if w.st.sealed == nil {
		return nil
	}
	buffer, err := w.s.t.buffers.take()
	if err != nil {
		return &copyError{"encrypt", err}
	}
	f := &w.st.sealing
	*f = sealing{w: w, box: w.st.sealed.data, buffer: buffer, left: length - headerSize, head: headerSize, part: f.part[:0]}
	w.sealing = f
	return nil
}

// sealed says how many bytes of the frame are in the stream. If the stream is plain, it is sent.
func (w *frameWriter) sealed(sent uint64) uint64 {
	f := w.sealing
	if f == nil {
		return sent
	}
	w.s.t.buffers.give(f.buffer)
	if f.begun {
		return max(f.sent, 1)
	}
	return f.sent
}

// write writes a part of the frame. It gives back what the peer has not taken by until, like send.
func (w *frameWriter) write(vec []iovec, length uint64, until time.Time) (uint64, error) {
	if w.sealing != nil {
		return w.sealing.write(vec, until)
	}
	return w.send(vec, length, until)
}

// flush sends what is left in a record of a part that was given back, like send.
func (w *frameWriter) flush(until time.Time) error {
	if w.sealing == nil {
		return nil
	}
	return w.sealing.flush(until)
}

// write takes the next bytes of the frame. With each record that is full, and with the last
// one, it sends. It says how many bytes it has taken.
func (f *sealing) write(vec []iovec, until time.Time) (taken uint64, err error) {
	if err := f.flush(until); err != nil {
		return 0, err
	}
	if f.head > 0 { // the frame begins with its header, which has a record of its own
		vec = drop(vec, uintptr(f.head))
		taken, f.head = f.head, 0
		if f.left == 0 {
			return taken, f.send(until)
		}
	}
	for len(vec) > 0 {
		f.part = front(f.part[:0], vec, min(recordBytes-uint64(f.have), f.left))
		n, errno := gather(f.buffer, f.have, f.part)
		switch {
		case errno == syscall.EFAULT:
			return taken, f.w.s.t.fault(f.part, false)
		case errno != 0:
			return taken, fmt.Errorf("pwritev: %w", errno)
		}
		vec = drop(vec, n)
		taken += uint64(n)
		f.have += int(n)
		f.left -= uint64(n)
		if f.have == recordBytes || f.left == 0 {
			if err := f.send(until); err != nil {
				return taken, err
			}
		}
	}
	return taken, nil
}

// front appends the first bytes of a vector to out.
func front(out, vec []iovec, bytes uint64) []iovec {
	for i := 0; bytes > 0 && i < len(vec); i++ {
		n := min(uint64(vec[i].len), bytes)
		out = append(out, iovec{vec[i].base, uintptr(n)})
		bytes -= n
	}
	return out
}

// gather copies a vector's bytes into a recordBuffer. The kernel does it, see recordBuffer.
func gather(s *recordBuffer, at int, v []iovec) (uintptr, syscall.Errno) {
	for {
		n, _, errno := syscall.Syscall6(syscall.SYS_PWRITEV, uintptr(s.fd), uintptr(unsafe.Pointer(&v[0])), uintptr(len(v)), uintptr(at), 0, 0)
		if errno != syscall.EINTR {
			return n, errno
		}
	}
}

// send seals what is gathered, and sends it; the first time behind the header's record.
func (f *sealing) send(until time.Time) (err error) {
	out, bytes := f.buffer.box, uint64(f.have)
	if f.sent == 0 {
		bytes += headerSize
		out, err = f.box.seal(out, f.w.st.hdr[:])
	}
	if err == nil && f.have > 0 {
		out, err = f.box.seal(out, f.buffer.mem[:f.have])
	}
	if err != nil {
		return err
	}
	f.pending, f.holds, f.have, f.begun = out, bytes, 0, true
	return f.flush(until)
}

// flush sends what is sealed. Another record is sealed only when all of it is sent.
func (f *sealing) flush(until time.Time) error {
	if len(f.pending) == 0 {
		return nil
	}
	f.one = [1]iovec{{uintptr(unsafe.Pointer(&f.pending[0])), uintptr(len(f.pending))}}
	n, err := f.w.send(f.one[:], uint64(len(f.pending)), until)
	f.pending = f.pending[n:]
	if err != nil {
		return err
	}
	f.sent, f.holds = f.sent+f.holds, 0
	return nil
}
