// Which ranks are registered at this port, and which one gives way when the table is full.

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
	return fmt.Sprintf("the table of %d ranks has no place for this one: unregister ranks that are gone", e.Limit)
}

// Table holds the registered ranks. The zero value is an empty table; it is
// safe for concurrent use and must not be copied.
type Table struct {
	// JoinsProved says that ranks that join have proved a secret. It is set before the table is used.
	JoinsProved bool

	mu      sync.Mutex
	engines map[int]Engine
	entries int
	limit   int                                // 0 stands for MaxEntries; tests set less
	others  quota.Places[string, Registration] // all but this agent's own, by the account that has joined, which may be an address, or the address
	told    quota.Places[string, Registration] // of these those that came by POST /register; no lease ends them
	answers answers
	routes  Routes
}

// Routes returns the ranks from which SGLang's routes answer.
func (t *Table) Routes() *Routes { return &t.routes }

// Register adds this agent's own rank. The very same registration again is fine: a worker
// that did not hear the answer may ask again. Errors are *InvalidError,
// *ConflictError and *FullError, and leave the table as it was.
func (t *Table) Register(r Registration) error {
	_, err := t.register(r, own, "", nil)
	return err
}

// Join adds a rank that has joined, as Register does. It takes the place of instead's ranks; gone is who gave way besides, and had joined.
func (t *Table) Join(r Registration, account string, instead []Registration) (gone []Registration, err error) {
	return t.register(r, joins, account, instead)
}

// tell adds a rank that came by POST /register from an address.
func (t *Table) tell(r Registration, from netip.Prefix) error {
	_, err := t.register(r, told, from.String(), nil)
	return err
}

// way is how a rank has come.
type way int

const (
	own way = iota
	joins
	told
)

func (t *Table) register(r Registration, by way, owner string, instead []Registration) (gone []Registration, err error) {
	if err := r.validate(); err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()

	engine, known := t.engines[r.DPRank]
	if known && engine.EngineID != r.EngineID {
		return nil, &ConflictError{fmt.Sprintf("Engine ID mismatch for dp_rank=%d: expected %s, got %s",
			r.DPRank, engine.EngineID, r.EngineID)}
	}
	if addr, ok := engine.WorkerAddr[r.TPRank][r.PPRank]; ok {
		if addr == r.Addr {
			if by != told && !fault.On("table-lease-told") { // a lease ends it from now on
				t.count(r, by, owner)
			}
			return gone, nil
		}
		return nil, &ConflictError{fmt.Sprintf("Worker with dp_rank=%d, tp_rank=%d, pp_rank=%d is already registered at %s, but still want to register at %s",
			r.DPRank, r.TPRank, r.PPRank, addr, r.Addr)}
	}
	limit := t.limit
	if limit == 0 {
		limit = MaxEntries
	}
	for _, other := range instead { // if one of them was there, there is room
		t.unregister(other)
	}
	if t.full(by, limit) {
		victim, ok := t.yields(by, owner, int64(limit/4))
		if !ok {
			return nil, &FullError{Limit: limit}
		}
		if !t.told.Has(victim) {
			gone = append(gone, victim)
		}
		t.remove(victim)
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
	t.count(r, by, owner)
	t.answers.changed()
	return gone, nil
}

// count counts a rank for its owner; mu is held.
func (t *Table) count(r Registration, by way, owner string) {
	t.told.Remove(r)
	t.others.Remove(r)
	switch by {
	case joins:
		if fault.On("table-ways-apart") {
			owner += " by joining"
		}
		t.others.Put(owner, r, 1)
	case told:
		t.others.Put(owner, r, 1)
		t.told.Put(owner, r, 1)
	case own: // it does not give way
	}
}

// full says whether one rank more that comes in this way would be one too many. A place is kept for this agent's own rank, and an eighth of the table
// for that one and ranks that join: no lease ends a rank that came by POST /register, so a few addresses could keep out those of this agent's engine
// for good. mu is held.
func (t *Table) full(by way, limit int) bool {
	switch {
	case t.entries >= limit:
		return true
	case by == own:
		return false
	case by == told && t.told.Len() >= limit-limit/8 && !fault.On("table-all-told"):
		return true
	}
	return t.others.Len() >= limit-1 && !fault.On("table-own-place-taken")
}

// yields is the rank that gives way to one of an owner in a full table. It is the newest of the address that has sent the most by POST /register or,
// if the other joins, of the address or account that has the most in all. It gives way only if it is one of more than a quarter of the
// table, and of at least two more than the owner has in all: an engine that has told of its ranks tells once only, so those of an address that has
// few stay, however many addresses come, and whether they tell or join. But a rank of this agent's engine, which is its own or has proved a secret, has
// a place as long as there is one that came by POST /register. mu is held.
func (t *Table) yields(by way, owner string, quarter int64) (victim Registration, ok bool) {
	over := func(most int64) bool {
		return (most > quarter && most > t.others.Of(owner)+1 || fault.On("table-few-give-way")) && !fault.On("table-first-come")
	}
	proved := t.JoinsProved && !fault.On("table-proof-unheeded") || fault.On("table-joins-push-out")
	if by == own || by == joins && proved {
		if victim, ok = t.told.Newest(); ok || by == own {
			return victim, ok
		}
	}
	from := &t.told
	if by == joins && (!fault.On("table-told-first") || !over(t.told.Most())) {
		from = &t.others
	}
	if !over(from.Most()) {
		return victim, false
	}
	return from.Newest()
}

// Unregister removes a rank and reports whether it was there. It removes a rank only
// by the registration that the rank was made with: if an engine was restarted, the
// old process may ask late, and must not remove the new one's rank. When the last
// rank of a dp rank is removed, another engine may take the dp rank.
func (t *Table) Unregister(r Registration) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.unregister(r)
}

// unregister is Unregister; mu is held.
func (t *Table) unregister(r Registration) bool {
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
	t.others.Remove(r)
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
