// If P's engine takes the blocks of a partial offer back, P stops the write, and D loads the transfer anew.

package half

import (
	"crypto/sha256"
	"fmt"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/kv"
)

// Withdraw takes an offer's blocks back.
func (h *Set) Withdraw(of *Offer) {
	of.held, of.ready, of.sent = kv.Selection{}, nil, nil
	if !fault.On("withdrawn-grow") {
		h.awaitNothing(of)
	}
	switch of.state {
	case offerPartial:
		h.Count.Withdrawn++
		guard, next := whenRestart, offerWithdrawing
		if of.landed { // D has all that it asked for
			guard, next = whenWhole, offerEndingWithdrawn
		}
		if fault.On("not-stopped") {
			h.offerTo(of, guard, next)
			return
		}
		h.offerTo(of, guard, next, core.StopWrite{ID: core.TransferID(of.id)})
	case offerEnding:
		h.offerTo(of, Always, offerEndingWithdrawn)
	}
}

// Reading says whether blocks that were given before a Withdraw may still be read.
func (of *Offer) Reading() bool {
	return of.state == offerPartial || of.state == offerEnding && of.offered.IsZero() || // else they are free with the report
		(of.state == offerWithdrawing || of.state == offerEndingWithdrawn) && !fault.On("not-read")
}

// maxVoided bounds the voided loads that an offer remembers: D repeats fewer in the time in which it tries.
const maxVoided = 64

// startOver has D load the transfer anew. Nobody reads the blocks for the old write any more.
func (h *Set) startOver(now time.Time, of *Offer) {
	void := digest(of.load.Grant)
	of.voided = append(of.voided[max(0, len(of.voided)-maxVoided+1):], void)
	of.load, of.sendAt, of.deadline = nil, time.Time{}, now.Add(h.opt.Lease)
	next, guard := of.unread()
	if of.state.sending() {
		guard = whenOtherWay
	}
	if fault.On("anew-untold") {
		of.voided = nil
		h.offerTo(of, guard, next)
		return
	}
	h.offerTo(of, guard, next, core.SendRestart{Peer: of.peer, ID: core.TransferID(of.id), Digest: void})
}

// digest names a grant. A restart names the load's grant by it, so that the restart is void for a later load.
func digest(grant []byte) string {
	sum := sha256.Sum256(grant)
	return fmt.Sprintf("%x", sum[:8])
}
