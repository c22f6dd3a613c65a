// The kernel reads and writes the engine's memory for this process. If the memory is not
// what the engine said, the kernel refuses by EFAULT and leaves the stream as it was. That
// ends one transfer and no other.

package tcp

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"time"

	"github.com/kvconn/kvconn/hostmem"
)

// maxFault is the longest text of a frameFault, in bytes.
const maxFault = 512

// fault explains an EFAULT of readv (write: true) or writev. The vector may have memory of
// this package at its front.
func (t *Transport) fault(v []iovec, write bool) error {
	spans := make([]hostmem.Span, len(v))
	for i := range v {
		spans[i] = hostmem.Span{Base: uint64(v[i].base), Length: uint64(v[i].len)}
	}
	return fmt.Errorf("tcp: %w", hostmem.Fault(t.layout.Regions, spans, write, syscall.EFAULT))
}

// failed ends a transfer whose bytes D's memory does not take. D keeps the reason before its
// streams forget the transfer. So the first stream that answers P gives P the reason.
func (r *receiver) failed(in *inbound, err error) {
	text := strings.ToValidUTF8(err.Error(), "")
	r.mu.Lock()
	if r.byID[in.id] == in {
		r.done.add(doneTransfer{grant: in.grant, fault: text[:min(len(text), maxFault)]})
	}
	r.mu.Unlock()
	r.fail(in, err)
}

// answered tells P how a transfer has ended that is not expected any more.
func (s *inStream) answered(grant random) error {
	s.r.mu.Lock()
	h, fault := s.r.done.answer(grant)
	s.r.mu.Unlock()
	return s.answer(&h, fault)
}

func (s *inStream) answer(h *header, text string) error {
	b := make([]byte, headerSize, headerSize+len(text))
	h.encode((*[headerSize]byte)(b))
	b = append(b, text...)
	if s.sealed != nil {
		var err error
		if b, err = s.sealed.answers.sealFrame(b[:headerSize], b[headerSize:]); err != nil {
			return err
		}
	}
	s.conn.SetWriteDeadline(time.Now().Add(s.r.t.cfg.StallTimeout))
	_, err := s.conn.Write(b)
	return err
}

// faulted reads D's reason for which a transfer has failed there, and ends it.
func (s *sender) faulted(st *outStream, h *header) error {
	if h.length > maxFault {
		return fmt.Errorf("a reason of %d bytes, at most %d are read", h.length, maxFault)
	}
	text := make([]byte, h.length)
	if err := st.readText(text); err != nil {
		return err
	}
	p := st.peer
	s.mu.Lock()
	out := p.byGrant[h.key]
	s.mu.Unlock()
	if out != nil {
		s.end(out, fmt.Errorf("tcp: decode agent %s: %s", p.id, strings.ToValidUTF8(string(text), "")))
	}
	return nil
}

// copyError is the error of a copy out of device memory, or into it.
type copyError struct {
	doing string
	err   error
}

func (e *copyError) Error() string { return "tcp: " + e.doing + ": " + e.err.Error() }
func (e *copyError) Unwrap() error { return e.err }

// ofMemory says whether an error comes from the engine's memory, and so ends one transfer only.
func ofMemory(err error) bool {
	var host *hostmem.FaultError
	var device *copyError
	return errors.As(err, &host) || errors.As(err, &device) || errors.Is(err, errClosed)
}

// cannotRead ends a transfer whose bytes this process cannot read. If a part of its frame
// is in the stream, nothing else can follow: the stream ends there, D discards the part
// and opens the next one. What was written before arrives. sent is how much of the frame
// was written; false says that the stream is over.
func (s *sender) cannotRead(st *outStream, out *outbound, frame, sent uint64, err error) (goesOn bool) {
	s.mu.Lock()
	out.fail(err)
	out.frames--
	tell := s.settle(out)
	if goesOn = sent == 0; goesOn {
		st.offset -= frame
	}
	s.mu.Unlock()
	s.tell(out, tell)
	if !goesOn {
		s.mu.Lock()
		st.shut = true
		st.peer.tuner.reset()
		st.peer.wake.Broadcast() // another stream is used in its place
		s.mu.Unlock()
		// D closes the stream then, and serve sees its end.
		st.conn.SetReadDeadline(time.Now().Add(s.t.cfg.StallTimeout))
		_ = st.conn.CloseWrite()
	}
	return goesOn
}
