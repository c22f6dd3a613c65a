// How a stream ends at P.

package tcp

import (
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
)

// returnGrace is how long transfers wait for a D whose streams have all broken:
// a D that lives dials again at once; if D is dead, the blocks must come back.
const returnGrace = 500 * time.Millisecond

// streamEnded has the transfers that may have lost bytes wait until D has opened the
// stream anew. If it was the peer's last stream, streamEnded tells the sink. If D has sent
// what it must not send, the connection did not just break: then the transfers end.
func (s *sender) streamEnded(st *outStream, err error) {
	s.awaitCause(st, err)
	network := broken(err)
	err = fmt.Errorf("tcp stream from %s: %w: %w", st.conn.RemoteAddr(), core.ErrConnectionLost, s.t.describe(err))
	s.mu.Lock()
	if st.dead {
		s.mu.Unlock()
		return
	}
	st.shutDown()
	st.conn.Close() // not before: the stream's other goroutine would take this for the cause
	p := st.peer
	p.slots[st.number].stream = nil
	s.discount(st)
	bound := s.t.cfg.DialTimeout
	if p.open == 0 && !errors.Is(err, errStuck) {
		bound = s.grace
	}
	here := !s.closed && s.peers[p.id] == p
	var lost []*outbound
	for _, out := range p.byGrant {
		switch {
		case p.open > 0 && !out.sentOn(st.number):
		case here && network && out.ranges.bytes == 0 && out.total > 0:
			s.await(out, s.t.cfg.DialTimeout, err) // D may not have received a byte of P's yet, and is then not as quick
		case here && network:
			s.await(out, bound, err)
		default:
			lost = append(lost, out)
		}
	}
	down := here && p.open == 0
	p.wake.Broadcast()
	s.mu.Unlock()
	for _, out := range lost {
		s.end(out, err)
	}
	if down {
		s.t.sink.PeerDown(p.id, err)
	}
}

// awaitCause waits for the cause of a stream's end if the stream's other goroutine has it: the kernel tells one call why it has
// given up a connection, and another that comes later only that there is none.
func (s *sender) awaitCause(st *outStream, err error) {
	if !s.causeAwaited(st, err) {
		return
	}
	late := time.NewTimer(s.late)
	defer late.Stop()
	select {
	case <-st.life.Done():
	case <-late.C: // nobody has it
	}
}

// causeAwaited says whether an error leaves open why the kernel has given up a connection.
func (s *sender) causeAwaited(st *outStream, err error) bool {
	s.mu.Lock()
	shut := st.shut // P has closed its end, and D then
	s.mu.Unlock()
	return (errors.Is(err, io.EOF) || errors.Is(err, syscall.EPIPE)) && !shut && st.closed()
}

// closed says whether the kernel has closed the connection: both ends have, or it was given up.
func (st *outStream) closed() bool {
	info := st.info()
	return info != nil && info.State == unix.BPF_TCP_CLOSE
}
