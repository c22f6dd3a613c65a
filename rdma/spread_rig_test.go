package rdma

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
	"github.com/kvconn/kvconn/rig/coretest"
)

// spreadWrite is a write of chunks by lanes that take posts and keep them to themselves.
type spreadWrite struct {
	*conn
	t     *testing.T
	op    core.WriteOp
	n     int // chunks in all
	given int // of them
	how   form
	way   *path
	rec   *coretest.Recorder
}

// form is how a write is given its bytes.
type form bool

const (
	byLists form = false
	byPlans form = true
)

// inBothForms runs a test by lists and by plans.
func inBothForms(t *testing.T, f func(t *testing.T, how form)) {
	t.Run("by lists", func(t *testing.T) { f(t, byLists) })
	t.Run("by plans", func(t *testing.T) { f(t, byPlans) })
}

// given is a writePart in this form.
func (how form) given(op core.WriteOp) core.WriteOp {
	if how == byPlans {
		return coretest.Planned(op)
	}
	return op
}

// beginSpread begins a write of so many chunks with none of them.
func beginSpread(t *testing.T, how form, lanes, n int) *spreadWrite {
	t.Helper()
	sp := &spreadWrite{conn: newTestConn(t, 0), t: t, how: how, n: n, way: newPath(1e9)}
	sp.rec = sp.conn.t.sink.(*coretest.Recorder)
	secret := make([]byte, secretSize)
	sp.reconnecting, sp.tells, sp.remote = true, true, &remoteInfo{secret: secret}
	sp.conn.t.cfg.StallTimeout = time.Hour // the test looks
	for range lanes {
		sp.another()
	}
	t.Cleanup(func() {
		sp.conn.t.wg.Wait()
		sp.conn.mu.Lock()
		defer sp.conn.mu.Unlock()
		if sp.looks != nil {
			sp.looks.Stop()
		}
	})
	s := &sp.conn.t.sender
	s.conns[sp.peer] = sp.conn
	bytes := uint64(n) * chunk
	sp.op = core.WriteOp{ID: "t", Peer: sp.peer, Grant: grant{seq: 7, bytes: bytes}.sign(secret, "t"), Bytes: bytes}
	s.write(sp.op)
	return sp
}

// another adds a lane, which is there from now on.
func (sp *spreadWrite) another() {
	sp.t.Helper()
	table := chunkTable(sp.t, sp.n)
	dev := &device{name: "test", limit: writeLimits{maxPieces: 4, maxWrite: maxWrite}}
	dev.memory.Store(&memory{local: table})
	qp, err := verbs.NewNullQP(verbs.Caps{SendDepth: maxChain, Pieces: 4})
	if err != nil {
		sp.t.Fatal(err)
	}
	sp.t.Cleanup(qp.DestroyNull)
	sp.update(func(cn *conn) {
		cn.lastID++
		l := &lane{id: cn.lastID, b: &bundle{t: cn.t, lanes: map[uint32]*lane{}}, port: &localPort{dev: dev, name: "test:1"}, qp: qp,
			dead: make(chan struct{}), conn: cn, path: sp.way, probe: make(chan error, 1), reads: map[*write]int{},
			keys: table, queue: newSendQueue[*job](maxChain, maxFlight, signalEvery)}
		cn.lanes = append(cn.lanes, l)
		cn.on(eventLane)
		cn.again()
	})
}

// write returns the write, or nil when it is over.
func (sp *spreadWrite) write() *write {
	s := &sp.conn.t.sender
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.writes["t"]
}

// give gives so many chunks more.
func (sp *spreadWrite) give(n int) {
	op := sp.op
	op.Pairs = chunks(sp.given, sp.given+n, sp.n)
	op.At = []kv.Extent{{Position: uint64(sp.given) * chunk, Pairs: n}}
	sp.given += n
	sp.conn.t.sender.extend(sp.how.given(op))
}

// complete lets all requests arrive of which a completion will tell.
func (sp *spreadWrite) complete() {
	for sp.step() {
	}
}

// step is complete for what is under way now. It says whether a completion has told of any.
func (sp *spreadWrite) step() (any bool) {
	sp.update(func(cn *conn) {
		for _, l := range slices.Clone(cn.lanes) {
			last := uint64(0)
			for i := range l.queue.n {
				if b := &l.queue.ring[(l.queue.head+i)%len(l.queue.ring)]; b.signaled {
					last = b.last
				}
			}
			if last > 0 {
				cn.took(l, []verbs.Completion{{ID: last}}, time.Now())
				any = true
			}
		}
	})
	return any
}

// lose breaks a lane. It reads until the test closes dead.
func (sp *spreadWrite) lose(i int) *lane {
	l := sp.lanes[i]
	l.qp = &verbs.QP{} // one of no device takes nothing but posts
	l.once.Do(func() {})
	sp.t.Cleanup(func() {
		if !l.isDead() {
			close(l.dead)
		}
	})
	sp.update(func(cn *conn) { cn.breakLane(l, errors.New("test")) })
	return l
}

// receive takes D's word of what has arrived: these stripes.
func (sp *spreadWrite) receive(stripes uint64) {
	sp.t.Helper()
	sp.update(func(cn *conn) {
		if err := cn.arrived(slices.Clone(cn.lost), []uint64{7}, &reply{Arrived: []uint64{stripes}, Next: 8, Live: []uint64{7}}); err != nil {
			sp.t.Error(err)
		}
		cn.again()
	})
}

// rests requires that all was sent that was given, that nobody waits for a completion,
// and that D has not heard of an end.
func (sp *spreadWrite) rests() {
	sp.t.Helper()
	sp.complete()
	sp.conn.mu.Lock()
	defer sp.conn.mu.Unlock()
	for w := range sp.writes {
		for _, j := range w.jobs {
			if j.filled || j.flight > 0 || j.cursor.ready() {
				sp.t.Errorf("stripe %d: mark posted: %v, %d requests under way, more to post: %v", j.index, j.filled, j.flight, j.cursor.ready())
			}
		}
		if w.over || w.flight > 0 {
			sp.t.Errorf("over: %v, %d requests under way", w.over, w.flight)
		}
	}
	for _, l := range sp.lanes {
		if !l.queue.idle() {
			sp.t.Errorf("lane %d waits for %d requests of which nothing tells", l.id, l.queue.requests)
		}
	}
	if len(sp.writes) != 1 {
		sp.t.Errorf("%d writes, want the one that rests: %+v", len(sp.writes), sp.rec.All("written", ""))
	}
}

// sent is what each stripe was given.
func (sp *spreadWrite) sent() (out []uint64) {
	sp.conn.mu.Lock()
	defer sp.conn.mu.Unlock()
	for w := range sp.writes {
		for _, j := range w.jobs {
			n := uint64(0)
			for _, s := range j.cursor.ranges {
				n += s.length
			}
			out = append(out, n)
		}
	}
	return out
}

func (sp *spreadWrite) ends(want error) {
	sp.t.Helper()
	if o := sp.rec.Wait("written", "t", 1); !errors.Is(o.Err, want) || want == nil && o.Stats.Bytes != sp.op.Bytes {
		sp.t.Errorf("it ended with %v and %d bytes, want %v and %d", o.Err, o.Stats.Bytes, want, sp.op.Bytes)
	}
	sp.give(1) // nobody's
	if all := sp.rec.All("written", "t"); len(all) != 1 {
		sp.t.Errorf("%d outcomes are told, want 1", len(all))
	}
}
