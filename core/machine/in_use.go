package machine

import (
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/half"
	"github.com/kvconn/kvconn/internal/fault"
)

// InUse returns the transfers whose blocks may be read or written, now or later: loads, and offers and partial offers whose blocks
// the engine has not got back. The list has no order, and may name a transfer of several parts several times. InUse walks over all
// halves.
func (m *Machine) InUse() []core.TransferID { return m.halves.InUse() }

func (m *Machine) stepRemapped(now time.Time, r core.Remapped) {
	end := half.Ending{Code: fault.Pick("remapped-is-cancelled", core.Failed, core.Cancelled), Reason: r.Reason}
	if m.fans.loads[r.ID] != nil || m.halves.LoadInUse(half.ID(r.ID)) {
		m.endLoad(now, r.ID, end)
	}
	m.halves.Settle(now)
	for _, of := range m.halfOf(r.ID) {
		if of.InUse() && !fault.On("remapped-is-offered") {
			m.halves.EndOffer(now, of, half.Always, end)
		}
	}
}
