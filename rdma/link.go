package rdma

import (
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/invariants"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// link is a D as P sees it: its memory, the lanes to it, and what is written.
type link struct {
	t      *Transport
	peer   core.AgentID
	ticket []byte

	mu     sync.Mutex
	state  state
	ended  error // why the connection has ended
	there  *far  // D's ports and keys, as the state says
	lanes  []*lane
	lastID uint32 // of a lane
	rails  map[railKey]*rail
	writes map[*write]struct{}
	bySeq  map[uint64]*write
	grants grants

	lost  []uint32 // lanes that broke, until D has ended its side of them
	broke error    // why the last one did
	tasks tasks
	mends bool        // the goroutine of mend runs
	used  time.Time   // when something was written last
	sleep *time.Timer // closes the lanes when nothing was written for long
	looks *time.Timer // while something is under way: do the lanes complete something?

	held    []uint64 // drained, but D has lost lanes to end before it can be told
	drained []uint64 // D is to be told that nothing of these is on its way
	tells   bool     // the goroutine of tellDrained runs

	// What update leaves to be done without the lock.
	outcomes []*write
	fell     error

	// Scratch of pump.
	chain  [maxChain]verbs.Write
	pieces [maxChain * 4]verbs.SGE
}

// railKey names a pair of ports, by their place in each side's list.
type railKey struct{ local, remote int }

func newLink(t *Transport, peer core.AgentID) *link {
	return &link{t: t, peer: peer, state: stateNew, ticket: make([]byte, 32), rails: map[railKey]*rail{}, writes: map[*write]struct{}{},
		bySeq: map[uint64]*write{}, grants: grants{dead: map[uint64]bool{}}}
}

// update runs f with the lock and does without it what f has left to be done.
func (lk *link) update(f func(lk *link)) {
	outcomes, fell := lk.locked(f)
	for _, w := range outcomes {
		lk.t.sender.outcome(w)
	}
	if fell != nil {
		lk.t.down(lk.peer, fell)
	}
}

// locked lets the lock go also when f panics: Close must still stop the bytes.
func (lk *link) locked(f func(lk *link)) (outcomes []*write, fell error) {
	lk.mu.Lock()
	defer lk.mu.Unlock()
	f(lk)
	lk.kick()
	if invariants.Enabled {
		lk.check()
	}
	outcomes, fell = lk.outcomes, lk.fell
	lk.outcomes, lk.fell = nil, nil
	if len(lk.drained) > 0 && !lk.tells {
		lk.tells = lk.t.goRun("rdma drained", lk.tellDrained)
	}
	return outcomes, fell
}

// greeted: D wants lanes, has lost some, and ports of it have become active.
func (lk *link) greeted(broken []uint32, up []int) {
	for _, id := range broken {
		for _, l := range lk.lanes {
			if l.id == id {
				lk.breakLane(l, errors.New("rdma: it broke at the peer"))
				break
			}
		}
	}
	lk.on(eventGreeted)
	if len(up) > 0 {
		lk.portUp(func(k railKey) bool { return slices.Contains(up, k.remote) })
	}
	lk.tasks |= makeLanes
}

// portUp ends the pauses of a port's rails, and has lanes made if there is none at it.
// Where no lane is open though D's keys are good, the next write makes them.
func (lk *link) portUp(at func(railKey) bool) {
	now := time.Now()
	for key, r := range lk.rails {
		if at(key) {
			r.resume(now)
		}
	}
	served := slices.ContainsFunc(lk.lanes, func(l *lane) bool { return at(l.railKey()) })
	if !served && (lk.state == stateUp || lk.state == stateDown) {
		lk.tasks |= makeLanes
	}
}

// railKey names the pair of ports of P's end.
func (l *lane) railKey() railKey { return railKey{l.port.index, l.remote} }

// rail of a pair of ports; lk.mu is held.
func (lk *link) rail(c *planned) *rail {
	r := lk.rails[c.key]
	if r == nil {
		r = newRail(float64(min(c.local.state.Load().speed, c.far.Speed)))
		lk.rails[c.key] = r
	}
	return r
}

// end closes a link for good, and tells D.
func (lk *link) end(cause error, why string) {
	lk.update(func(lk *link) {
		if lk.on(eventEnd) == stateEnded {
			return
		}
		lk.ended = cause
		lk.lose(cause)
		for _, timer := range []*time.Timer{lk.sleep, lk.looks} {
			if timer != nil {
				timer.Stop()
			}
		}
		lk.t.sayBye(lk.peer, &signal{Kind: signalDismissed, Ticket: lk.ticket, Reason: why})
	})
}
