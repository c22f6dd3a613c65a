// With Options.ReportDemands each announced transfer gets a Report of SideDemand before
// its offer. The Report says that D's load is here, and so that D has room for the transfer, or
// that the transfer has ended, so that the engine can spare the work. If an engine begins only on
// D's demand, it does not fill its memory with caches that no D can take yet.

package machine

import (
	"math"
	"slices"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/half"
	"github.com/kvconn/kvconn/internal/invariants"
	"github.com/kvconn/kvconn/kv"
)

// demanded reports an announced transfer when all the loads that it waits for are here. If the engine's cancel or Close ends a
// transfer's shares, the end of the last share reports it.
func (m *Machine) demanded(id core.TransferID) {
	if !m.demands[id] || m.closed {
		return
	}
	shares, first := m.halfOf(id), uint32(math.MaxUint32)
	for _, of := range shares {
		l := of.Load()
		if l == nil {
			return
		}
		first = min(first, kv.OrZero(l.First, 0))
	}
	if len(shares) > 0 {
		m.reportDemand(id, core.OK, "", first)
	}
}

// prefill is the state of an offer that was announced.
const prefill = "prefill"

// reportDemand is the only way out of the set of demands.
func (m *Machine) reportDemand(id core.TransferID, code core.Code, reason string, first uint32) {
	if m.demands[id] {
		delete(m.demands, id)
		m.halves.Act(core.Report{ID: id, Side: core.SideDemand, Code: code, Reason: reason, Blocks: int(first), State: prefill})
	}
}

// checkDemands checks the set; only in builds with the tag "invariants".
func (m *Machine) checkDemands() {
	for id := range m.demands {
		list := m.halfOf(id)
		invariants.Must(len(list) > 0 && !slices.ContainsFunc(list, func(of *half.Offer) bool { return !of.Offered().IsZero() }), "transfer %q is demanded and is not announced", id)
		if of := m.halves.Offer(half.ID(id)); of != nil {
			invariants.Must(of.State() == prefill, "transfer %q is demanded in state %v", id, of.State())
		}
	}
}
