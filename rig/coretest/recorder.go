// What a transport's sink was told is kept, waited for and checked.

package coretest

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
)

// patience bounds every wait of the suite: generous, because a bound that is
// hit is a failure.
const patience = 30 * time.Second

// Outcome is one call of a Sink.
type Outcome struct {
	Kind  string // "received", "written" or "down"
	ID    core.TransferID
	Peer  core.AgentID
	Stats core.TransferStats
	Err   error
}

// Recorder is a core.Sink that keeps all outcomes and checks that none is told after Shut.
type Recorder struct {
	t    testing.TB
	name string

	mu      sync.Mutex
	list    []Outcome
	changed chan struct{} // closed and made anew at each outcome
	shut    bool
	looks   func(Outcome) // if set, is called with each outcome before anybody hears of it
}

var _ core.Sink = (*Recorder)(nil)

// NewRecorder makes the sink of the agent name.
func NewRecorder(t testing.TB, name string) *Recorder {
	return &Recorder{t: t, name: name, changed: make(chan struct{})}
}

func (r *Recorder) add(o Outcome) {
	if r.looks != nil {
		r.looks(o)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.shut {
		r.t.Errorf("%s: sink was told after Close had returned: %+v", r.name, o)
	}
	r.list = append(r.list, o)
	close(r.changed)
	r.changed = make(chan struct{})
}

// Received implements core.Sink.
func (r *Recorder) Received(id core.TransferID, s core.TransferStats, err error) {
	r.add(Outcome{Kind: "received", ID: id, Stats: s, Err: err})
}

// Written implements core.Sink.
func (r *Recorder) Written(id core.TransferID, s core.TransferStats, err error) {
	r.add(Outcome{Kind: "written", ID: id, Stats: s, Err: err})
}

// PeerDown implements core.Sink.
func (r *Recorder) PeerDown(peer core.AgentID, err error) {
	r.add(Outcome{Kind: "down", Peer: peer, Err: err})
}

// Shut says that the transport's Close has returned.
func (r *Recorder) Shut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.shut = true
}

// All returns the outcomes so far of one kind and, unless it is "", one id.
func (r *Recorder) All(kind string, id core.TransferID) []Outcome {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.find(kind, id)
}

func (r *Recorder) find(kind string, id core.TransferID) []Outcome {
	var out []Outcome
	for _, o := range r.list {
		if o.Kind == kind && (id == "" || o.ID == id) {
			out = append(out, o)
		}
	}
	return out
}

// Wait waits for the n-th outcome (from 1) of a kind and id.
func (r *Recorder) Wait(kind string, id core.TransferID, n int) Outcome {
	r.t.Helper()
	return r.waitFor(fmt.Sprintf("outcome %q %d of %q", kind, n, string(id)), func() (Outcome, bool) {
		if all := r.find(kind, id); len(all) >= n {
			return all[n-1], true
		}
		return Outcome{}, false
	})
}

// waitFor waits until f, called under the lock, says yes.
func (r *Recorder) waitFor(what string, f func() (Outcome, bool)) Outcome {
	r.t.Helper()
	late := time.NewTimer(patience)
	defer late.Stop()
	for {
		r.mu.Lock()
		o, ok := f()
		changed := r.changed
		all := slices.Clone(r.list)
		r.mu.Unlock()
		if ok {
			return o
		}
		select {
		case <-changed:
		case <-late.C:
			r.t.Fatalf("%s: no %s within %v; there are %+v", r.name, what, patience, all)
		}
	}
}
