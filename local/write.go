// P tells D where a write's bytes lie. If the write is stopped, P invalidates its page and waits for D's word, within a
// bound.

package local

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/intervals"
	"github.com/kvconn/kvconn/kv"
)

// outbound is one transfer that D copies. Its fields are guarded by sender.mu.
type outbound struct {
	id        core.TransferID
	grant     random
	taker     *taker
	link      *outLink // nil: D has not connected yet
	wait      *delayed // for a link, or for D's word on a stop
	validity  *validityPage
	proof     uint64        // the page's number
	proved    bool          // P has told D the number, so D may find out by itself whether P has kept the blocks
	positions intervals.Set // of the bytes that it has
	bytes     uint64        // how many bytes those are
	runs      int           // how many runs those are
	total     uint64        // the bytes of the whole transfer, with those that are not given yet
	todo      []piece
	ranges    []planRange // to say after todo
	said      uint64      // how many bytes P has said
	asked     bool        // D has heard of the write
	queued    bool        // it is in its link's queue
	started   time.Time

	kept   bool  // P has said that it has kept the blocks; the write is good when D says that it has reported the load
	halted bool  // P gives the write up, and waits for D's word that D copies no more
	err    error // why P gives it up
}

var errStopped = errors.New("local: the write was stopped")

// Write implements core.Transport.
func (t *Transport) Write(op core.WriteOp) {
	s := &t.sender
	if len(op.Grant) != len(random{}) {
		t.sink.Written(op.ID, core.TransferStats{}, fmt.Errorf("local: grant of %d bytes, want %d", len(op.Grant), len(random{})))
		return
	}
	out := &outbound{id: op.ID, grant: random(op.Grant), total: op.Total(), started: time.Now()}
	err := out.give(t.layout, &op)
	if err == nil {
		out.validity, out.proof, err = t.validity.take()
	}
	var ol *outLink
	s.mu.Lock()
	tk := s.peers[op.Peer]
	switch {
	case err != nil:
	case s.closed:
		err = errClosed
	case s.byID[op.ID] != nil:
		err = fmt.Errorf("local: transfer %q is being written already", op.ID.Name())
	case tk == nil:
		err = fmt.Errorf("local: decode agent %s is not admitted, it must say hello: %w", op.Peer, core.ErrConnectionLost)
	case tk.byGrant[out.grant] != nil:
		err = fmt.Errorf("local: transfer %q has the grant of transfer %q", op.ID.Name(), tk.byGrant[out.grant].id.Name())
	default:
		out.taker = tk
		s.byID[op.ID], tk.byGrant[out.grant] = out, out
		if ol = tk.link; ol != nil && ol.old {
			ol = nil // D comes anew
		}
		if ol != nil {
			out.link = ol
			ol.enqueue(out)
			break
		}
		out.wait = t.after(t.cfg.ConnectTimeout, "local wait for a link", func() {
			s.abandon(out, fmt.Errorf("local: decode agent %s has not connected within %v: %w", op.Peer, t.cfg.ConnectTimeout, core.ErrConnectionLost))
		})
	}
	s.mu.Unlock()
	if err != nil {
		t.validity.give(out.validity)
		t.sink.Written(op.ID, core.TransferStats{}, err)
		return
	}
	if ol != nil {
		ol.flush()
	}
}

// Extend implements core.Transport.
func (t *Transport) Extend(op core.WriteOp) {
	s := &t.sender
	s.mu.Lock()
	out := s.byID[op.ID]
	if out == nil || out.halted || s.closed || !bytes.Equal(out.grant[:], op.Grant) {
		s.mu.Unlock()
		return
	}
	t.wg.Add(1) // Close waits for the outcome that is told below
	defer t.wg.Done()
	var ended bool
	if err := out.give(t.layout, &op); err != nil {
		ended = s.halt(out, err)
	} else if out.link != nil {
		out.link.enqueue(out)
	}
	link := out.link
	s.mu.Unlock()
	if ended {
		s.tell(out)
	}
	if link != nil {
		link.flush()
	}
}

// give adds bytes to a write.
func (out *outbound) give(l *kv.Layout, op *core.WriteOp) error {
	if op.Plan != nil {
		list := planRanges(op.Plan)
		for _, w := range list {
			if err := out.has(w.position, w.end); err != nil {
				return err
			}
		}
		out.runs += op.Plan.Pieces()
		out.ranges = append(out.ranges, list...)
		return nil
	}
	pieces, runs := piecesOf(l, op)
	for i := range pieces {
		p := &pieces[i]
		if err := out.has(p.position, p.position+p.bytes()); err != nil {
			return err
		}
	}
	out.runs += runs
	out.todo = append(out.todo, pieces...)
	return nil
}

// has counts bytes that are given.
func (out *outbound) has(from, to uint64) error {
	if to > out.total || !out.positions.Add(from, to) {
		return fmt.Errorf("local: transfer %q of %d bytes was given bytes %d to %d: they lie outside of it, or some were given before", out.id.Name(), out.total, from, to)
	}
	out.bytes += to - from
	return nil
}

// due says whether there is something to say.
func (out *outbound) due() bool { return len(out.todo)+len(out.ranges) > 0 }

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
	ended := s.halt(out, errStopped)
	link := out.link
	s.mu.Unlock()
	if ended {
		s.tell(out)
		return
	}
	link.flush()
}

// halt gives a write up. If D has not heard of the write, the write has ended, and the caller must tell
// its outcome. Else halt invalidates the page, and the write ends with D's word that it copies no more, or after the
// grace; s.mu is held.
func (s *sender) halt(out *outbound, err error) (ended bool) {
	if out.halted {
		return false
	}
	if !out.asked {
		s.forget(out, err)
		return true
	}
	out.halted, out.err, out.todo, out.ranges = true, err, nil, nil
	if !fault.On("local-page-left-valid") {
		s.t.validity.invalidate(out.validity)
	}
	out.link.say(word(frameStop, out.grant))
	out.wait = s.t.after(s.t.cfg.StopGrace, "local stop", func() { s.abandon(out, err) })
	return false
}

// mostLate is how many stops of one link D may leave unanswered at a time. P keeps a validity page for each.
const mostLate = 64

// abandon ends a write without D's word: D has not connected in time, or has not answered a stop. If D has not answered, the page
// is invalid, and stays so until D answers. If D has connected just when the wait for it ended, the write goes on.
func (s *sender) abandon(out *outbound, err error) {
	var mute *outLink
	s.mu.Lock()
	mine := s.byID[out.id] == out && (out.link == nil || out.halted || fault.On("local-late-link"))
	if mine {
		if ol := out.link; ol != nil {
			if ol.late == nil {
				ol.late = map[random]*validityPage{}
			}
			ol.late[out.grant] = out.validity
			out.validity = nil
			if len(ol.late) > mostLate && !fault.On("local-patient") {
				mute = ol
			}
		}
		s.forget(out, err)
	}
	s.mu.Unlock()
	if mine {
		s.tell(out)
	}
	if mute != nil {
		s.part(mute, mute.lost(fmt.Errorf("it has not answered %d stops", mostLate)))
	}
}

// forget removes a transfer; s.mu is held. The caller must tell the write's outcome, which is
// err unless the write was given up before.
func (s *sender) forget(out *outbound, err error) {
	delete(s.byID, out.id)
	delete(out.taker.byGrant, out.grant)
	out.wait.stop()
	out.wait, out.todo, out.ranges, out.halted = nil, nil, nil, true
	if out.err == nil {
		out.err = err
	}
	s.t.validity.give(out.validity)
	out.validity = nil
}

// tell says how a forgotten transfer has ended.
func (s *sender) tell(out *outbound) {
	stats := core.TransferStats{Segments: out.runs}
	if out.err == nil {
		stats.Bytes, stats.Nanos = out.total, time.Since(out.started).Nanoseconds()
	}
	s.t.sink.Written(out.id, stats, out.err)
}

// enqueue queues a write, so that P says its runs to D; sender.mu is held.
func (ol *outLink) enqueue(out *outbound) {
	if !out.queued {
		out.queued = true
		ol.queue = append(ol.queue, out)
	}
}

// speak appends the frames that a link has room for, the transfers in turn.
func (s *sender) speak(ol *outLink, b []byte) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(ol.queue) > 0 && len(b) < writeAtOnce {
		out := ol.queue[0]
		if ol.credit == 0 && out.due() {
			break
		}
		ol.queue, out.queued = ol.queue[1:], false
		if out.halted || !out.due() && out.asked {
			continue
		}
		f := spoken{total: out.total, validity: out.validity.address}
		if out.proved = ol.shared == nil; out.proved { // a device's copies prove nothing
			f.proof = out.proof
		}
		if out.due() {
			f.piece = s.cut(ol, out, min(maxRuns, ol.credit))
			ol.credit -= len(f.runs)
		}
		out.asked = true
		if b = f.append(b, out.grant); out.due() {
			ol.enqueue(out)
		}
	}
	return b
}

// cut takes the next runs that P is to say to D: at most so many, and all in one space; s.mu is held.
func (s *sender) cut(ol *outLink, out *outbound, most int) (p piece) {
	if len(out.todo) == 0 {
		if s.pairs == nil {
			s.pairs = make([]kv.Pair, 0, maxRuns)
		}
		w := &out.ranges[0]
		out.todo = append(out.todo, w.cut(s.t.layout, most, s.pairs))
		if w.position == w.end {
			out.ranges = out.ranges[1:]
		}
	}
	first := &out.todo[0]
	taken := min(most, len(first.runs))
	p, rest := ol.spaces.cut(piece{position: first.position, runs: first.runs[:taken]})
	n := p.bytes()
	out.said += n
	first.position, first.runs = first.position+n, first.runs[taken-len(rest.runs):]
	if len(first.runs) == 0 {
		out.todo = out.todo[1:]
	}
	return p
}
