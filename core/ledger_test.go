package core_test

import (
	"fmt"
	"strings"

	"github.com/kvconn/kvconn/core"
)

// ledger holds a machine to its promises: every accepted half is reported
// exactly once, and a failed load not before its fence.
type ledger struct {
	owed   map[half]int             // accepted, not reported
	armed  map[core.TransferID]bool // an Expect was asked for, and neither Revoked nor Received came
	broken []string
}

type half struct {
	side  core.Side
	token uint64
}

func newLedger() *ledger {
	return &ledger{owed: map[half]int{}, armed: map[core.TransferID]bool{}}
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
