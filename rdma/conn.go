package rdma

import (
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/invariants"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// conn is a P's connection to one D: it has D's keys, the lanes to D, and the writes.
type conn struct {
	t      *Transport
	peer   core.AgentID
	ticket []byte

	mu     sync.Mutex
	state  state
	ended  error       // why the connection has ended
	remote *remoteInfo // D's ports and keys; nil where the state says that P has none
	lanes  []*lane
	lastID uint32 // the id of the newest lane
	paths  map[pathKey]*path
	writes map[*write]struct{}
	bySeq  map[uint64]*write
	grants grants

	lost         []uint32 // lanes that broke, until D has ended its side of them
	broke        error    // why the last of them broke
	tasks        tasks
	reconnecting bool        // the goroutine of reconnectLoop runs
	used         time.Time   // when something was written last
	sleep        *time.Timer // closes the lanes when nothing was written for Config.Idle
	looks        *time.Timer // runs while requests are under way, and ends lanes that complete none

	held    []uint64 // grants like those in drained, but D must end its side of lost lanes first
	drained []uint64 // grants that have no byte on its way any more, until D is told
	tells   bool     // the goroutine of tellDrained runs

	// Left by update, to be done without the lock.
	outcomes  []*write
	downCause error

	// Scratch of pump. The plans that P writes to D have no more pieces in memory than window holds.
	chain  [maxChain]verbs.Write
	pieces [maxChain * 4]verbs.SGE
	window [maxChain]kv.Pair
}

// pathKey names a pair of ports, by their place in each side's list.
type pathKey struct{ local, remote int }

func newConn(t *Transport, peer core.AgentID) *conn {
	return &conn{t: t, peer: peer, state: stateNew, ticket: make([]byte, 32), paths: map[pathKey]*path{}, writes: map[*write]struct{}{},
		bySeq: map[uint64]*write{}, grants: grants{dead: map[uint64]bool{}}}
}

// update runs f with the lock held. Then, without the lock, it tells the outcomes that f left.
func (cn *conn) update(f func(cn *conn)) {
	outcomes, downCause := cn.locked(f)
	for _, w := range outcomes {
		cn.t.sender.outcome(w)
	}
	if downCause != nil {
		cn.t.down(cn.peer, downCause)
	}
}

// locked releases the lock also when f panics, because Close must still stop the bytes.
func (cn *conn) locked(f func(cn *conn)) (outcomes []*write, downCause error) {
	cn.mu.Lock()
	defer cn.mu.Unlock()
	f(cn)
	cn.startReconnect()
	if invariants.Enabled {
		cn.check()
	}
	outcomes, downCause = cn.outcomes, cn.downCause
	cn.outcomes, cn.downCause = nil, nil
	if len(cn.drained) > 0 && !cn.tells {
		cn.tells = cn.t.goRun("rdma drained", cn.tellDrained)
	}
	return outcomes, downCause
}

// helloReceived takes D's hello: D asks for lanes, and names its lanes that broke and its
// ports that became active.
func (cn *conn) helloReceived(broken []uint32, up []int) {
	for _, id := range broken {
		for _, l := range cn.lanes {
			if l.id == id {
				cn.breakLane(l, errors.New("rdma: the lane broke at the peer"))
				break
			}
		}
	}
	cn.on(eventHello)
	if len(up) > 0 {
		cn.portUp(func(k pathKey) bool { return slices.Contains(up, k.remote) })
	}
	cn.tasks |= makeLanes
}

// portUp ends the pauses of a port's paths. If no lane is open at the port, P makes some,
// except in the state noLanes, in which the next write makes them.
func (cn *conn) portUp(at func(pathKey) bool) {
	now := time.Now()
	for key, r := range cn.paths {
		if at(key) {
			r.resume(now)
		}
	}
	served := slices.ContainsFunc(cn.lanes, func(l *lane) bool { return at(l.pathKey()) })
	if !served && (cn.state == stateUp || cn.state == stateDown) {
		cn.tasks |= makeLanes
	}
}

// pathKey names the pair of ports between which a lane goes; l is P's end of the lane.
func (l *lane) pathKey() pathKey { return pathKey{l.port.index, l.remote} }

// path returns the path that a plan names. If the path is new, path makes it; cn.mu is held.
func (cn *conn) path(c *planned) *path {
	r := cn.paths[c.key]
	if r == nil {
		r = newPath(float64(min(c.local.state.Load().speed, c.remote.Speed)))
		cn.paths[c.key] = r
	}
	return r
}

// end closes a connection for good, and tells D.
func (cn *conn) end(cause error, why string) {
	cn.update(func(cn *conn) {
		if cn.on(eventEnd) == stateEnded {
			return
		}
		cn.ended = cause
		cn.disconnect(cause)
		for _, timer := range []*time.Timer{cn.sleep, cn.looks} {
			if timer != nil {
				timer.Stop()
			}
		}
		cn.t.sayBye(cn.peer, &signal{Kind: signalDismissed, Ticket: cn.ticket, Reason: why})
	})
}
