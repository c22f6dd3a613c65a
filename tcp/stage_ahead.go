package tcp

import (
	"slices"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/internal/fault"
)

// Copies out of device memory go on beyond a frame's end. When all parts of the present frame have
// begun, a stream takes the next frame of the queue and copies its first parts. Such a frame is given
// back whole if its turn does not come: the stream ends or is not used any more, its peer is slow, or
// the frame's transfer was given up. So no transfer waits for another one's peer.
//
// Nothing is copied ahead on another device than the present frame's: a device that does not answer
// holds up transfers of its own memory only. A frame that begins in host memory is not taken ahead.
//
// A frame is taken ahead only with a slot for it that nobody waits for, and only if no other stream waits
// for a frame. If another stream waits for one later, or the frame's transfer is given up, the stream
// sees that within tenure, and between two parts: see returns.

// copyAhead begins to copy the next frame's first parts, as far as there are slots.
func (c *source) copyAhead() {
	s, st, l := c.w.s, c.w.st, &c.later
	for (c.staged < window || c.staged < 2*window && fault.On("tcp-ahead-wide")) && c.device >= 0 {
		if l.length > 0 && !l.beginsHost(&s.t.devices, c.device) {
			return
		}
		slot, err := s.t.devices.mover.Slot(noWait, c.device, FromDevice, st.peer.id)
		if slot == nil || err != nil { // an error is seen when the stream needs a slot
			return
		}
		if l.length == 0 && !s.takeAhead(st, c.device) {
			slot.Release()
			return
		}
		c.beginCopy(l, slot)
	}
}

// beginsHost begins the parts that lie in host memory, up to one on a device; false if none lies on this device.
func (f *sourceFrame) beginsHost(d *devices, device int) bool {
	for len(f.rest) > 0 {
		on, n, bytes := d.alike(f.rest, ^uint64(0))
		if on >= 0 {
			return on == device || fault.On("tcp-ahead-elsewhere")
		}
		f.beginHost(n, bytes)
	}
	return false
}

// mayTakeAhead says whether a stream may take the next frame of the queue ahead, and the frame begins on this device; s.mu is held.
func (s *sender) mayTakeAhead(st *outStream, device int) bool {
	p := st.peer
	switch {
	case st.dead || s.closed || len(p.queue) == 0 || p.queue[0].left == 0 || !p.uses(st):
		return false
	case p.waits > 0 && !fault.On("tcp-ahead-greedy"):
		return false
	case (p.stuck != nil && p.stuck != st || p.asks || len(st.rested) > 0) && !fault.On("tcp-ahead-endless"): // the frames of no transfer would have no end to wait for
		return false
	}
	on := s.t.devices.of(p.queue[0].next())
	return on == device || on >= 0 && fault.On("tcp-ahead-elsewhere")
}

// takeAhead cuts the next frame off the queue into a stream's source, if it may.
func (s *sender) takeAhead(st *outStream, device int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.mayTakeAhead(st, device) {
		return false
	}
	p, l := st.peer, &st.source.later
	if l.frame == nil {
		l.frame = make([]iovec, 0, maxVector)
	}
	out := p.queue[0]
	p.queue, st.ahead = p.queue[1:], out
	l.frame, l.piece = s.cut(out, append(l.frame[:0], st.header()))
	out.ahead += l.length
	l.rewind(0)
	l.beginHost(1, headerSize)
	return true
}

// goesOn begins the frame that a stream has taken ahead, if the stream still takes frames. It returns
// the number of its bytes, 0 if there is none.
func (s *sender) goesOn(st *outStream) (*outbound, uint64) {
	c := &st.source
	if c.later.length == 0 {
		return nil, 0
	}
	s.mu.Lock()
	out := st.ahead
	switch {
	case (st.dead || s.closed) && !fault.On("tcp-ahead-dead"), // another stream, or none, sends the frame
		!st.peer.uses(st) && !fault.On("tcp-ahead-unused"),
		out.err != nil && !fault.On("tcp-ahead-stopped"):
		s.mu.Unlock()
		s.giveBack(st)
		return nil, 0
	}
	defer s.mu.Unlock()
	c.now, c.later = c.later, c.now
	c.now.begun = true
	st.vec, c.later.frame = c.now.frame, st.vec
	length := st.begins(out, c.now.piece)
	s.nothingAhead(st, c.now.piece)
	c.now.piece, c.later.piece = piece{}, piece{}
	return out, length
}

// nothingAhead says that a stream has no frame ahead any more; s.mu is held.
func (s *sender) nothingAhead(st *outStream, cut piece) {
	st.ahead.ahead -= cut.length
	st.ahead = nil
}

// giveBack gives the frame back that a stream has taken ahead, if there is one, when nothing is copied
// for it any more. If a copy of it may still read, its transfer has no end.
func (s *sender) giveBack(st *outStream) {
	l := &st.source.later
	if l.length == 0 {
		return
	}
	ended := st.source.ends(l)
	s.mu.Lock()
	out, cut := st.ahead, l.piece
	s.nothingAhead(st, cut)
	l.piece = piece{}
	if !ended && !fault.On("tcp-ahead-stuck") {
		if !fault.On("tcp-ahead-stuck-on") {
			out.fail(ErrMayCopy) // frames stays, so that nobody is told
		}
		s.mu.Unlock()
		s.t.cfg.Logger.Error("the blocks of a transfer may be read for ever", zap.String("transfer_id", string(out.id)), zap.Error(ErrMayCopy))
		return
	}
	out.frames--
	if out.err == nil && !fault.On("tcp-ahead-lost") {
		queued := out.due()
		out.todo.Add(cut.position, cut.position+cut.length)
		out.left += cut.length
		if !queued { // it was at its turn
			st.peer.queue = slices.Insert(st.peer.queue, 0, out)
			st.peer.wake.Broadcast()
		}
	}
	tell := s.settle(out)
	s.mu.Unlock()
	s.tell(out, tell)
}

// returns gives the frame back that a stream has ahead, if its transfer was given up, or if another stream has nothing to send.
func (s *sender) returns(st *outStream) {
	if st.ahead == nil {
		return
	}
	s.mu.Lock()
	p := st.peer
	back := st.ahead.err != nil && !fault.On("tcp-ahead-unasked") || p.waits > 0 && len(p.queue) == 0 && !fault.On("tcp-ahead-hoarded")
	s.mu.Unlock()
	if back {
		s.giveBack(st)
	}
}
