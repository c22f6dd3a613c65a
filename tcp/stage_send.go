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

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/internal/fault"
)

// window is the most slots that one stream has at a time. It waits for a slot only while it
// has none, of whatever device and for whatever frame, so that streams never wait for each other.
const window = 4

// A stream gives its slots back when its peer has not taken a slot's bytes within tenure, so that
// a peer that takes none, or few, does not starve the others. The bytes are copied again when the
// peer takes some. Until a frame has gone without that, the stream has one slot at a time, with
// slowPart bytes at most. It takes it when its socket has room, and keeps it for one writev.
const (
	tenure   = 100 * time.Millisecond
	slowPart = 64 << 10
)

// source is where the bytes of a frame come from. A stream's goroutine takes the frame apart.
// Parts in device memory are copied into slots, ahead of the part that is written. When all parts
// have begun, the first parts of the next frame are copied too: see stage_ahead.go.
type source struct {
	w       *frameWriter
	now     sourceFrame // that is written
	later   sourceFrame // that was taken ahead
	staged  int         // slots of both
	device  int         // of the slots that now has had; or nowhere, or several
	done    uint64      // bytes of now that are written
	slow    bool        // the peer is; see tenure
	yielded bool        // slots were given back in this frame
	mayCopy bool        // a slot's copy may read for ever
	runs    []Run
}

// What stands for a frame's device if it has had no slot, or slots of several devices.
const (
	nowhere = -1
	several = -2
)

// sourceFrame is a frame that is taken apart.
type sourceFrame struct {
	frame []iovec // as it was cut
	store []iovec
	rest  []iovec      // not begun; in store
	parts []sourcePart // begun and not written
	piece              // of a frame that was taken ahead; without bytes: there is none
	begun bool         // it was taken ahead, so that parts of it have begun
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

// writeStaged writes a stream's frame, of which some bytes may lie in device memory.
func (w *frameWriter) writeStaged(c *source, length uint64) (sent uint64, err error) {
	w.idle.each = tenure
	c.begins(w)
	defer func() { // whatever fails: parts of the frame may have begun ahead
		if err == nil {
			return
		}
		c.mayCopy = !c.ends(&c.now) || c.mayCopy
		w.s.giveBack(w.st)
		if c.mayCopy {
			err = fmt.Errorf("%w: %w", ErrMayCopy, err)
		}
	}()
	if err := w.seal(length); err != nil {
		return 0, err
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

// until is when the peer must have taken the next part. The zero time: it may take as long as it
// takes some bytes.
func (c *source) until() time.Time {
	switch {
	case c.staged == 0 || fault.On("tcp-slot-kept"):
		return time.Time{}
	case c.slow:
		return time.Now()
	}
	return time.Now().Add(c.w.s.tenure)
}

// begins begins with a frame. Of one that was taken ahead some parts have begun.
func (c *source) begins(w *frameWriter) {
	c.w, c.now.frame, c.done = w, w.st.vec, 0
	c.slow, c.yielded = c.yielded, false
	if !c.now.begun {
		if !fault.On("tcp-device-kept") {
			c.device = nowhere
		}
		c.now.rewind(0)
	}
	c.now.begun = false
}

// rewind begins with the bytes that are not written.
func (f *sourceFrame) rewind(done uint64) {
	f.store = append(f.store[:0], f.frame...)
	f.rest = drop(f.store, uintptr(done))
}

// yield gives all slots back. A peer that only holds up the slots of the next frame is no slow one for that frame: a part in host
// memory may take as long as it takes.
func (c *source) yield() bool {
	c.slow = true
	if slices.ContainsFunc(c.now.parts, func(p sourcePart) bool { return p.slot != nil }) || fault.On("tcp-host-slow") {
		c.yielded = true
	}
	c.mayCopy = !c.ends(&c.now)
	if !fault.On("tcp-ahead-kept") {
		c.w.s.giveBack(c.w.st)
	}
	c.now.rewind(c.done)
	return !c.mayCopy
}

// next is the next part, nil at the frame's end. It begins to copy the parts behind it.
func (c *source) next() (*sourcePart, error) {
	for len(c.now.rest) > 0 && c.staged < window {
		begun, err := c.begin()
		if err != nil {
			return nil, err
		}
		if !begun {
			break
		}
	}
	switch {
	case len(c.now.parts) == 0 && len(c.now.rest) > 0:
		return nil, errors.New("a frame's bytes are left, and no part has begun")
	case len(c.now.parts) == 0:
		return nil, nil
	}
	if len(c.now.rest) == 0 && (!c.slow || fault.On("tcp-ahead-slow")) {
		c.copyAhead()
	}
	p := &c.now.parts[0]
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

// begin takes a part off the frame; false if the part has no slot and parts before it come first.
// The first slot is there before the frame's header is written, so that a frame that gets no
// slot is taken back.
func (c *source) begin() (begun bool, _ error) {
	device, n, bytes := c.w.s.t.devices.alike(c.now.rest, ^uint64(0))
	if device < 0 {
		c.now.beginHost(n, bytes)
		return true, nil
	}
	slot, err := c.slot(device)
	if slot == nil || err != nil {
		return false, err
	}
	if c.device != nowhere && c.device != device && !fault.On("tcp-devices-mixed") {
		device = several
	}
	c.device = device
	c.beginCopy(&c.now, slot)
	return true, nil
}

// beginHost takes the first entries off, which lie in host memory.
func (f *sourceFrame) beginHost(entries int, bytes uint64) {
	f.parts = append(f.parts, sourcePart{vec: f.rest[:entries], bytes: bytes})
	f.rest = f.rest[entries:]
}

// beginCopy takes a part off that lies on the slot's device.
func (c *source) beginCopy(f *sourceFrame, slot Slot) {
	room := uint64(len(slot.Memory()))
	if c.slow {
		room = min(room, slowPart)
	}
	_, _, bytes := c.w.s.t.devices.alike(f.rest, room)
	c.runs = runs(c.runs[:0], f.rest, bytes)
	slot.Copy(c.runs)
	f.rest = drop(f.rest, uintptr(bytes))
	c.staged++
	f.parts = append(f.parts, sourcePart{slot: slot, bytes: bytes})
}

// slot takes a slot. It waits for one only if the stream has none, else it may return nil.
func (c *source) slot(device int) (Slot, error) {
	if c.slow && c.staged > 0 {
		return nil, nil
	}
	for unsent := c.slow; unsent; {
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
	if c.staged > 0 && !fault.On("tcp-slot-waits") {
		return nil, nil // the parts before it come first
	}
	return c.wait(device)
}

// wait waits for a slot, in one place of the queue. A frame of which nothing is written waits as
// long as its transfer and its stream live. Within a frame D waits too: for StallTimeout, and for
// stopGrace when the transfer was given up.
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

// ready waits until the socket has room. If the socket had room and took no bytes, that is looked at
// again only after an event, or a step that counts as one without progress. It ends when the transfer is given up and nothing of
// the frame is written (begun: something is).
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
	if slot := c.now.parts[0].slot; slot != nil {
		slot.Release()
		c.staged--
	}
	c.now.parts = slices.Delete(c.now.parts, 0, 1)
}

// ends returns when nothing is copied out of a frame's memory any more; false if that is
// not known.
func (c *source) ends(f *sourceFrame) (ended bool) {
	ended = true
	for i := range f.parts {
		slot := f.parts[i].slot
		if slot == nil {
			continue
		}
		c.staged--
		if fault.On("tcp-end-at-once") || f == &c.later && fault.On("tcp-ahead-unfenced") {
			slot.Release()
			continue
		}
		if err := slot.Wait(); errors.Is(err, ErrMayCopy) { // another error is of no account: nobody will read the slot
			ended = false
			continue
		}
		slot.Release()
	}
	f.parts, f.rest = f.parts[:0], nil
	return ended
}
