package machine_test

import (
	"fmt"
	"strings"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
)

// ledger holds a machine to its promises: every accepted half is reported
// exactly once, and a failed load not before its fence.
type ledger struct {
	owed   map[half]int               // accepted, not reported
	armed  map[core.TransferID]bool   // an Expect was asked for, and neither Revoked nor Received came
	claims map[core.TransferID]uint64 // accepted ones that may be reported, with their tokens
	broken []string
}

type half struct {
	side  core.Side
	token uint64
}

func newLedger() *ledger {
	return &ledger{owed: map[half]int{}, armed: map[core.TransferID]bool{}, claims: map[core.TransferID]uint64{}}
}

func (l *ledger) accepted(s core.Side, token uint64) { l.owed[half{s, token}]++ }

func (l *ledger) fault(format string, args ...any) {
	l.broken = append(l.broken, fmt.Sprintf(format, args...))
}

// action sees every action of the machine, in order.
func (l *ledger) action(a core.Action) {
	switch v := a.(type) {
	case core.Expect:
		if l.armed[v.ID] {
			l.fault("%q is expected twice", v.ID)
		}
		l.armed[v.ID] = true
	case core.Report:
		if v.Side == core.SideClaim {
			if token, claimed := l.claims[v.ID]; !claimed || token != v.Token || v.Code == core.OK {
				l.fault("the claim of %q was reported and is none, or well: %+v", v.ID, v)
			}
			delete(l.claims, v.ID)
			break
		}
		h := half{v.Side, v.Token}
		if l.owed[h]--; l.owed[h] < 0 {
			l.fault("%v of %q was reported twice or never accepted: %+v", v.Side, v.ID, v)
		}
		if l.owed[h] == 0 {
			delete(l.owed, h)
		}
		for id := range l.armed {
			if whole, _, _ := strings.Cut(string(id), "\x00"); v.Side == core.SideLoad && whole == string(v.ID) {
				l.fault("load %q was reported (%v) before its fence", v.ID, v.Code)
			}
		}
	}
}

// tell tells a machine an event and notes what it promises by that.
func (l *ledger) tell(m *machine.Told, now time.Time, e core.Event) (answer core.Action) {
	switch v := e.(type) {
	case core.Received:
		if v.Err == nil {
			l.disarmed(v.ID)
		}
	case core.Revoked:
		l.disarmed(v.ID)
	case core.Abandon:
		clear(l.armed) // the transports are closed
	}
	before := m.Untold()
	answer = m.Tell(now, e)
	if _, refused := answer.(core.Refuse); refused {
		return answer
	}
	switch v := e.(type) {
	case core.LoadRequest:
		l.accepted(core.SideLoad, v.Token)
		delete(l.claims, v.ID)
	case core.OfferRequest:
		l.accepted(core.SideOffer, v.Token)
	case core.ClaimRequest:
		if m.Untold() > before { // else the transfer is claimed or loaded already
			l.claims[v.ID] = v.Token
		}
	case core.Cancel:
		delete(l.claims, v.ID)
	case core.Close, core.Abandon:
		clear(l.claims)
	}
	return answer
}

// untold checks that the machine counts the claims that may still be reported.
func (l *ledger) untold(m *machine.Told) {
	if n := m.Untold(); n != len(l.claims) {
		l.fault("%d claims may be reported, of %v", n, l.claims)
	}
}

// disarmed: Revoked, or Received without an error.
func (l *ledger) disarmed(id core.TransferID) { delete(l.armed, id) }

// end checks that nothing is owed.
func (l *ledger) end() {
	for h := range l.owed {
		l.fault("the %v with token %d was accepted and never reported", h.side, h.token)
	}
	for id := range l.armed {
		l.fault("%q is still armed", id)
	}
}
