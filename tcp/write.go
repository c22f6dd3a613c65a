// The engine gives a write at once or bit by bit. Its outcome is told when no stream reads its blocks any more.

package tcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/intervals"
	"github.com/kvconn/kvconn/internal/stopwatch"
)

// outbound is one transfer that is sent. Its fields are guarded by sender.mu.
type outbound struct {
	id      core.TransferID
	grant   random
	peer    *outPeer
	ranges  sendRanges
	todo    intervals.Set   // to send: bytes that no frame has had, and bytes that were lost with a stream
	left    uint64          // bytes of it
	total   uint64          // also of the bytes that are not given yet
	sent    []sentFrame     // on the newest stream of each number
	frames  int             // taken by a stream and not yet written whole
	moves   stopwatch.Watch // while bytes are under way
	wait    *wait           // for a stream of D's, if the transfer cannot go on without one
	err     error           // ends the transfer when frames is 0
	over    atomic.Bool     // err is set
	ended   time.Time       // when it was; not guarded, and set before over is
	life    context.Context // ends when err is set; nil unless somebody waits for that
	endLife func()          // ends it
	acked   bool            // D has said that all bytes are in: this ends the transfer too
	ask     bool            // a frame without bytes is to be sent: the transfer has none, or D has all of them
}

// Write implements core.Transport.
func (t *Transport) Write(op core.WriteOp) {
	s := &t.sender
	if len(op.Grant) != len(random{}) {
		t.sink.Written(op.ID, core.TransferStats{}, fmt.Errorf("tcp: grant of %d bytes, want %d", len(op.Grant), len(random{})))
		return
	}
	out := &outbound{id: op.ID, grant: random(op.Grant), total: op.Total(), ranges: sendRanges{layout: t.layout}}
	err := out.give(sendRangesOf(make([]sendRange, 0, 1), t.layout, &op))
	out.ask = out.total == 0
	out.sent = make([]sentFrame, 0, 1+out.total/t.cfg.FrameBytes)
	s.mu.Lock()
	p := s.peers[op.Peer]
	switch {
	case err != nil:
	case s.closed:
		err = errClosed
	case s.byID[op.ID] != nil:
		err = fmt.Errorf("tcp: transfer %q is being written already", op.ID.Name())
	case p == nil:
		err = fmt.Errorf("tcp: decode agent %s is not admitted, it must say hello: %w", op.Peer, core.ErrConnectionLost)
	case p.byGrant[out.grant] != nil:
		err = fmt.Errorf("tcp: transfer %q has the grant of transfer %q", op.ID.Name(), p.byGrant[out.grant].id.Name())
	default:
		out.peer = p
		s.byID[op.ID], p.byGrant[out.grant] = out, out
		out.enqueue(false)
		s.startWatchdog()
		if p.open == 0 {
			s.await(out, t.cfg.DialTimeout, fmt.Errorf("tcp: decode agent %s has no stream: %w", op.Peer, core.ErrConnectionLost))
		}
	}
	s.mu.Unlock()
	if err != nil {
		t.sink.Written(op.ID, core.TransferStats{}, err)
	}
}

// Extend implements core.Transport.
func (t *Transport) Extend(op core.WriteOp) {
	s := &t.sender
	part := sendRangesOf(nil, t.layout, &op)
	s.mu.Lock()
	out := s.byID[op.ID]
	if out == nil || out.err != nil || !bytes.Equal(out.grant[:], op.Grant) {
		s.mu.Unlock()
		return
	}
	queued := out.due()
	err := out.give(part)
	if err == nil {
		out.enqueue(queued)
		s.mu.Unlock()
		return
	}
	out.fail(err)
	t.wg.Add(1) // Close waits for the outcome that is told below
	defer t.wg.Done()
	s.mu.Unlock()
	s.end(out, nil)
}

// give adds bytes to a write.
func (out *outbound) give(part []sendRange) error {
	for i := range part {
		p := &part[i]
		if p.end > out.total || !out.ranges.add(p) {
			return fmt.Errorf("tcp: transfer %q of %d bytes was given bytes %d to %d: they lie outside of it, or some were given before", out.id.Name(), out.total, p.position, p.end)
		}
		out.todo.Add(p.position, p.end)
		out.left += p.end - p.position
	}
	out.paces()
	return nil
}

// paces runs the write's clock while bytes are under way; sender.mu is held. When all bytes are given, the clock also runs while P waits
// for D's answer, since P cannot see when the last byte has arrived.
func (out *outbound) paces() {
	out.moves.Run(out.ranges.bytes > 0 && (out.frames > 0 || !out.rests() || fault.On("stream-rest-sent")), time.Now())
}

// Stop implements core.Transport.
func (t *Transport) Stop(id core.TransferID) {
	s := &t.sender
	s.mu.Lock()
	out := s.byID[id]
	if out == nil || s.closed {
		s.mu.Unlock()
		return
	}
	t.wg.Add(1) // Close waits for the outcome that is told below
	defer t.wg.Done()
	s.mu.Unlock()
	s.end(out, errors.New("tcp: the write was stopped"))
}

// fail gives a transfer up; sender.mu is held. The first cause is told.
func (out *outbound) fail(err error) {
	if out.err == nil {
		out.err, out.ended = err, time.Now()
		out.over.Store(true)
	}
	if out.endLife != nil {
		out.endLife()
	}
	out.left, out.todo, out.ask = 0, nil, false
}

// lifeOf ends when the transfer is given up.
func (s *sender) lifeOf(out *outbound) context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	if out.life == nil {
		out.life, out.endLife = context.WithCancel(context.Background())
	}
	if out.err != nil {
		out.endLife()
	}
	return out.life
}

// end gives a transfer up with err. The outcome is told when no stream reads its blocks.
// A transfer that was settled meanwhile stays as it was: its outcome is being told,
// without the lock.
func (s *sender) end(out *outbound, err error) {
	s.mu.Lock()
	tell := false
	if s.byID[out.id] == out {
		out.fail(err)
		tell = s.settle(out)
	}
	s.mu.Unlock()
	s.tell(out, tell)
}
