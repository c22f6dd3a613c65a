package core

import "github.com/kvconn/kvconn/internal/fault"

// tombstones remember, within a bound, how transfers ended. So a late or doubled message
// is answered by the truth and not by a new wait. What only peers have named is remembered
// apart, so that no peer can have this agent forget what its engine knows.
type tombstones struct {
	own   remembered[tombstone]
	words words
}

type tombstone struct {
	code    Code
	reason  string
	offered bool          // the engine has had its report
	nacked  AgentID       // the D whose transport did not expect it any more
	stats   TransferStats // of the write that had ended before the engine offered
}

func newTombstones(limit int) tombstones {
	return tombstones{remember[tombstone](limit), words{limit: limit, byID: map[TransferID]word{}, of: newGreedy()}}
}

func (t *tombstones) get(id TransferID) (end tombstone, gone bool) {
	if end, gone = t.own.byID[id]; !gone {
		w, known := t.words.byID[id]
		return w.tombstone, known
	}
	return end, gone
}

// add remembers how a transfer of the engine has ended.
func (t *tombstones) add(id TransferID, end tombstone) {
	if fault.On("no-tombstones") {
		delete(t.own.byID, id)
		t.own.order = nil
		return
	}
	t.words.drop(id)
	t.own.put(id, end)
}

// addWord remembers how a transfer has ended that only peers have named, from first.
func (t *tombstones) addWord(from party, id TransferID, end tombstone) {
	switch {
	case fault.On("no-tombstones"):
	case fault.On("words-push-out"):
		t.own.put(id, end)
	default:
		t.words.put(from, id, end)
	}
}

func (t *tombstones) len() int { return len(t.own.byID) + len(t.words.byID) }

// words are ends of the newest transfers that only peers have named, as many as limit. The
// account that has named the most gives way.
type words struct {
	limit int
	byID  map[TransferID]word
	of    greedy
}

type word struct {
	tombstone
	of *stake
}

func (w *words) put(from party, id TransferID, end tombstone) {
	w.drop(id)
	w.byID[id] = word{end, w.of.add(from, id, 1)}
	if len(w.byID) > w.limit {
		w.drop(w.of.oldest().id)
	}
}

func (w *words) drop(id TransferID) {
	if old, known := w.byID[id]; known {
		delete(w.byID, id)
		w.of.change(old.of, -1)
	}
}
