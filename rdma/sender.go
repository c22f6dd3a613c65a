package rdma

import (
	"bytes"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// sender is P's half: the connections to its Ds, and the transfers that it writes.
type sender struct {
	t *Transport

	mu     sync.Mutex // never held with a connection's
	closed bool
	conns  map[core.AgentID]*conn
	writes map[core.TransferID]*write
	untold int           // writes whose outcome is not told
	told   chan struct{} // has room for one message, which says that untold has shrunk
}

// write is a transfer that is being written. Guarded by its connection.
type write struct {
	op    core.WriteOp // Pairs are those that were given before the write began
	plans []kv.Plan    // the same
	conn  *conn
	bytes uint64 // in all
	given uint64 // bytes that were given so far
	runs  int    // runs on this side that were given so far

	grant   grant
	known   bool // the grant was read
	began   time.Time
	jobs    []*job // its stripes, once it has begun
	told    bool   // D knows, by a lane that works, that bytes may come
	left    int    // jobs that have not ended
	flight  int    // requests under way
	reads   int    // requests of lanes that broke, which may still read its blocks
	cause   error  // why it fails; nil: it goes on
	over    bool   // it has ended, and is in no list
	drained bool   // D waits to hear that no byte is on its way
	waits   bool   // it came when the memory was not registered, so it is for the new memory
}

// job is a stripe of a write on its lane.
type job struct {
	w      *write
	cursor cursor
	index  int
	lane   *lane // nil: it waits for a lane
	queued bool  // it is in its lane's list
	lost   bool  // its lane broke: D must say whether the stripe has arrived
	filled bool  // all its requests are posted, the mark among them
	flight int
	breaks int // how many of its lanes broke since all bytes that it was given had last arrived
	denied int // how often the peer's device refused it since then
	done   bool
}

var errStopped = errors.New("rdma: the write was stopped")

func (s *sender) init(t *Transport) {
	s.t = t
	s.told = make(chan struct{}, 1)
	s.conns, s.writes = map[core.AgentID]*conn{}, map[core.TransferID]*write{}
}

func (s *sender) conn(peer core.AgentID) *conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conns[peer]
}

func (s *sender) admit(peer core.AgentID) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errClosed
	}
	cn := s.conns[peer]
	if cn == nil {
		cn = newConn(s.t, peer)
		rand.Read(cn.ticket)
		s.conns[peer] = cn
	}
	return bytes.Clone(cn.ticket), nil
}

func (s *sender) dismiss(peer core.AgentID) {
	s.mu.Lock()
	cn := s.conns[peer]
	delete(s.conns, peer)
	s.mu.Unlock()
	if cn != nil {
		cn.end(fmt.Errorf("rdma: decode agent %s was dismissed: %w", peer, core.ErrConnectionLost), "it was dismissed")
	}
}

// write implements core.Transport.
func (s *sender) write(op core.WriteOp) {
	g := writePartOf(&op)
	w := &write{op: op, bytes: op.Total(), given: g.bytes, runs: g.runs}
	w.op.Pairs = slices.Clip(op.Pairs) // more may follow
	if op.Plan != nil {
		w.plans = []kv.Plan{op.Plan}
	}
	var err error
	s.mu.Lock()
	l := s.conns[op.Peer]
	switch {
	case s.closed:
		err = errClosed
	case l == nil:
		err = fmt.Errorf("rdma: decode agent %s is not admitted, it must say hello: %w", op.Peer, core.ErrConnectionLost)
	case s.writes[op.ID] != nil:
		err = fmt.Errorf("rdma: transfer %q is being written already", op.ID.Name())
	case w.given > w.bytes:
		err = errTooMuch(w, w.given)
	default:
		w.conn = l
		s.writes[op.ID] = w
	}
	s.untold++
	s.mu.Unlock()
	if err != nil {
		s.tell(op.ID, core.TransferStats{}, err)
		return
	}
	l.add(w)
}

// extend implements core.Transport.
func (s *sender) extend(op core.WriteOp) {
	s.mu.Lock()
	w := s.writes[op.ID]
	s.mu.Unlock()
	if w == nil {
		return
	}
	g := writePartOf(&op)
	err := s.t.forgotten()
	w.conn.update(func(cn *conn) {
		if err != nil && !w.waits {
			cn.fail(w, err)
			return
		}
		cn.give(w, &g)
	})
}

func errTooMuch(w *write, given uint64) error {
	return fmt.Errorf("rdma: transfer %q has %d bytes, %d were given to write", w.op.ID.Name(), w.bytes, given)
}

// tell tells an outcome. Close waits for it.
func (s *sender) tell(id core.TransferID, st core.TransferStats, err error) {
	s.t.tell(func(to core.Sink) { to.Written(id, st, err) })
	s.mu.Lock()
	defer s.mu.Unlock()
	s.untold--
	select {
	case s.told <- struct{}{}:
	default:
	}
}

// ToldBound is how long Close waits for outcomes. A write has no outcome before its
// queue pair is destroyed, for which the kernel may take seconds.
const ToldBound = 10 * time.Second

// allTold waits until no outcome is left to tell.
func (s *sender) allTold() {
	late := time.NewTimer(ToldBound)
	defer late.Stop()
	for {
		s.mu.Lock()
		n := s.untold
		s.mu.Unlock()
		if n == 0 {
			return
		}
		select {
		case <-s.told:
		case <-late.C:
			s.t.log.Error("rdma: the transport closes, and writes have not told their outcome", zap.Int("writes", n))
			return
		}
	}
}

// stopGrace is how long requests may go on reading the blocks of a write that was
// stopped. Then their lanes are cut.
const stopGrace = 500 * time.Millisecond

// stop implements core.Transport.
func (s *sender) stop(id core.TransferID) {
	s.mu.Lock()
	w := s.writes[id]
	s.mu.Unlock()
	if w == nil {
		return
	}
	over := false
	w.conn.update(func(l *conn) {
		l.fail(w, errStopped)
		over = w.over
	})
	if over {
		return
	}
	s.t.goRun("rdma stop", func() {
		if s.t.pause(stopGrace) {
			w.conn.update(func(l *conn) {
				for _, j := range w.jobs {
					if j.flight > 0 && !w.over {
						l.breakLane(j.lane, fmt.Errorf("rdma: a write that was stopped has not ended within %v", stopGrace))
					}
				}
			})
		}
	})
}

// forget allows the id to be used again, just before the outcome is told.
func (s *sender) forget(w *write) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.writes[w.op.ID] == w {
		delete(s.writes, w.op.ID)
	}
}

// outcome tells how a write ended.
func (s *sender) outcome(w *write) {
	s.forget(w)
	st := core.TransferStats{Segments: w.runs}
	if w.cause == nil {
		st.Bytes = w.bytes
		st.Nanos = time.Since(w.began).Nanoseconds()
	}
	s.tell(w.op.ID, st, w.cause)
}

// signalled answers D.
func (s *sender) signalled(from core.AgentID, m *signal) (*reply, error) {
	l := s.conn(from)
	if l == nil || subtle.ConstantTimeCompare(l.ticket, m.Ticket) != 1 {
		return nil, refusef("prefill agent %s has admitted no agent %s with that ticket", s.t.id, from)
	}
	rep := &reply{}
	switch m.Kind {
	case signalHello:
		l.update(func(l *conn) { l.helloReceived(m.Lanes, m.Up) })
	case signalDrain:
		l.update(func(l *conn) { rep.Pending = l.drain(m) })
	case signalBye:
		l.update(func(l *conn) {
			if l.remote != nil && !bytes.Equal(l.remote.secret, m.Secret) {
				return // the signal is late, and D has connected anew since
			}
			defer func() { l.confirmed(l.lost) }() // D has ended all its lanes
			l.disconnect(fmt.Errorf("rdma: decode agent %s has ended the connection: %s: %w", from, m.Reason, core.ErrConnectionLost))
		})
	}
	return rep, nil
}

func (s *sender) portDown(p *localPort, cause error) {
	for _, cn := range s.all() {
		cn.update(func(cn *conn) {
			for _, l := range slices.Clone(cn.lanes) {
				if l.port == p {
					cn.breakLane(l, cause)
				}
			}
		})
	}
}

// portUp makes all connections try a port that has become active.
func (s *sender) portUp(p *localPort) {
	for _, cn := range s.all() {
		cn.update(func(cn *conn) {
			cn.portUp(func(k pathKey) bool { return k.local == p.index })
		})
	}
}

func (s *sender) all() []*conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.conns))
}

func (s *sender) lanes() (n int) {
	for _, cn := range s.all() {
		cn.mu.Lock()
		n += len(cn.lanes)
		cn.mu.Unlock()
	}
	return n
}

func (s *sender) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	for _, l := range s.all() {
		l.end(errClosed, "it was closed")
	}
	s.allTold()
}

// sourceRuns counts the contiguous runs of a plan on this side.
func sourceRuns(pairs []kv.Pair) int {
	n := 0
	for i := range pairs {
		p := &pairs[i]
		if i == 0 || p.SrcRegion != pairs[i-1].SrcRegion || p.SrcOffset != pairs[i-1].SrcOffset+pairs[i-1].Length {
			n++
		}
	}
	return n
}

// completed handles the completions of a lane's requests.
func (cn *conn) completed(l *lane, list []verbs.Completion) {
	cn.update(func(cn *conn) { cn.took(l, list, time.Now()) })
}

// took is completed for callers that hold cn.mu.
func (cn *conn) took(l *lane, list []verbs.Completion, now time.Time) {
	for i := range list {
		c := &list[i]
		if c.Status != verbs.Success && !l.broken {
			err := l.failure(c)
			switch {
			case l.large && !l.proven:
				err = fmt.Errorf("bytes get into host memory and not from a GPU's memory to one: %w", err)
			case l.reached && !l.proven:
				err = fmt.Errorf("packets without bytes get through and %d bytes do not: is the MTU the same on the whole path (rdma_mtu)? %w", scratchBytes, err)
			}
			l.probed(err)
			end := cn.denied(l, c)
			cn.breakLane(l, err)
			end()
		}
		switch {
		case l.broken:
			if c.ID == l.queue.last() {
				cn.quiet(l)
			}
			continue
		case c.Status != verbs.Success: // the lane broke before it was in use
			continue
		case c.ID == probeID:
			l.reached = true
			continue
		case c.ID == bigProbeID:
			l.large = true
			if !l.tried {
				l.probed(nil)
			}
			continue
		case c.ID == trialID:
			l.probed(nil)
			continue
		}
		l.looks = 0
		for {
			b, ok := l.queue.completed(c.ID)
			if !ok {
				break
			}
			l.path.end(now, b.Bytes)
			cn.landed(b.Owner, b.Requests)
		}
	}
	cn.pump(l)
}

func (l *lane) probed(err error) {
	select {
	case l.probe <- err:
	default:
	}
}
