package bootstrap

import (
	"fmt"
	"net/netip"
	"sync"

	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/quota"
)

// MaxEntries is how many ranks one table holds.
const MaxEntries = 1024

// Engine is one dp rank's engine as GET /query shows it: addresses by tp rank
// and pp rank.
type Engine struct {
	EngineID   string                 `json:"engine_id"`
	WorkerAddr map[int]map[int]string `json:"worker_addr"`
}

// ConflictError refuses a registration that contradicts an earlier one.
type ConflictError struct {
	Detail string
}

// Error is the detail that HTTP clients see.
func (e *ConflictError) Error() string { return "bootstrap: " + e.Detail }

// FullError refuses a registration because the table is full.
type FullError struct {
	Limit int
}

// Error names the limit.
func (e *FullError) Error() string { return "bootstrap: " + e.detail() }

func (e *FullError) detail() string {
	return fmt.Sprintf("the table holds %d ranks already, its limit: unregister ranks that are gone", e.Limit)
}

// Table holds the registered ranks. The zero value is an empty table; it is
// safe for concurrent use and must not be copied.
type Table struct {
	mu      sync.Mutex
	engines map[int]Engine
	entries int
	limit   int                                      // 0 stands for MaxEntries; tests set less
	told    quota.Places[netip.Prefix, Registration] // those that came by POST /register, by where from; no lease ends them
	answers answers
	routes  Routes
}

// Routes returns the ranks from which SGLang's routes answer.
func (t *Table) Routes() *Routes { return &t.routes }

// Register adds a rank that a lease ends. The very same registration again is fine: a worker
// that did not hear the answer may ask again. Errors are *InvalidError,
// *ConflictError and *FullError, and leave the table as it was.
func (t *Table) Register(r Registration) error { return t.register(r, nil) }

// register adds a rank that came by POST /register from an address, or from is nil. If the table is full, the newest rank of the address that
// has the most such ranks gives way: to a rank that a lease ends, and if the address has more than a quarter of the table, to one of another.
func (t *Table) register(r Registration, from *netip.Prefix) error {
	if err := r.validate(); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()

	engine, known := t.engines[r.DPRank]
	if known && engine.EngineID != r.EngineID {
		return &ConflictError{fmt.Sprintf("Engine ID mismatch for dp_rank=%d: expected %s, got %s",
			r.DPRank, engine.EngineID, r.EngineID)}
	}
	if addr, ok := engine.WorkerAddr[r.TPRank][r.PPRank]; ok {
		if addr == r.Addr {
			if from == nil && !fault.On("table-lease-told") { // a lease ends it from now on
				t.told.Remove(r)
			}
			return nil
		}
		return &ConflictError{fmt.Sprintf("Worker with dp_rank=%d, tp_rank=%d, pp_rank=%d is already registered at %s, but still want to register at %s",
			r.DPRank, r.TPRank, r.PPRank, addr, r.Addr)}
	}
	limit := t.limit
	if limit == 0 {
		limit = MaxEntries
	}
	if t.entries >= limit && !t.makeRoom(from, limit) {
		return &FullError{Limit: limit}
	}

	if t.engines == nil {
		t.engines = map[int]Engine{}
	}
	engine, known = t.engines[r.DPRank]
	if !known {
		engine = Engine{EngineID: r.EngineID, WorkerAddr: map[int]map[int]string{}}
		t.engines[r.DPRank] = engine
	}
	if engine.WorkerAddr[r.TPRank] == nil {
		engine.WorkerAddr[r.TPRank] = map[int]string{}
	}
	engine.WorkerAddr[r.TPRank][r.PPRank] = r.Addr
	t.entries++
	if from != nil {
		t.told.Put(*from, r, 1)
	}
	t.answers.changed()
	return nil
}

// makeRoom takes a rank out for another; see register. An engine that has told of its ranks tells once only: so those of an address that has
// few stay, however many addresses come. mu is held.
func (t *Table) makeRoom(from *netip.Prefix, limit int) bool {
	most := t.told.Most()
	if from != nil && (most <= int64(limit/4) || most <= t.told.Of(*from)+1 || fault.On("table-first-come")) && !fault.On("table-few-give-way") {
		return false
	}
	victim, ok := t.told.Newest()
	if ok {
		t.remove(victim)
	}
	return ok
}

// Unregister removes a rank and reports whether it was there. It removes a rank only
// by the registration that the rank was made with: if an engine was restarted, the
// old process may ask late, and must not remove the new one's rank. When the last
// rank of a dp rank is removed, another engine may take the dp rank.
func (t *Table) Unregister(r Registration) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	engine := t.engines[r.DPRank]
	addr, ok := engine.WorkerAddr[r.TPRank][r.PPRank]
	if !ok || engine.EngineID != r.EngineID || addr != r.Addr {
		return false
	}
	t.remove(r)
	return true
}

// remove takes a rank out that is there; mu is held.
func (t *Table) remove(r Registration) {
	engine := t.engines[r.DPRank]
	t.entries--
	t.answers.changed()
	t.told.Remove(r)
	delete(engine.WorkerAddr[r.TPRank], r.PPRank)
	if len(engine.WorkerAddr[r.TPRank]) == 0 {
		delete(engine.WorkerAddr, r.TPRank)
	}
	if len(engine.WorkerAddr) == 0 {
		delete(t.engines, r.DPRank)
	}
}

// Query returns a copy of the table by dp rank. The copy belongs to the caller and
// marshals to the answer of GET /query.
func (t *Table) Query() map[int]Engine {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make(map[int]Engine, len(t.engines))
	for dp, engine := range t.engines {
		addrs := make(map[int]map[int]string, len(engine.WorkerAddr))
		for tp, byPP := range engine.WorkerAddr {
			addrs[tp] = make(map[int]string, len(byPP))
			for pp, addr := range byPP {
				addrs[tp][pp] = addr
			}
		}
		all[dp] = Engine{EngineID: engine.EngineID, WorkerAddr: addrs}
	}
	return all
}
