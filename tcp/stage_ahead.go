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
// holds up transfers of its own memory only. A frame is taken ahead only with a slot for it that nobody
// waits for, and only if no other stream waits for a frame.

// copyAhead begins to copy the next frame's first parts, as far as there are slots.
func (c *source) copyAhead() {
	s, st, l := c.w.s, c.w.st, &c.later
	for (c.staged < window || c.staged < 2*window && fault.On("tcp-ahead-wide")) && c.device >= 0 {
		device := c.deviceAhead()
		if device < 0 || device != c.device && !fault.On("tcp-ahead-elsewhere") {
			return
		}
		slot, err := s.t.devices.mover.Slot(noWait, device, FromDevice, st.peer.id)
		if slot == nil || err != nil { // an error is seen when the stream needs a slot
			return
		}
		if l.length == 0 {
			if !s.takeAhead(st, device) {
				slot.Release()
				return
			}
			l.rewind(0)
			c.deviceAhead()
		}
		c.beginCopy(l, slot)
	}
}

// deviceAhead is the device of the next part that can be copied ahead, -1 if there is none. The parts
// before it that lie in host memory have begun then.
func (c *source) deviceAhead() int {
	l, d := &c.later, &c.w.s.t.devices
	if l.length == 0 {
		return c.w.s.deviceAhead(c.w.st)
	}
	for len(l.rest) > 0 {
		device, n, bytes := d.alike(l.rest, ^uint64(0))
		if device >= 0 {
			return device
		}
		l.beginHost(n, bytes)
	}
	return -1
}

// deviceAhead is the first device of the frame that a stream can take ahead, -1 if there is none.
func (s *sender) deviceAhead(st *outStream) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, device := s.peekAhead(st)
	return device
}

// peekAhead is the transfer whose frame a stream can take ahead, and the frame's first device, -1 if
// there is none. The frame's bytes are in source.later then; s.mu is held.
func (s *sender) peekAhead(st *outStream) (*outbound, int) {
	p, l := st.peer, &st.source.later
	switch {
	case st.dead || s.closed || len(p.queue) == 0 || p.queue[0].left == 0 || !p.uses(st):
		return nil, -1
	case p.waits > 0 && !fault.On("tcp-ahead-greedy"):
		return nil, -1
	case (p.stuck != nil && p.stuck != st || p.asks || len(st.rested) > 0) && !fault.On("tcp-ahead-endless"): // the frames of no transfer would have no end to wait for
		return nil, -1
	}
	if l.frame == nil {
		l.frame = make([]iovec, 0, maxVector)
	}
	out := p.queue[0]
	l.frame, l.position, _ = out.peek(append(l.frame[:0], st.header()), s.t.cfg.FrameBytes)
	return out, s.t.devices.first(l.frame)
}

// first is the device of the first entry that lies on one, -1 if none does.
func (d *devices) first(vec []iovec) int {
	if i := slices.IndexFunc(vec, func(v iovec) bool { return d.of(v.base) >= 0 }); i >= 0 {
		return d.of(vec[i].base)
	}
	return -1
}

// takeAhead cuts the next frame off the queue into a stream's source, if its first device is this one.
func (s *sender) takeAhead(st *outStream, device int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	out, first := s.peekAhead(st)
	if first < 0 || first != device {
		return false
	}
	p, l := st.peer, &st.source.later
	l.frame, l.position, l.length = out.cut(append(l.frame[:0], st.header()), s.t.cfg.FrameBytes) // the same bytes
	p.queue = p.queue[1:]
	st.ahead, out.ask = out, false
	out.frames++
	out.ahead += l.length
	if out.left > 0 {
		p.queue = append(p.queue, out)
	}
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

// returns gives the frame back that a stream has ahead, if its transfer was given up.
func (s *sender) returns(st *outStream) {
	if out := st.ahead; out != nil && out.over.Load() && !fault.On("tcp-ahead-unasked") {
		s.giveBack(st)
	}
}
