package node

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvconn/kvconn/core"
)

// The calls of an engine.

// ErrStillRead is wrapped by Retract's error when it has waited in vain.
var ErrStillRead = errors.New("blocks are still read")

// Announce tells that the engine knows these requests and works on them, so
// that D waits as long as it takes; with report_wants each gets a report of side
// want when D has room for it. Returns how many were accepted.
func (a *Agent) Announce(ids []core.TransferID) (int, error) {
	if !a.cfg.prefills() {
		return 0, fmt.Errorf("%w: announce on an agent of role %q", core.ErrInvalid, a.cfg.Role)
	}
	reports := 0
	if a.cfg.ReportWants {
		reports = 1
	}
	return each(a.halves, ids, reports, func(m *core.Machine, now time.Time, id core.TransferID) error { return m.Announce(now, id) })
}

// Offer tells that blocks hold transfers. The blocks belong to the transfer
// until its report. Returns how many were accepted.
func (a *Agent) Offer(offers []core.OfferRequest) (int, error) {
	if !a.cfg.prefills() {
		return 0, fmt.Errorf("%w: offer on an agent of role %q", core.ErrInvalid, a.cfg.Role)
	}
	a.steps.end(nil)
	return each(a.halves, offers, 1, func(m *core.Machine, now time.Time, o core.OfferRequest) error { return m.Offer(now, o) })
}

// Claim tells prefill engines that this engine will load transfers as soon as
// it has blocks for them, so that they are kept however long that takes. A
// claim ends by StartLoad or Cancel and has no report, unless with report_claims a
// load could only fail: then it ends by a report of side claim. Returns how many
// were accepted.
func (a *Agent) Claim(claims []core.ClaimRequest) (int, error) {
	if !a.cfg.decodes() {
		return 0, fmt.Errorf("%w: claim on an agent of role %q", core.ErrInvalid, a.cfg.Role)
	}
	return each(a.halves, claims, 0, func(m *core.Machine, now time.Time, c core.ClaimRequest) error {
		if a.cfg.ReportClaims {
			if err := a.halves.fits(1); err != nil {
				return err
			}
		}
		return m.Claim(now, c)
	})
}

// StartLoad asks for transfers in the engine's blocks. The blocks belong to the
// transfer until its report. Returns how many were accepted.
func (a *Agent) StartLoad(loads []core.LoadRequest) (int, error) {
	if !a.cfg.decodes() {
		return 0, fmt.Errorf("%w: start_load on an agent of role %q", core.ErrInvalid, a.cfg.Role)
	}
	return each(a.halves, loads, 1, func(m *core.Machine, now time.Time, l core.LoadRequest) error { return m.Load(now, l) })
}

// Cancel ends this agent's halves of transfers; each still gets its report. An
// id that is not known here is remembered: the peer's half is refused.
func (a *Agent) Cancel(ids []core.TransferID, reason string) (int, error) {
	a.steps.end(ids)
	return each(a.halves, ids, 0, func(m *core.Machine, now time.Time, id core.TransferID) error { return m.Cancel(now, id, reason) })
}

// Grow tells that parts of transfers are there while the engine still works on
// their requests: what decode engines have asked for of them moves at once. It says
// that the request is known, as Announce does. The blocks belong to the transfer
// until Retract has returned or, after Offer, until its report. Returns how many
// were accepted.
func (a *Agent) Grow(parts []core.PartialOffer) (int, error) {
	if err := a.grows(); err != nil {
		return 0, err
	}
	a.steps.end(nil)
	return a.halves.Grow(parts)
}

func (a *Agent) grows() error {
	if !a.cfg.prefills() {
		return fmt.Errorf("%w: grow on an agent of role %q", core.ErrInvalid, a.cfg.Role)
	}
	return nil
}

// GrowStep is Grow for a step that computes more of these transfers, as their
// Computing says: written gives the regions, in growing order, in which all of it is
// there since it was asked last. It is asked time and again, a last time by the next
// call of Grow, GrowStep, Offer, Retract or Cancel, and never after that call has begun
// to do its work, by the goroutine of that call or by one of the agent's. So an engine
// need not call for each layer. What it has to say when GrowStep is called is of no
// step, and is dropped.
func (a *Agent) GrowStep(parts []core.PartialOffer, written func() []uint32) (int, error) {
	if err := a.grows(); err != nil {
		return 0, err
	}
	return a.steps.begin(parts, written)
}

// Retract takes back blocks that Grow gave, of requests that the engine preempts or
// gives up. When it returns without an error nothing reads them any more. It waits
// for what is under way, a second or two at most where a peer takes no bytes, and
// never longer than the timeout; then the blocks must not be used, as long as the
// agent is open. An id that is not known is no error, one that is offered is; it
// does not keep the others from being taken back.
func (a *Agent) Retract(ids []core.TransferID, timeout time.Duration) error {
	a.steps.end(ids)
	err := a.halves.call(func(m *core.Machine, now time.Time) error {
		var errs []error
		for _, id := range ids {
			errs = append(errs, m.Withdraw(now, id))
		}
		return errors.Join(errs...)
	})
	wait := a.halves.reading(ids)
	if wait == nil {
		return err
	}
	late := time.NewTimer(timeout)
	defer late.Stop()
	select {
	case <-wait.done:
		return err
	case <-late.C:
	}
	if id, read := a.halves.giveUp(wait); read {
		return fmt.Errorf("%w: the blocks of transfer %q are still read %v after they were taken back: they must not be used again", ErrStillRead, string(id), timeout)
	}
	return err
}

// GetFinished returns the reports since the last call; it never waits. Only
// with the Reports that Open made itself.
func (a *Agent) GetFinished() []core.Report {
	if q, ok := a.halves.reports.(*reportQueue); ok {
		return q.take()
	}
	return nil
}

// Finished has a value when GetFinished has something.
func (a *Agent) Finished() <-chan struct{} {
	if q, ok := a.halves.reports.(*reportQueue); ok {
		return q.ready
	}
	return nil
}
