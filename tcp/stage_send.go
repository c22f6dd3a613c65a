// Bytes of device memory leave by way of pinned slots, which are filled ahead of the part that is being written.

package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"syscall"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/invariants"
)

// window is the most slots that one stream has at a time. A stream waits for a slot only while it
// has none, so that streams never wait for each other.
const window = 4

// If a peer has not taken a slot's bytes within tenure, the stream gives its slots back, so that a peer
// that takes no bytes, or few, does not starve the others. When the peer takes bytes again, they are
// copied again. Until a whole frame has gone without that, the stream has one slot at a time, with
// slowPart bytes at most. It takes this slot when its socket has room, and keeps it for one writev.
const (
	tenure   = 100 * time.Millisecond
	slowPart = 64 << 10
)

// source is where the bytes of a frame come from. A stream's goroutine takes the frame apart.
// Parts in device memory are copied into slots, ahead of the part that is written.
type source struct {
	w      *frameWriter
	frame  []iovec // as it was cut
	store  []iovec
	rest   []iovec // of the frame, not begun; in store
	ahead  []sourcePart
	staged int    // slots in ahead
	done   uint64 // bytes of the frame that are written
	runs   []Run
}

// sourcePart is a part of a frame in memory that a socket can read once its copy has passed.
type sourcePart struct {
	vec   []iovec
	bytes uint64
	slot  Slot // nil: vec is of host memory
	one   [1]iovec
}

var noWait = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// writeStaged writes a frame to a stream. Some of the frame's bytes may lie in device memory. However it ends, no copy of the frame goes on. If
// it fails, none of the frame that follows does either.
func (w *frameWriter) writeStaged(length uint64) (sent uint64, err error) {
	w.idle.each = tenure
	c := &w.st.source
	c.w = w
	w.st.slow, w.st.yielded = w.st.yielded, false
	defer func() {
		c.end()
		if err != nil {
			w.s.giveBack(w.st)
		}
		if w.st.mayCopy {
			err = fmt.Errorf("%w: %w", ErrMayCopy, err)
		}
	}()
	if err := w.seal(length); err != nil {
		return 0, err
	}
	if w.stops() {
		return 0, &copyError{"write a frame", errGivenUp}
	}
	for {
		if c.done > 0 && c.done < length { // a part that is taken at once asks nobody
			if err := w.givenUp(); err != nil {
				return c.done, err
			}
		}
		p, err := c.next()
		if err != nil {
			return c.done, err
		}
		if p == nil {
			return c.done, w.flush(time.Time{})
		}
		c.lookAhead()
		n, err := w.write(p.vec, p.bytes, c.until())
		c.done += n
		switch {
		case err == nil:
			c.written()
		case !errors.Is(err, errSlow) || !c.yield():
			return c.done, err
		}
	}
}

// until is when the peer must have taken the next part. If it is zero, the peer has no limit as long
// as it takes some bytes.
func (c *source) until() time.Time {
	switch {
	case c.staged+c.w.st.next.source.staged == 0 || fault.On("tcp-slot-kept"):
		return time.Time{}
	case c.w.st.slow:
		return time.Now()
	}
	return time.Now().Add(tenure)
}

// begins is called with each frame that is cut.
func (c *source) begins(frame []iovec) {
	if invariants.Enabled {
		invariants.Must(len(c.ahead) == 0 && c.staged == 0, "%d parts of another frame, %d slots", len(c.ahead), c.staged)
	}
	c.frame, c.done = frame, 0
	c.rewind()
}

// lookAhead cuts the frame that follows, when all parts of this one have begun and the stream may have one more slot, and begins its copies:
// so the device need not wait until this frame is written. A slow peer has no copies ahead, nor has a transfer that was given up.
// The next frame is this transfer's even if no slot is free, or none is needed: then another transfer waits for one frame more.
func (c *source) lookAhead() {
	st, n := c.w.st, c.w.st.next
	if len(c.rest) > 0 || st.slow || c.w.stops() || c.staged+n.source.staged >= window {
		return
	}
	if n.out == nil {
		if !c.w.s.takeAhead(st, c.w.out) {
			return
		}
		n.source.w = c.w
	}
	for len(n.source.rest) > 0 && len(n.source.ahead) <= window && c.staged+n.source.staged < window {
		p, err := n.source.begin(false)
		if p == nil || err != nil {
			return
		}
		n.source.ahead = append(n.source.ahead, *p)
	}
}

// rewind begins anew with the bytes of the frame that are not written yet.
func (c *source) rewind() {
	c.store = append(c.store[:0], c.frame...)
	c.rest = drop(c.store, uintptr(c.done))
}

// yield gives all slots of the stream back; false if a copy may still read. If they were all the next frame's, what the peer has not taken in
// time is host memory, which may be far more than a slot. This says nothing of how the peer takes slots, so the next frame does not begin as a
// slow peer's.
func (c *source) yield() bool {
	st := c.w.st
	st.slow, st.yielded = true, st.yielded || c.staged > 0
	c.end()
	c.rewind()
	if st.next.out != nil {
		st.next.source.end()
		st.next.source.rewind()
	}
	return !st.mayCopy
}

// next is the next part, nil at the frame's end. It begins to copy the parts behind it.
func (c *source) next() (*sourcePart, error) {
	for len(c.rest) > 0 && len(c.ahead) < window {
		p, err := c.begin(true)
		if p == nil {
			if err != nil {
				return nil, err
			}
			break
		}
		c.ahead = append(c.ahead, *p)
	}
	if len(c.ahead) == 0 {
		return nil, nil
	}
	p := &c.ahead[0]
	if p.slot != nil {
		if !fault.On("tcp-send-early") {
			if err := p.slot.Wait(); err != nil {
				return nil, &copyError{"copy out of device memory", err}
			}
		}
		p.one[0] = entry(p.slot, p.bytes)
		p.vec = p.one[:]
	}
	return p, nil
}

// begin takes a part off the frame. If the part gets no slot, and parts before it must be written first or it may not wait, it returns nil.
// A frame has its first slot before its header is written. So if it gets no slot, the whole frame can be
// taken back.
func (c *source) begin(wait bool) (*sourcePart, error) {
	d := &c.w.s.t.devices
	device, n, bytes := d.alike(c.rest, ^uint64(0))
	if device < 0 {
		p := &sourcePart{vec: c.rest[:n], bytes: bytes}
		c.rest = c.rest[n:]
		return p, nil
	}
	slot, err := c.slot(device, wait)
	if slot == nil || err != nil {
		return nil, err
	}
	room := uint64(len(slot.Memory()))
	if c.w.st.slow {
		room = min(room, slowPart)
	}
	_, _, bytes = d.alike(c.rest, room)
	c.runs = runs(c.runs[:0], c.rest, bytes)
	slot.Copy(c.runs)
	c.rest = drop(c.rest, uintptr(bytes))
	c.staged++
	return &sourcePart{slot: slot, bytes: bytes}, nil
}

// slot takes a slot. It waits for one only if the stream has none, else it may return nil.
func (c *source) slot(device int, wait bool) (Slot, error) {
	if c.w.st.slow && c.staged > 0 {
		return nil, nil
	}
	for unsent := c.w.st.slow; unsent; {
		if err := c.w.ready(c.done > 0); err != nil {
			return nil, err
		}
		err := c.w.flush(time.Now()) // what a record has left needs no slot
		if unsent = errors.Is(err, errSlow); err != nil && !unsent {
			return nil, err
		}
	}
	slot, err := c.w.s.t.devices.mover.Slot(noWait, device, FromDevice, c.w.st.peer.id)
	if err == nil {
		return slot, nil
	}
	if c.staged > 0 || !wait {
		return nil, nil // the parts before it come first
	}
	return c.wait(device)
}

// wait waits for a slot, and keeps its place in the queue of those that wait. If nothing of the frame is
// written yet, it waits as long as the transfer and the stream live. Within a frame D waits too: so it waits
// for StallTimeout at most, or for stopGrace if the transfer was given up.
func (c *source) wait(device int) (Slot, error) {
	t := c.w.s.t
	ctx, cancel := context.WithCancelCause(c.w.st.life)
	defer cancel(nil)
	over, grace := errGivenUp, time.Duration(0)
	if c.done > 0 {
		over, grace = fmt.Errorf("%w: %w", errStuck, os.ErrDeadlineExceeded), min(stopGrace, c.w.rest())
		late := time.AfterFunc(t.cfg.StallTimeout/2, func() { cancel(context.DeadlineExceeded) })
		defer late.Stop()
	}
	defer context.AfterFunc(c.w.s.lifeOf(c.w.out), func() {
		select {
		case <-time.After(grace):
			cancel(over)
		case <-ctx.Done():
		}
	})()
	slot, err := t.devices.mover.Slot(ctx, device, FromDevice, c.w.st.peer.id)
	switch {
	case err == nil:
		return slot, nil
	case c.done > 0 && context.Cause(ctx) == over:
		return nil, over
	case c.w.st.life.Err() != nil && t.ctx.Err() == nil: // the bytes go by D's next stream
		return nil, net.ErrClosed
	}
	return nil, t.noSlot(err)
}

// ready waits until the socket has room. If the socket had room and took no bytes, ready looks again only after an event, or after
// a step, which counts as one without progress. begun says that a part of the frame is written. If nothing is written, and the
// transfer is given up, ready ends.
func (w *frameWriter) ready(begun bool) error {
	for {
		_, errno, err := w.attempt(true, func(fd uintptr) (uintptr, syscall.Errno) {
			if w.refused || !polled(fd, unix.POLLOUT) {
				w.refused = false
				return 0, syscall.EAGAIN
			}
			return 0, 0
		})
		if err != nil || errno == 0 {
			return err
		}
		if !begun && w.out.over.Load() {
			return &copyError{"wait for the decode agent", errGivenUp}
		}
		if err := w.givenUp(); err != nil {
			return err
		}
	}
}

// written ends the part that next has returned.
func (c *source) written() {
	if slot := c.ahead[0].slot; slot != nil {
		slot.Release()
		c.staged--
	}
	c.ahead = slices.Delete(c.ahead, 0, 1)
}

// end returns when nothing is copied out of the frame's memory any more. If that is not known, it says so in the stream's mayCopy.
func (c *source) end() {
	for i := range c.ahead {
		slot := c.ahead[i].slot
		if slot == nil {
			continue
		}
		if fault.On("tcp-end-at-once") {
			slot.Release()
			continue
		}
		if err := slot.Wait(); errors.Is(err, ErrMayCopy) { // another error is of no account: nobody will read the slot
			if st := c.w.st; !st.mayCopy {
				st.mayCopy = true
				c.w.s.t.cfg.Logger.Error("the blocks of a transfer may be read for ever", zap.String("transfer_id", string(c.w.out.id)), zap.Error(err))
			}
			continue
		}
		slot.Release()
	}
	c.ahead, c.staged, c.rest = c.ahead[:0], 0, nil
}
