package sim

import (
	"fmt"
	"slices"

	"github.com/kvconn/kvconn/core"
)

// ledger holds a machine to its promises: every accepted half is reported
// exactly once, and a failed load not before its fence.
type ledger struct {
	owed   map[uint64]core.TransferID // accepted, not reported, by token
	armed  map[core.TransferID]bool   // an Expect was asked for, and neither Revoked nor Received came
	claims map[core.TransferID]uint64 // accepted and neither loaded nor cancelled nor reported, with their tokens
	broken []broken
}

type broken struct {
	id   core.TransferID
	text string
}

func newLedger() *ledger {
	return &ledger{owed: map[uint64]core.TransferID{}, armed: map[core.TransferID]bool{}, claims: map[core.TransferID]uint64{}}
}

func (l *ledger) accepted(id core.TransferID, token uint64) { l.owed[token] = id }

func (l *ledger) fault(id core.TransferID, format string, args ...any) {
	l.broken = append(l.broken, broken{id, fmt.Sprintf(format, args...)})
}

// action sees every action of the machine, in order.
func (l *ledger) action(act core.Action) {
	switch v := act.(type) {
	case core.Expect:
		if l.armed[v.ID] {
			l.fault(v.ID, "%q is expected twice", v.ID)
		}
		l.armed[v.ID] = true
	case core.Report:
		if v.Side == core.SideClaim {
			if token, claimed := l.claims[v.ID]; !claimed || token != v.Token || v.Code == core.OK {
				l.fault(v.ID, "the claim of %q was reported and is none, or well: %+v", v.ID, v)
			}
			delete(l.claims, v.ID)
			break
		}
		if id, owed := l.owed[v.Token]; !owed || id != v.ID {
			l.fault(v.ID, "the %v of %q was reported twice or never accepted: %+v", v.Side, v.ID, v)
		}
		delete(l.owed, v.Token)
		if v.Side != core.SideLoad {
			break
		}
		for id := range l.armed {
			if base(id) == v.ID {
				l.fault(v.ID, "the load of %q was reported (%v) before its fence", v.ID, v.Code)
			}
		}
	}
}

// disarmed: Revoked, or Received without an error.
func (l *ledger) disarmed(id core.TransferID) { delete(l.armed, id) }

// shut: the transports are closed, nothing is armed any more.
func (l *ledger) shut() { clear(l.armed) }

// end checks that nothing is owed.
func (l *ledger) end() {
	var tokens []uint64
	for token := range l.owed {
		tokens = append(tokens, token)
	}
	slices.Sort(tokens)
	for _, token := range tokens {
		l.fault(l.owed[token], "the half of %q with token %d was accepted and never reported", l.owed[token], token)
	}
	var ids []core.TransferID
	for id := range l.armed {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	for _, id := range ids {
		l.fault(id, "%q is still armed", id)
	}
}
