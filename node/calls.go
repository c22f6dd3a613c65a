// The calls of an engine.

package node

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/devices"
)

// ErrStillRead is wrapped by Withdraw's error when it has waited in vain.
var ErrStillRead = errors.New("blocks are still read")

// may says why an agent of this role cannot make a call.
func (a *Agent) may(ok bool, call string) error {
	if !ok {
		return fmt.Errorf("%w: %s on an agent of role %q", core.ErrInvalid, call, a.cfg.Role)
	}
	return nil
}

// Announce tells that the engine knows these requests and works on them, so
// that D waits as long as the work takes. With report_demands each of these requests gets
// a report of side demand when D has blocks for it. Announce returns how many requests it
// accepted.
func (a *Agent) Announce(ids []core.TransferID) (int, error) {
	if err := a.may(a.cfg.prefills(), "announce"); err != nil {
		return 0, err
	}
	reports := 0
	if a.cfg.ReportDemands {
		reports = 1
	}
	return each(a.machine, ids, reports, func(now time.Time, id core.TransferID) error {
		return a.machine.request(now, core.Announce{ID: id})
	})
}

// renew is called before each call that gives blocks to transfers.
func (a *Agent) renew() error {
	if c := a.caches.Load(); c != nil {
		return c.transports.renew(a.machine)
	}
	return nil
}

// Offer tells that blocks hold transfers. The blocks belong to the transfer
// until its report. Offer returns how many it accepted.
func (a *Agent) Offer(offers []core.OfferRequest) (int, error) {
	if err := a.may(a.cfg.prefills(), "offer"); err != nil {
		return 0, err
	}
	a.steps.end(nil)
	if err := a.renew(); err != nil {
		return 0, err
	}
	return each(a.machine, offers, 1, func(now time.Time, o core.OfferRequest) error { return a.machine.request(now, o) })
}

// Claim tells prefill engines that this engine will load transfers as soon as
// it has blocks for them. They keep the transfers until then. A claim ends by
// StartLoad or Cancel, without a report. With report_claims it also ends, by a
// report of side claim, when a load could only fail. Claim returns how many it
// accepted.
func (a *Agent) Claim(claims []core.ClaimRequest) (int, error) {
	if err := a.may(a.cfg.decodes(), "claim"); err != nil {
		return 0, err
	}
	return each(a.machine, claims, 0, func(now time.Time, c core.ClaimRequest) error {
		if a.cfg.ReportClaims {
			if err := a.machine.fits(1); err != nil {
				return err
			}
		}
		return a.machine.request(now, c)
	})
}

// StartLoad asks for transfers in the engine's blocks. The blocks belong to the
// transfer until its report. StartLoad returns how many it accepted.
func (a *Agent) StartLoad(loads []core.LoadRequest) (int, error) {
	if err := a.may(a.cfg.decodes(), "start_load"); err != nil {
		return 0, err
	}
	if slices.ContainsFunc(loads, func(l core.LoadRequest) bool { return l.Count() > 0 }) { // a load without blocks touches no memory
		if err := a.renew(); err != nil {
			return 0, err
		}
	}
	return each(a.machine, loads, 1, func(now time.Time, l core.LoadRequest) error { return a.machine.request(now, l) })
}

// Cancel ends this agent's halves of transfers; each half still gets its report. An
// unknown id is remembered, and the peer's half of it is refused.
func (a *Agent) Cancel(ids []core.TransferID, reason string) (int, error) {
	a.steps.end(ids)
	return each(a.machine, ids, 0, func(now time.Time, id core.TransferID) error {
		return a.machine.request(now, core.Cancel{ID: id, Reason: reason})
	})
}

// OfferPartial tells that blocks of transfers are ready while the engine still works on
// their requests. The blocks that decode engines have asked for move at once. OfferPartial
// announces the transfers too, as Announce does. The blocks belong to the transfer until Withdraw has
// returned or, after Offer, until its report. OfferPartial returns how many parts it
// accepted.
func (a *Agent) OfferPartial(parts []core.PartialOffer) (int, error) {
	if err := a.may(a.cfg.prefills(), "offer_partial"); err != nil {
		return 0, err
	}
	a.steps.end(nil)
	if err := a.renew(); err != nil {
		return 0, err
	}
	return a.machine.OfferPartial(parts)
}

// OfferPartialStep is OfferPartial for a step that computes more of these transfers, as
// their Computing says. So the engine need not call for each layer. Instead the agent calls
// written time and again. written returns the regions that the step has completed since the
// last call of written, or completes by a moment. OfferPartialStep itself calls written once
// and drops the result, which is of no step. The next OfferPartial, OfferPartialStep, Offer,
// Withdraw or Cancel calls written a last time, before it does its own work. written is called
// on the goroutine of such a call or on one of the agent's.
func (a *Agent) OfferPartialStep(parts []core.PartialOffer, written func() []Written) (int, error) {
	if err := a.may(a.cfg.prefills(), "offer_partial"); err != nil {
		return 0, err
	}
	a.steps.end(nil)
	if err := a.renew(); err != nil {
		return 0, err
	}
	return a.steps.begin(parts, written)
}

// Withdraw takes back blocks that OfferPartial gave, of requests that the engine preempts
// or gives up. When Withdraw returns without an error, nothing reads the blocks any more. It waits for
// the reads under way. If a peer takes no bytes, that is a second or two at most; if the driver is being asked about
// the memory, it is as long as the driver takes; and it is never longer than the timeout. If the timeout ends the wait, the
// engine must not use the blocks while the agent is open. An unknown id is no error. If an id has been offered, that is an
// error, but Withdraw still takes back the blocks of the other ids.
func (a *Agent) Withdraw(ids []core.TransferID, timeout time.Duration) error {
	a.steps.end(ids)
	err := a.machine.call(func(now time.Time) error {
		var errs []error
		for _, id := range ids {
			errs = append(errs, a.machine.request(now, core.Withdraw{ID: id}))
		}
		return errors.Join(errs...)
	})
	wait := a.machine.waitForReads(ids)
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
	if id, read := a.machine.abandonRead(wait); read {
		return fmt.Errorf("%w: the blocks of transfer %q are still read %v after they were taken back: they must not be used again", ErrStillRead, string(id), timeout)
	}
	return err
}

// Moment marks the work that a stream of a region's device has been given up to now. Offers, partial
// offers and loads name the moment: they wait until all of that work is done. Moment may be called for
// streams of any thread, and takes a microsecond or two.
func (a *Agent) Moment(region uint32, stream uintptr) (core.Moment, error) {
	c := a.caches.Load()
	if c == nil {
		return 0, fmt.Errorf("%w: call register_kv_caches first", ErrNotRegistered)
	}
	return c.transports.devices.Moment(region, stream)
}

// MomentEntries are for a caller in C that records moments without a call into Go, until
// Close.
func (a *Agent) MomentEntries() (byRegion []uint8, entries []devices.Entry) {
	c := a.caches.Load()
	if c == nil {
		return nil, nil
	}
	return c.transports.devices.MomentEntries()
}

// TakingMoments notes that a caller in C is in an entry of MomentEntries, until leave is called. A Close that follows waits for that. If
// leave is not called in time, Close keeps the memory that the entry uses.
func (a *Agent) TakingMoments() (leave func()) {
	c := a.caches.Load()
	if c == nil {
		return func() {}
	}
	return c.transports.devices.TakingMoments()
}

// GetFinished returns the reports since the last call and never waits. It needs
// the Reports that Open makes.
func (a *Agent) GetFinished() []core.Report {
	if q, ok := a.machine.reports.(*reportQueue); ok {
		return q.take()
	}
	return nil
}

// Finished is a channel that has a value when GetFinished has reports.
func (a *Agent) Finished() <-chan struct{} {
	if q, ok := a.machine.reports.(*reportQueue); ok {
		return q.ready
	}
	return nil
}
