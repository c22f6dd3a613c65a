package core

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/kv"
)

func (m *Machine) stepWithdraw(now time.Time, id TransferID) error {
	if err := checkID(id); err != nil {
		return err
	}
	for i, of := range m.halfOf(id) {
		if fault.On("forgets-shares") && i > 0 {
			break
		}
		if !of.offered.IsZero() {
			return fmt.Errorf("%w: transfer %q is offered already, and an offer cannot be withdrawn: cancel the transfer; its blocks are free when its report has come", ErrInvalid, string(id))
		}
		of.held, of.ready, of.sent = kv.Selection{}, nil, nil
		if !fault.On("withdrawn-grow") {
			m.awaitNothing(of)
		}
		switch of.state {
		case offerPartial:
			m.count.Withdrawn++
			next := offerWithdrawing
			if of.landed { // D has all that it asked for
				next = offerEndingWithdrawn
			}
			m.offerTo(of, next)
			if !fault.On("not-stopped") {
				m.act(StopWrite{ID: of.id})
			}
		case offerEnding:
			m.offerTo(of, offerEndingWithdrawn)
		}
	}
	return nil
}

// Reading says whether blocks that were given before a Withdraw may still be read.
func (m *Machine) Reading(id TransferID) bool {
	return slices.ContainsFunc(m.halfOf(id), func(of *offer) bool {
		switch of.state {
		case offerWithdrawing, offerEndingWithdrawn:
			return !fault.On("not-read")
		case offerPartial:
			return true
		case offerEnding:
			return of.offered.IsZero() // else they are free with the report
		}
		return false
	})
}

// maxVoided is more loads than D may repeat in the time that it insists.
const maxVoided = 64

// startOver has D load anew: nobody reads the blocks for the write any more.
func (m *Machine) startOver(now time.Time, of *offer) {
	void := digest(of.load.Grant)
	of.voided = append(of.voided[max(0, len(of.voided)-maxVoided+1):], void)
	if fault.On("anew-untold") {
		of.voided = nil
	} else {
		m.act(SendRestart{Peer: of.peer, ID: of.id, Digest: void})
	}
	of.load, of.sendAt, of.deadline = nil, time.Time{}, now.Add(m.opt.Lease)
	next := offerPrefill
	switch {
	case len(of.growths) > 0 && !of.offered.IsZero():
		next = offerAwaiting
	case !of.offered.IsZero():
		next = offerReady
	}
	m.offerTo(of, next)
}

// digest names a grant: a restart is of one load, and void for a later one.
func digest(grant []byte) string {
	sum := sha256.Sum256(grant)
	return fmt.Sprintf("%x", sum[:8])
}
