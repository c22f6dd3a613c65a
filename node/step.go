package node

import (
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
	parts   []core.GrowRequest // what is ready in a region that is written
	written func() []uint32
}

// currentStep is the one step that may run. Whoever holds the lock and finds no
// step knows that nothing grows but by a call.
type currentStep struct {
	mu   sync.Mutex
	step *step
}

// GrowStep is Grow for a step that computes more of these transfers, as their
// Computing says: written gives the regions, in growing order, in which all of it is
// there since it was asked last. It is asked time and again, a last time by the next
// call of Grow, GrowStep, Offer, Retract or Cancel, and never after that call has begun
// to do its work, by the goroutine of that call or by one of the agent's. So an engine
// need not call for each layer. What it has to say when GrowStep is called is of no
// step, and is dropped.
func (a *Agent) GrowStep(parts []core.GrowRequest, written func() []uint32) (int, error) {
	a.current.mu.Lock()
	defer a.current.mu.Unlock()
	a.lastLook(nil)
	n, err := a.grow(parts)
	s := &step{written: written}
	for _, part := range parts[:n] {
		if part.Computing != nil {
			s.parts = append(s.parts, core.GrowRequest{ID: part.ID, Ready: part.Computing, Prompt: part.Prompt})
		}
	}
	if len(s.parts) == 0 {
		return n, err
	}
	written()
	a.mu.Lock() // Close waits for those that began before it
	defer a.mu.Unlock()
	if a.state == stateRegistered {
		a.current.step = s
		a.goRun("step", func() { a.follow(s) })
	}
	return n, err
}

// endStep comes before every call that changes what the blocks of transfers are. Of
// those that the call takes back nothing more begins to move: it may wait for that.
func (a *Agent) endStep(takenBack []core.TransferID) {
	a.current.mu.Lock()
	defer a.current.mu.Unlock()
	a.lastLook(takenBack)
}

// lastLook ends the step; the lock is held.
func (a *Agent) lastLook(takenBack []core.TransferID) {
	if s := a.current.step; s != nil {
		a.current.step = nil
		s.parts = slices.DeleteFunc(s.parts, func(part core.GrowRequest) bool { return slices.Contains(takenBack, part.ID) })
		if _, err := a.growWritten(s); err != nil {
			a.stepFailed(err)
		}
	}
}

func (a *Agent) stepFailed(err error) {
	if !errors.Is(err, core.ErrClosed) { // their offers say what is wrong
		a.log.Error("what a step has written of its transfers goes with their offers only", zap.Error(err))
	}
}

// follow lets the transfers of a step grow until it has ended.
func (a *Agent) follow(s *step) {
	news := time.Now()
	timer := time.NewTimer(stepLeast)
	defer timer.Stop()
	for {
		select {
		case <-a.ctx.Done():
			return
		case <-timer.C:
		}
		since := time.Since(news)
		switch more, err := a.growStep(s); {
		case errors.Is(err, errStepEnded):
			return
		case err != nil:
			a.stepFailed(err)
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

func (a *Agent) growStep(s *step) (more bool, err error) {
	a.current.mu.Lock()
	defer a.current.mu.Unlock()
	if a.current.step != s {
		return false, errStepEnded
	}
	more, err = a.growWritten(s)
	if err != nil {
		a.current.step = nil // it is told once
	}
	return more, err
}

func (a *Agent) growWritten(s *step) (more bool, err error) {
	regions := s.written()
	if len(regions) == 0 {
		return false, nil
	}
	for i := range s.parts {
		s.parts[i].Regions = regions
	}
	_, err = a.grow(s.parts)
	return true, err
}
