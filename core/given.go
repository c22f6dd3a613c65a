package core

import (
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// Given are the transfers for which blocks of the engine may be read or written, or will be: those of loads, and of the offers and
// partial offers that the engine has not got back. They have no order, and one of several parts may be named for each. It walks over
// all halves.
func (m *Machine) Given() (ids []TransferID) {
	for id, ld := range m.loads.byID {
		if ld.Count() > 0 {
			ids = append(ids, nameOf(id))
		}
	}
	for id, of := range m.offers {
		if of.given() {
			ids = append(ids, nameOf(id))
		}
	}
	return ids
}

// AnyGiven says whether there are some.
func (m *Machine) AnyGiven() bool {
	for _, ld := range m.loads.byID {
		if ld.Count() > 0 {
			return true
		}
	}
	for _, of := range m.offers {
		if of.given() {
			return true
		}
	}
	return false
}

func (of *offer) given() bool {
	return of.held.Count() > 0 || of.state.sending() || of.state.stopping()
}

func (m *Machine) stepRemapped(now time.Time, r Remapped) {
	end := ending{fault.Pick("remapped-is-cancelled", Failed, Cancelled), r.Reason}
	if ld := m.loads.get(r.ID); ld != nil && ld.Count() > 0 {
		m.endLoad(now, ld, end, true)
	}
	m.endLoadParts(now, r.ID, end)
	m.settle(now)
	for _, of := range m.halfOf(r.ID) {
		if of.given() && !fault.On("remapped-is-offered") {
			m.endOffer(now, of, end, true)
		}
	}
	m.settle(now)
}
