package rdma

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// link is a D as P sees it: its memory, the lanes to it, and what is written.
type link struct {
	t      *Transport
	peer   core.AgentID
	ticket []byte

	mu     sync.Mutex
	ended  error // dismissed or closed, for good
	there  *far  // D's ports and keys; nil: not connected since it was lost
	lanes  []*lane
	lost   []uint32 // lanes that broke, until D has ended its side of them
	broke  error    // why the last one did
	rails  map[railKey]*rail
	lastID uint32 // of a lane
	up     bool   // the sink has not been told that D is gone
	writes map[*write]struct{}
	bySeq  map[uint64]*write
	grants grants

	met     bool     // D has asked for lanes before
	wanted  bool     // lanes are to be made
	resync  bool     // D is to be asked which grants are alive
	mends   bool     // a goroutine connects, or asks what of lost lanes has arrived
	held    []uint64 // drained, but D has lost lanes to end before it can be told
	drained []uint64
	tells   bool // a goroutine tells D what was drained

	used  time.Time // when something was written last
	sleep *time.Timer
	rest  bool        // the lanes are closed because nothing was written for long
	looks *time.Timer // while something is under way: do the lanes complete something?

	// What update leaves to be done without the lock.
	outcomes []*write
	fell     error

	// Scratch of pump.
	chain  [maxChain]verbs.Write
	pieces [maxChain * 4]verbs.SGE
}

// railKey names a pair of ports, by their place in each side's list.
type railKey struct{ local, remote int }

// far is what D has said of itself. It does not change.
type far struct {
	secret  []byte
	ports   map[int]*portInfo
	tables  map[int]*keyTable // by port, as the next
	scratch map[int]keyInfo
}

// grants says which of D's grants are dead.
type grants struct {
	below uint64 // dead
	next  uint64 // when live was told, this was to be the next one
	live  map[uint64]bool
	dead  map[uint64]bool // told since, or used up
}

// maxDead is how many are remembered one by one; then D is asked.
const maxDead = 1 << 16

func (g *grants) alive(seq uint64) bool {
	return seq >= g.below && !g.dead[seq] && (seq >= g.next || g.live[seq])
}

// told takes D's word of which were alive; of words that crossed the later one
// has the greater next.
func (g *grants) told(next uint64, live []uint64) {
	if next < g.next {
		return
	}
	g.next, g.live = next, make(map[uint64]bool, len(live))
	for _, seq := range live {
		g.live[seq] = true
	}
	for seq := range g.dead {
		if seq < next && !g.live[seq] {
			delete(g.dead, seq)
		}
	}
}

func (g *grants) drop(below uint64) {
	if below <= g.below {
		return
	}
	g.below = below
	for seq := range g.dead {
		if seq < below {
			delete(g.dead, seq)
		}
	}
}

func newLink(t *Transport, peer core.AgentID) *link {
	return &link{t: t, peer: peer, ticket: make([]byte, 32), rails: map[railKey]*rail{}, writes: map[*write]struct{}{},
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
	outcomes, fell = lk.outcomes, lk.fell
	lk.outcomes, lk.fell = nil, nil
	if len(lk.drained) > 0 && !lk.tells {
		lk.tells = lk.t.goRun("rdma drained", lk.tellDrained)
	}
	return outcomes, fell
}

// add begins a write, or has it wait for a lane.
func (lk *link) add(w *write) {
	lk.update(func(lk *link) {
		w.began = time.Now()
		lk.used = w.began
		lk.writes[w] = struct{}{}
		if lk.ended != nil {
			lk.fail(w, lk.ended)
			return
		}
		if len(lk.lanes) > 0 {
			lk.begin(w)
		}
	})
}

func (lk *link) assign(j *job, l *lane) {
	j.lane, j.lost, j.filled, j.queued = l, false, false, false
	j.enqueue()
}

// enqueue has a job's lane post what there is of it.
func (j *job) enqueue() {
	if j.lane != nil && !j.queued && j.cursor.ready() {
		j.lane.jobs = append(j.lane.jobs, j)
		j.queued = true
	}
}

// pump posts what there is room for, a chain for each job in turn, so that a
// small transfer does not stand behind a large one.
func (lk *link) pump(l *lane) {
	if l.rail == nil || l.broken {
		return
	}
	for len(l.jobs) > 0 {
		j := l.jobs[0]
		if j.w.cause != nil || j.lane != l {
			l.jobs = l.jobs[1:]
			continue
		}
		room, bytes := l.queue.room()
		if room < 2 || bytes == 0 {
			return
		}
		n := 0
		if !j.w.told { // the time from here on is the transfer's, and D knows that bytes may come
			m := mark{slot: j.w.grant.slot, generation: j.w.grant.generation, index: beginIndex, total: 1}
			lk.chain[0] = verbs.Write{Imm: m.encode(), Flags: verbs.WithImm}
			n = 1
		}
		limit := l.port.dev.limit
		limit.maxBytes = bytes
		k, pieces, carried, done, err := j.cursor.fill(lk.chain[n:min(room, maxChain)], lk.pieces[:], l.port.dev.memory.Load().local, l.keys, limit)
		if err != nil {
			lk.fail(j.w, fmt.Errorf("rdma: transfer %q: %w", string(j.w.op.ID), err))
			continue
		}
		n += k
		j.w.told = true
		// Nothing may follow for minutes: then a completion must tell of these.
		l.queue.posting(j, lk.chain[:n], lk.pieces[:pieces], !j.cursor.ready())
		l.rail.begin(time.Now(), carried)
		lk.watchLanes()
		j.flight += n
		j.w.flight += n
		lk.t.posted(lk.chain[:n])
		if _, err := l.qp.Post(lk.chain[:n], lk.pieces[:pieces]); err != nil {
			j.filled = done // some of it may be on its way, the mark too
			lk.breakLane(l, fmt.Errorf("rdma: %s: %w", l.port.name, err))
			return
		}
		l.jobs = l.jobs[1:]
		j.filled, j.queued = done, false
		j.enqueue()
	}
}

// landed: requests of a job have completed, so their bytes are at D.
func (lk *link) landed(j *job, requests int) {
	j.flight -= requests
	j.w.flight -= requests
	if j.flight == 0 && !j.cursor.ready() {
		j.breaks = 0
	}
	if j.filled && j.flight == 0 {
		lk.finish(j)
		return
	}
	lk.settle(j.w)
}

// finish: a job's bytes and its mark are at D.
func (lk *link) finish(j *job) {
	if !j.done {
		j.done, j.lost = true, false
		j.w.left--
	}
	lk.settle(j.w)
}

// fail gives a write up. It ends when no request reads its blocks any more.
func (lk *link) fail(w *write, cause error) {
	if w.cause == nil && !w.over {
		w.cause = cause
	}
	lk.settle(w)
}

// settle ends a write that has nothing more to do. Its outcome waits for lanes that
// broke, which may still read its blocks.
func (lk *link) settle(w *write) {
	if w.over || w.flight > 0 || w.cause == nil && (w.left > 0 || w.jobs == nil) {
		return
	}
	w.over = true
	delete(lk.writes, w)
	lk.used = time.Now()
	if w.known {
		delete(lk.bySeq, w.grant.seq)
		lk.kill(w.grant.seq)
		switch {
		case !w.drained:
		case len(lk.lost) > 0: // as in drain
			lk.held = append(lk.held, w.grant.seq)
		default:
			lk.drained = append(lk.drained, w.grant.seq)
		}
	}
	if w.reads == 0 {
		lk.outcomes = append(lk.outcomes, w)
	}
}

// kill: a grant is used up, or revoked.
func (lk *link) kill(seq uint64) {
	if seq >= lk.grants.below {
		lk.grants.dead[seq] = true
	}
	if len(lk.grants.dead) > maxDead {
		lk.resync = true
	}
}

// drain takes D's word that grants are dead, and says which of their transfers
// may still have something on its way. Of these tellDrained will tell.
func (lk *link) drain(m *signal) (pending []uint64) {
	for _, seq := range m.Seqs {
		lk.kill(seq)
		w := lk.bySeq[seq]
		switch {
		case len(lk.lost) > 0: // what they have sent may land as long as D has not ended them
			lk.held = append(lk.held, seq)
			pending = append(pending, seq)
		case w != nil && w.flight > 0:
			w.drained = true
			pending = append(pending, seq)
		}
		if w != nil {
			lk.fail(w, errRevoked(w))
		}
	}
	lk.grants.drop(m.Below)
	return pending
}

// confirmed: D has ended its side of lanes that broke. Some may have been confirmed
// before, by a word of D that crossed the answer.
func (lk *link) confirmed(lanes []uint32) {
	var rest []uint32
	for _, id := range lk.lost {
		if !slices.Contains(lanes, id) {
			rest = append(rest, id)
		}
	}
	if lk.lost = rest; len(rest) == 0 {
		lk.drained = append(lk.drained, lk.held...)
		lk.held = nil
	}
}

// tellDrained tells D of transfers of which nothing is on its way any more.
func (lk *link) tellDrained() {
	for {
		lk.mu.Lock()
		s := &signal{Kind: signalDrained, Ticket: lk.ticket, Seqs: lk.drained}
		lk.drained = nil
		if len(s.Seqs) == 0 {
			lk.tells = false
			lk.mu.Unlock()
			return
		}
		lk.mu.Unlock()
		if _, err := lk.t.ask(lk.peer, s, drainBound); err != nil {
			lk.t.log.Debug("rdma: a peer does not hear that writes have ended", zap.String("peer", string(lk.peer)), zap.Error(err))
		}
	}
}

// told takes D's word of which grants are alive. A D without lanes revokes without
// a word: what waits to be written again learns it by this. What is under way may have
// arrived since, and a grant is dead then too; so may what was lost, until D says.
func (lk *link) told(rep *reply) {
	lk.grants.told(rep.Next, rep.Live)
	if len(lk.lost) > 0 {
		return
	}
	for seq, w := range lk.bySeq {
		if !lk.grants.alive(seq) && (w.jobs == nil || w.isLost()) {
			lk.fail(w, errRevoked(w))
		}
	}
}

func errRevoked(w *write) error {
	return fmt.Errorf("rdma: transfer %q was revoked: %w", string(w.op.ID), core.ErrNotExpected)
}

// end closes a link for good, and tells D.
func (lk *link) end(cause error, why string) {
	lk.update(func(lk *link) {
		if lk.ended != nil {
			return
		}
		lk.ended, lk.up = cause, false
		lk.lose(cause)
		for _, timer := range []*time.Timer{lk.sleep, lk.looks} {
			if timer != nil {
				timer.Stop()
			}
		}
		lk.t.sayBye(lk.peer, &signal{Kind: signalDismissed, Ticket: lk.ticket, Reason: why})
	})
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
	lk.met = true
	if len(up) > 0 {
		lk.portUp(func(k railKey) bool { return slices.Contains(up, k.remote) })
	}
	lk.wanted = true
}

// portUp ends the pauses of a port's rails, and has lanes made if there is none at it:
// unless all are at rest, when the next write does.
func (lk *link) portUp(at func(railKey) bool) {
	now := time.Now()
	for key, r := range lk.rails {
		if at(key) {
			r.resume(now)
		}
	}
	served := slices.ContainsFunc(lk.lanes, func(l *lane) bool { return at(l.railKey()) })
	lk.wanted = lk.wanted || !served && lk.met && (len(lk.lanes) > 0 || lk.there == nil)
}

// railKey names the pair of ports of P's end.
func (l *lane) railKey() railKey { return railKey{l.port.index, l.remote} }
