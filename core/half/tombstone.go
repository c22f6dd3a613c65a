package half

import (
	"container/list"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// Tombstones remember, within a bound, how transfers ended. So the answer to a late or doubled
// message is how the transfer ended, and nobody waits anew. Transfers that only peers have named
// are remembered apart, so that no peer can have this agent forget what its engine knows.
type Tombstones struct {
	own   Remembered[ID, Tombstone]
	words map[ID]word // the newest transfers that only peers have named, as many as own has; the account that has named the most gives way
	of    greedy
}

type word struct {
	Tombstone
	of *stake
}

// Tombstone is how a transfer has ended.
type Tombstone struct {
	Code    core.Code
	Reason  string
	Offered bool               // the engine has had its report
	nacked  core.AgentID       // the D whose transport did not expect the transfer any more
	Stats   core.TransferStats // of a write that ended before the engine had offered the transfer
}

func newTombstones(limit int) Tombstones {
	return Tombstones{own: Remember[ID, Tombstone](limit), words: map[ID]word{}, of: newGreedy()}
}

// Get says how a transfer, or a part of one, has ended, if that is remembered.
func (t *Tombstones) Get(id ID) (end Tombstone, gone bool) {
	if end, gone = t.own.byID[id]; !gone {
		w, known := t.words[id]
		return w.Tombstone, known
	}
	return end, gone
}

// Add remembers how a transfer of the engine has ended.
func (t *Tombstones) Add(id ID, end Tombstone) {
	if fault.On("no-tombstones") {
		delete(t.own.byID, id)
		t.own.order = nil
		return
	}
	t.dropWord(id)
	t.own.Put(id, end)
}

// addWord remembers how a transfer has ended that only peers have named; from was the first to name it.
func (t *Tombstones) addWord(from Party, id ID, end Tombstone) {
	switch {
	case fault.On("no-tombstones"):
	case fault.On("words-push-out"):
		t.own.Put(id, end)
	default:
		t.dropWord(id)
		t.words[id] = word{end, t.of.add(from, id, 1)}
		if len(t.words) > t.own.limit {
			t.dropWord(t.of.most().outermost((*list.List).Front).id)
		}
	}
}

func (t *Tombstones) dropWord(id ID) {
	if old, known := t.words[id]; known {
		delete(t.words, id)
		t.of.change(old.of, -1)
	}
}

// Len is how many are remembered.
func (t *Tombstones) Len() int { return len(t.own.byID) + len(t.words) }
