package node

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
)

// ErrStillRead is wrapped by Retract's error when it has waited in vain.
var ErrStillRead = errors.New("blocks are still read")

// Grow tells that parts of transfers are there while the engine still works on
// their requests: what decode engines have asked for of them moves at once. It says
// that the request is known, as Announce does. The blocks belong to the transfer
// until Retract has returned or, after Offer, until its report. Returns how many
// were accepted.
func (a *Agent) Grow(parts []core.GrowRequest) (int, error) {
	a.endStep(nil)
	return a.grow(parts)
}

func (a *Agent) grow(parts []core.GrowRequest) (int, error) {
	if !a.cfg.prefills() {
		return 0, fmt.Errorf("%w: grow on an agent of role %q", core.ErrInvalid, a.cfg.Role)
	}
	return each(a, parts, 0, func(m *core.Machine, now time.Time, g core.GrowRequest) error { return m.Grow(now, g) })
}

// retracting is who waits until blocks are read no more.
type retracting struct {
	ids  []core.TransferID // whose blocks may be read
	done chan struct{}
}

// Retract takes back blocks that Grow gave, of requests that the engine preempts or
// gives up. When it returns without an error nothing reads them any more. It waits
// for what is under way, a second or two at most where a peer takes no bytes, and
// never longer than the timeout; then the blocks must not be used, as long as the
// agent is open. An id that is not known is no error, one that is offered is; it
// does not keep the others from being taken back.
func (a *Agent) Retract(ids []core.TransferID, timeout time.Duration) error {
	a.endStep(ids)
	var wait *retracting
	err := a.do(func(m *core.Machine, now time.Time) error {
		var errs []error
		for _, id := range ids {
			errs = append(errs, m.Retract(now, id))
		}
		return errors.Join(errs...)
	})
	a.mu.Lock()
	if a.machine != nil {
		reads := slices.DeleteFunc(slices.Clone(ids), func(id core.TransferID) bool { return !a.machine.Reading(id) })
		if len(reads) > 0 {
			wait = &retracting{reads, make(chan struct{})}
			a.retracting = append(a.retracting, wait)
		}
	}
	a.mu.Unlock()
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
	a.mu.Lock()
	defer a.mu.Unlock()
	a.retracting = slices.DeleteFunc(a.retracting, func(r *retracting) bool { return r == wait })
	if len(wait.ids) == 0 { // just now
		return err
	}
	return fmt.Errorf("%w: the blocks of transfer %q are still read %v after they were taken back: they must not be used again", ErrStillRead, string(wait.ids[0]), timeout)
}

// checkRetracting wakes those whose blocks are read no more; a.mu is held.
func (a *Agent) checkRetracting() {
	a.retracting = slices.DeleteFunc(a.retracting, func(r *retracting) bool {
		r.ids = slices.DeleteFunc(r.ids, func(id core.TransferID) bool { return !a.machine.Reading(id) })
		if len(r.ids) == 0 {
			close(r.done)
		}
		return len(r.ids) == 0
	})
}

// write performs Write: a whole one, the first part of one, or more of it.
func (a *Agent) write(v core.Write) {
	fail := func(err error) {
		if v.Extends { // it is the transport's to tell, when it reads no more
			a.log.Error("a transfer cannot go on", zap.String("transfer_id", string(v.ID)), zap.Error(err))
			a.transport.Stop(v.ID)
			return
		}
		a.step(func(m *core.Machine, now time.Time) { m.Written(now, v.ID, core.TransferStats{}, err) })
	}
	if a.peers.get(v.Peer) == nil {
		fail(fmt.Errorf("decode agent %s is not known any more", v.Peer))
		return
	}
	op := core.WriteOp{ID: v.ID, Peer: v.Peer, Grant: v.Grant}
	var err error
	if !v.Extends && v.End == nil {
		op.Pairs, err = v.Match.Pairs(v.Regions, v.Src, v.SrcFirst, v.Dst, v.DstFirst, v.Tokens)
	} else {
		op.Bytes = v.Match.Bytes(v.Regions, v.Dst, v.DstFirst, v.Tokens)
		op.Pairs, op.At, err = v.Match.PairsBetween(v.Regions, v.Src, v.SrcFirst, v.Dst, v.DstFirst, v.Tokens, v.Begin, v.End)
	}
	if v.End != nil && err == nil {
		a.count(func(t *Totals) { t.BytesGrown += op.Given() })
	}
	switch {
	case err != nil:
		fail(err)
	case !v.Extends:
		a.transport.Write(op)
	case len(op.Pairs) > 0:
		a.transport.Extend(op)
	}
}
