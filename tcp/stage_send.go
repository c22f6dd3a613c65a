package tcp

import (
	"context"
	"errors"
	"time"
)

// window is the most slots that one stream has at a time. It waits for a slot only while it
// has none, so that streams never wait for each other.
const window = 4

// source is where the bytes of a frame come from. A stream's goroutine takes the frame apart.
// Parts in device memory are copied into slots, ahead of the part that is written. A slow peer
// keeps these slots while its socket takes bytes.
type source struct {
	t      *Transport
	given  func() bool // the transfer was given up
	rest   []iovec     // of the frame, not begun
	ahead  []sourcePart
	staged int // slots in ahead
	sent   bool
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

func (c *source) begins(t *Transport, given func() bool, frame []iovec) {
	c.t, c.given, c.rest, c.staged, c.sent = t, given, frame, 0, false
}

// next is the next part, nil at the frame's end. It begins to copy the parts behind it.
func (c *source) next() (*sourcePart, error) {
	for len(c.rest) > 0 && len(c.ahead) < window {
		p, err := c.begin()
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
		if err := p.slot.Wait(); err != nil {
			return nil, &copyError{"copy out of device memory", err}
		}
		p.one[0] = entry(p.slot, p.bytes)
		p.vec = p.one[:]
	}
	return p, nil
}

// begin takes a part off the frame; nil if the part has no slot and parts before it come first.
// The first slot is there before the frame's header is written, so that a frame that gets no
// slot is taken back.
func (c *source) begin() (*sourcePart, error) {
	d := &c.t.devices
	device, n, bytes := d.alike(c.rest, ^uint64(0))
	if device < 0 {
		p := &sourcePart{vec: c.rest[:n], bytes: bytes}
		c.rest = c.rest[n:]
		return p, nil
	}
	slot, err := d.mover.Slot(noWait, device, FromDevice)
	if err != nil && c.staged > 0 {
		return nil, nil // the parts before it come first
	}
	if err != nil {
		if slot, err = c.wait(device); err != nil {
			return nil, err
		}
	}
	_, _, bytes = d.alike(c.rest, uint64(len(slot.Memory())))
	c.runs = runs(c.runs[:0], c.rest, bytes)
	slot.Copy(c.runs)
	c.rest = drop(c.rest, uintptr(bytes))
	c.staged++
	return &sourcePart{slot: slot, bytes: bytes}, nil
}

// wait waits for a slot, for less time than D waits within a frame. It ends when the transfer
// is given up and nothing of the frame is written.
func (c *source) wait(device int) (slot Slot, err error) {
	for end := time.Now().Add(c.t.cfg.StallTimeout / 2); ; {
		ctx, cancel := context.WithTimeout(c.t.ctx, min(step, c.t.cfg.StallTimeout/8))
		slot, err = c.t.devices.mover.Slot(ctx, device, FromDevice)
		timedOut := ctx.Err() != nil
		cancel()
		if err == nil || !timedOut || c.t.ctx.Err() != nil || time.Now().After(end) || c.given() && !c.sent {
			break
		}
	}
	if err != nil {
		return nil, c.t.noSlot(err)
	}
	return slot, nil
}

// written ends the part that next has returned.
func (c *source) written() {
	if slot := c.ahead[0].slot; slot != nil {
		slot.Release()
		c.staged--
	}
	c.sent = true
	c.ahead = append(c.ahead[:0], c.ahead[1:]...)
}

// end returns when nothing is copied out of the frame's memory any more; false if that is
// not known.
func (c *source) end() (ended bool) {
	ended = true
	for i := range c.ahead {
		slot := c.ahead[i].slot
		if slot == nil {
			continue
		}
		if err := slot.Wait(); errors.Is(err, ErrMayCopy) { // another error is of no account: nobody will read the slot
			ended = false
			continue
		}
		slot.Release()
	}
	c.ahead, c.rest = c.ahead[:0], nil
	return ended
}
