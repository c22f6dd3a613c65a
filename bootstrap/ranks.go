// The ranks of an SGLang engine, which its routes tell once all of them are there.

package bootstrap

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// Place is one rank among an engine's, in SGLang's terms: of attention
// parallelism, and of its data, context and pipeline parallel ranks.
type Place struct{ DP, CP, TP, PP int }

// Sizes say how many ranks there are of each kind.
type Sizes struct{ DP, CP, TP, PP int }

func (s Sizes) count() int { return s.DP * s.CP * s.TP * s.PP }

// String is s as an error wants it.
func (s Sizes) String() string {
	return fmt.Sprintf("dp %d cp %d tp %d pp %d", s.DP, s.CP, s.TP, s.PP)
}

// Rank is one rank as GET /route shows it, with its engine.
type Rank struct {
	Place Place
	Sizes Sizes
	// Host and Port are where the rank is reached.
	Host string
	Port int
	// Info has the members of the engine's topology beside the sizes. It is not copied.
	Info map[string]json.RawMessage
}

// Routes holds SGLang's ranks, and the dp ranks of its requests: /route,
// /register_dp_rank and /query_dp_ranks answer from it. The zero value is empty. It is
// safe for concurrent use and must not be copied.
//
// Ranks come from two sides: from kvconn agents that are registered here (Join), and
// from clients that send a PUT. While there are agents they alone count, since their
// registrations have a lease.
type Routes struct {
	mu     sync.Mutex
	agents map[Place]Rank
	told   map[Place]Rank // by PUT /route
	rooms  rooms
}

// Join adds an agent's rank, or replaces it, and forgets all ranks of PUT /route.
func (t *Routes) Join(r Rank) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.agents == nil {
		t.agents = map[Place]Rank{}
	}
	t.agents[r.Place], t.told = r, nil
}

// Leave takes an agent's rank out.
func (t *Routes) Leave(p Place) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.agents, p)
}

// put takes a rank of PUT /route. If there are agents, it compares the rank with them
// and does not keep it.
func (t *Routes) put(r Rank) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if first, ok := lowest(t.agents); ok {
		return r.sameSizes(first)
	}
	if t.told == nil {
		t.told = map[Place]Rank{}
	}
	for at, other := range t.told {
		if at == r.Place {
			continue // this is the rank's previous registration
		}
		if err := r.sameSizes(other); err != nil {
			return err
		}
		for _, key := range sameInfo {
			if a, b := orNull(r.Info[key]), orNull(other.Info[key]); !bytes.Equal(a, b) {
				return &ConflictError{fmt.Sprintf("rank %v has %s %s, rank %v has %s", r.Place, key, excerpt(a), other.Place, excerpt(b))}
			}
		}
		r.Info = other.Info // all share one
		break
	}
	t.told[r.Place] = r // t.told is bounded: Sizes is, and each place has one rank
	return nil
}

func (r Rank) sameSizes(other Rank) error {
	if r.Sizes != other.Sizes {
		return &ConflictError{fmt.Sprintf("rank %v is of an engine of %v ranks, but rank %v, which is registered here, is of an engine of %v", r.Place, r.Sizes, other.Place, other.Sizes)}
	}
	return nil
}

// sameInfo names the members of Info that all ranks of an engine have in common.
var sameInfo = []string{"page_size", "kv_cache_dtype", "kv_layout", "dsv41_spec_layout", "decode_allocation_policy"}

func orNull(v json.RawMessage) json.RawMessage {
	if v == nil {
		return json.RawMessage("null")
	}
	return v
}

// NotReadyError says that not all ranks of the engine are there.
type NotReadyError struct {
	Have int
	Want Sizes // zero while no rank is known
}

// Error says how many are there.
func (e *NotReadyError) Error() string { return "bootstrap: " + e.detail() }

func (e *NotReadyError) detail() string {
	if e.Have == 0 {
		return "no rank of a prefill engine is registered here yet"
	}
	return fmt.Sprintf("%d of the prefill engine's %d ranks (%v) are registered", e.Have, e.Want.count(), e.Want)
}

// NotFoundError says that the engine has no such rank.
type NotFoundError struct {
	Place Place
	Sizes Sizes
}

// Error names the rank.
func (e *NotFoundError) Error() string { return "bootstrap: " + e.detail() }

func (e *NotFoundError) detail() string {
	return fmt.Sprintf("the prefill engine has no rank %v: its sizes are %v", e.Place, e.Sizes)
}

// String is p as an error wants it.
func (p Place) String() string { return fmt.Sprintf("dp %d cp %d tp %d pp %d", p.DP, p.CP, p.TP, p.PP) }

// Topology returns the lowest rank of the engine, whose Sizes and Info hold for all
// ranks. While a rank is missing the error is a *NotReadyError.
func (t *Routes) Topology() (Rank, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r, _, err := t.whole()
	return r, err
}

// Rank returns one of an engine whose ranks are all there. Errors are
// *NotReadyError and *NotFoundError.
func (t *Routes) Rank(p Place) (Rank, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	first, all, err := t.whole()
	if err != nil {
		return Rank{}, err
	}
	r, ok := all[p]
	if !ok {
		return Rank{}, &NotFoundError{p, first.Sizes}
	}
	return r, nil
}

// whole returns the lowest rank and all of them, if all are there; t.mu is held.
func (t *Routes) whole() (Rank, map[Place]Rank, error) {
	first, all, ok := t.ranks()
	if !ok {
		return Rank{}, nil, &NotReadyError{}
	}
	n := 0
	for _, r := range all {
		if r.Sizes == first.Sizes { // dp ranks of unequal sizes are no engine of SGLang's
			n++
		}
	}
	if n < first.Sizes.count() {
		return Rank{}, nil, &NotReadyError{n, first.Sizes}
	}
	return first, all, nil
}

// ranks returns the ranks that count, and the lowest of them; t.mu is held.
func (t *Routes) ranks() (Rank, map[Place]Rank, bool) {
	all := t.agents
	if len(all) == 0 {
		all = t.told
	}
	first, ok := lowest(all)
	return first, all, ok
}

func lowest(all map[Place]Rank) (low Rank, ok bool) {
	for p, r := range all {
		if !ok || slices.Compare(p.list(), low.Place.list()) < 0 {
			low, ok = r, true
		}
	}
	return low, ok
}

func (p Place) list() []int { return []int{p.DP, p.CP, p.TP, p.PP} }

// enter keeps for a while which dp rank has the request of a room.
func (t *Routes) enter(id int64, dp int, from netip.Prefix) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	most := MaxRank + 1
	if first, _, ok := t.ranks(); ok {
		most = first.Sizes.DP
	}
	if dp < 0 || dp >= most {
		return &InvalidError{[]FieldError{fieldError("value_error", "dp_rank", "%d is not a dp rank of this engine, give one from 0 to %d", dp, most-1)}}
	}
	t.rooms.set(id, dp, from, time.Now())
	return nil
}

// dpRanks returns the dp ranks of the rooms that are known.
func (t *Routes) dpRanks(ids []int64) map[int64]int {
	t.mu.Lock()
	defer t.mu.Unlock()
	known, now := map[int64]int{}, time.Now()
	for _, id := range ids {
		if dp, ok := t.rooms.get(id, now); ok {
			known[id] = dp
		}
	}
	return known
}

// check names the fields of PUT /route that are wrong in a rank.
func (r Rank) check(names [4]string) (bad []FieldError) {
	place, sizes := r.Place.list(), []int{r.Sizes.DP, r.Sizes.CP, r.Sizes.TP, r.Sizes.PP}
	product := 1
	for i, name := range names {
		product = min(product, MaxEntries+1) * max(1, min(sizes[i], MaxEntries+1))
		if sizes[i] < 1 || sizes[i] > MaxEntries || place[i] < 0 || place[i] >= sizes[i] {
			bad = append(bad, fieldError("value_error", name, "rank %d of %d: give a size from 1 to %d and a rank below it", place[i], sizes[i], MaxEntries))
		}
	}
	if bad == nil && product > MaxEntries {
		bad = append(bad, fieldError("value_error", names[2], "an engine of %v has more than %d ranks", r.Sizes, MaxEntries))
	}
	if r.Port < 1 || r.Port > 65535 {
		bad = append(bad, fieldError("value_error", "rank_port", "%d is not a port, give one from 1 to 65535", r.Port))
	}
	if e := checkText("rank_ip", r.Host, MaxHost); e != nil {
		bad = append(bad, *e)
	}
	return bad
}

// MaxHost is the longest rank_ip, in bytes.
const MaxHost = 256
