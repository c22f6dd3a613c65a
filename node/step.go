// While a step of the engine runs, the agent asks which regions it has written, and offers them.

package node

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/devices"
)

// The agent asks a step for news again after a part of the time since the step's last news. So it
// follows steps of any length closely enough.
const (
	stepPart     = 4
	stepLeast    = 200 * time.Microsecond
	stepMost     = time.Second
	stepPatience = 5 * time.Minute // no layer takes that long; the missing ones move with the next call
)

// Written are regions that a step has written when the moment After has passed. If After is 0, it has written them.
type Written struct {
	Regions []uint32 // in ascending order
	After   core.Moment
}

// step is one forward pass of an engine that computes more of some transfers.
type step struct {
	parts   []core.PartialOffer // the blocks that are ready in each region that is written
	written func() []Written
}

// steps hold the one step that may run. While somebody holds the lock and there is no step,
// partial offers come by calls of the engine only.
type steps struct {
	log   *zap.Logger
	ctx   context.Context // ends with the agent
	offer func([]core.PartialOffer) (int, error)
	start func(f func()) bool // runs f on a goroutine, unless the agent closes

	mu   sync.Mutex
	step *step
}

// begin ends the previous step and follows a new one.
func (c *steps) begin(parts []core.PartialOffer, written func() []Written) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.finalPoll(nil)
	n, err := c.offer(parts)
	s := &step{written: written}
	for _, part := range parts[:n] {
		if part.Computing != nil {
			s.parts = append(s.parts, core.PartialOffer{ID: part.ID, Ready: part.Computing, Prompt: part.Prompt})
		}
	}
	if len(s.parts) == 0 {
		return n, err
	}
	written() // its result is dropped: those marks were made before the step
	if c.start(func() { c.follow(s) }) {
		c.step = s
	}
	return n, err
}

// end is called before every call that gives or takes back blocks of transfers. If the call
// takes transfers back, no more of their blocks begin to move, since the call may wait until
// nothing moves.
func (c *steps) end(takenBack []core.TransferID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.finalPoll(takenBack)
}

// finalPoll ends the step; the lock is held.
func (c *steps) finalPoll(takenBack []core.TransferID) {
	if s := c.step; s != nil {
		c.step = nil
		s.parts = slices.DeleteFunc(s.parts, func(part core.PartialOffer) bool { return slices.Contains(takenBack, part.ID) })
		if _, err := c.offerWritten(s); err != nil {
			c.failed(err)
		}
	}
}

func (c *steps) failed(err error) {
	if !errors.Is(err, core.ErrClosed) { // the transfers' offers have the same error
		c.log.Error("the layers of a step are not sent before the offers of its transfers", zap.Error(err))
	}
}

// follow offers what a step writes until it has ended.
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
		switch more, err := c.poll(s); {
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

func (c *steps) poll(s *step) (more bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.step != s {
		return false, errStepEnded
	}
	more, err = c.offerWritten(s)
	if err != nil {
		c.step = nil // it is told once
	}
	return more, err
}

// offerWritten offers what the step has written, in the order of its moments: what a moment makes ready counts
// only when those before it do.
func (c *steps) offerWritten(s *step) (more bool, err error) {
	list := s.written()
	slices.SortStableFunc(list, func(a, b Written) int { return cmp.Compare(devices.Order(a.After), devices.Order(b.After)) })
	for _, w := range list {
		for i := range s.parts {
			s.parts[i].Regions, s.parts[i].After = w.Regions, w.After
		}
		more = true
		if _, err = c.offer(s.parts); err != nil {
			break
		}
	}
	return more, err
}
