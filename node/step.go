package node

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
)

// How long after the last news of a step it is asked for more: a part of the time
// that has gone by, so that a step of any length is followed closely enough.
const (
	stepPart     = 4
	stepLeast    = 200 * time.Microsecond
	stepMost     = time.Second
	stepPatience = 5 * time.Minute // no layer takes that long; what is missing moves with the next call
)

// step is what an engine computes of growing transfers in its forward pass.
type step struct {
	parts   []core.PartialOffer // what is ready in a region that is written
	written func() []uint32
}

// steps hold the one step that may run. Whoever has the lock and finds no step knows
// that nothing grows but by a call.
type steps struct {
	log   *zap.Logger
	ctx   context.Context // ends with the agent
	grow  func([]core.PartialOffer) (int, error)
	start func(f func()) bool // runs f on a goroutine, unless the agent closes

	mu   sync.Mutex
	step *step
}

// begin ends the step before and follows a new one.
func (c *steps) begin(parts []core.PartialOffer, written func() []uint32) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lastLook(nil)
	n, err := c.grow(parts)
	s := &step{written: written}
	for _, part := range parts[:n] {
		if part.Computing != nil {
			s.parts = append(s.parts, core.PartialOffer{ID: part.ID, Ready: part.Computing, Prompt: part.Prompt})
		}
	}
	if len(s.parts) == 0 {
		return n, err
	}
	written() // what it says before the step is of no step
	if c.start(func() { c.follow(s) }) {
		c.step = s
	}
	return n, err
}

// end comes before every call that changes what the blocks of transfers are. Of
// those that the call takes back nothing more begins to move: it may wait for that.
func (c *steps) end(takenBack []core.TransferID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lastLook(takenBack)
}

// lastLook ends the step; the lock is held.
func (c *steps) lastLook(takenBack []core.TransferID) {
	if s := c.step; s != nil {
		c.step = nil
		s.parts = slices.DeleteFunc(s.parts, func(part core.PartialOffer) bool { return slices.Contains(takenBack, part.ID) })
		if _, err := c.growWritten(s); err != nil {
			c.failed(err)
		}
	}
}

func (c *steps) failed(err error) {
	if !errors.Is(err, core.ErrClosed) { // their offers say what is wrong
		c.log.Error("what a step has written of its transfers goes with their offers only", zap.Error(err))
	}
}

// follow lets the transfers of a step grow until it has ended.
func (c *steps) follow(s *step) {
	news := time.Now()
	timer := time.NewTimer(stepLeast)
	defer timer.Stop()
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-timer.C:
		}
		since := time.Since(news)
		switch more, err := c.look(s); {
		case errors.Is(err, errStepEnded):
			return
		case err != nil:
			c.failed(err)
			return
		case more:
			news, since = time.Now(), 0
		case since > stepPatience:
			return
		}
		timer.Reset(min(max(since/stepPart, stepLeast), stepMost))
	}
}

var errStepEnded = errors.New("the step has ended")

func (c *steps) look(s *step) (more bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.step != s {
		return false, errStepEnded
	}
	more, err = c.growWritten(s)
	if err != nil {
		c.step = nil // it is told once
	}
	return more, err
}

func (c *steps) growWritten(s *step) (more bool, err error) {
	regions := s.written()
	if len(regions) == 0 {
		return false, nil
	}
	for i := range s.parts {
		s.parts[i].Regions = regions
	}
	_, err = c.grow(s.parts)
	return true, err
}
