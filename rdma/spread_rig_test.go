package rdma

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/coretest"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// growing is a write of chunks by lanes that take posts and keep them to themselves.
type growing struct {
	*conn
	t     *testing.T
	op    core.WriteOp
	n     int // chunks in all
	given int // of them
	way   *path
	rec   *coretest.Recorder
}

// grow begins a write of so many chunks with none of them.
func grow(t *testing.T, lanes, n int) *growing {
	t.Helper()
	g := &growing{conn: newTestConn(t, 0), t: t, n: n, way: newPath(1e9)}
	g.rec = g.conn.t.sink.(*coretest.Recorder)
	secret := make([]byte, secretSize)
	g.mends, g.tells, g.there = true, true, &far{secret: secret}
	g.conn.t.cfg.StallTimeout = time.Hour // the test looks
	for range lanes {
		g.another()
	}
	t.Cleanup(func() {
		g.conn.t.wg.Wait()
		g.conn.mu.Lock()
		defer g.conn.mu.Unlock()
		if g.looks != nil {
			g.looks.Stop()
		}
	})
	s := &g.conn.t.sender
	s.conns[g.peer] = g.conn
	bytes := uint64(n) * chunk
	g.op = core.WriteOp{ID: "t", Peer: g.peer, Grant: grant{seq: 7, bytes: bytes}.sign(secret, "t"), Bytes: bytes}
	s.write(g.op)
	return g
}

// another is a lane that is there from now on.
func (g *growing) another() {
	g.t.Helper()
	table := chunkTable(g.t, g.n)
	dev := &device{name: "test", limit: writeLimits{maxPieces: 4, maxWrite: maxWrite}}
	dev.memory.Store(&memory{local: table})
	qp, err := verbs.NewNullQP(verbs.Caps{SendDepth: maxChain, Pieces: 4})
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(qp.DestroyNull)
	g.update(func(cn *conn) {
		cn.lastID++
		l := &lane{id: cn.lastID, b: &bundle{t: cn.t, lanes: map[uint32]*lane{}}, port: &localPort{dev: dev, name: "test:1"}, qp: qp,
			dead: make(chan struct{}), conn: cn, path: g.way, probe: make(chan error, 1), reads: map[*write]int{},
			keys: table, queue: newSendQueue[*job](maxChain, maxFlight, signalEvery)}
		cn.lanes = append(cn.lanes, l)
		cn.on(eventLane)
		cn.again()
	})
}

// write is nil when it is over.
func (g *growing) write() *write {
	s := &g.conn.t.sender
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.writes["t"]
}

// give gives so many chunks more.
func (g *growing) give(n int) {
	op := g.op
	op.Pairs = chunks(g.given, g.given+n, g.n)
	op.At = []core.Extent{{Position: uint64(g.given) * chunk, Pairs: n}}
	g.given += n
	g.conn.t.sender.extend(op)
}

// complete has all arrive of which a completion will tell.
func (g *growing) complete() {
	g.update(func(cn *conn) {
		for _, l := range slices.Clone(cn.lanes) {
			for {
				last := uint64(0)
				for i := range l.queue.n {
					if b := &l.queue.ring[(l.queue.head+i)%len(l.queue.ring)]; b.signaled {
						last = b.last
					}
				}
				if last == 0 {
					break
				}
				cn.took(l, []verbs.Completion{{ID: last}}, time.Now())
			}
		}
	})
}

// lose breaks a lane. It reads until the test closes dead.
func (g *growing) lose(i int) *lane {
	l := g.lanes[i]
	l.qp = &verbs.QP{} // one of no device takes nothing but posts
	l.once.Do(func() {})
	g.t.Cleanup(func() {
		if !l.isDead() {
			close(l.dead)
		}
	})
	g.update(func(cn *conn) { cn.breakLane(l, errors.New("test")) })
	return l
}

// hear takes D's word of what has arrived: these stripes.
func (g *growing) hear(stripes uint64) {
	g.t.Helper()
	g.update(func(cn *conn) {
		if err := cn.arrived(slices.Clone(cn.lost), []uint64{7}, &reply{Arrived: []uint64{stripes}, Next: 8, Live: []uint64{7}}); err != nil {
			g.t.Error(err)
		}
		cn.again()
	})
}

// rests requires that all was sent that was given, that nobody waits for a completion,
// and that D has not heard of an end.
func (g *growing) rests() {
	g.t.Helper()
	g.complete()
	g.conn.mu.Lock()
	defer g.conn.mu.Unlock()
	for w := range g.writes {
		for _, j := range w.jobs {
			if j.filled || j.flight > 0 || j.cursor.ready() {
				g.t.Errorf("stripe %d: mark posted: %v, %d requests under way, more to post: %v", j.index, j.filled, j.flight, j.cursor.ready())
			}
		}
		if w.over || w.flight > 0 {
			g.t.Errorf("over: %v, %d requests under way", w.over, w.flight)
		}
	}
	for _, l := range g.lanes {
		if !l.queue.idle() {
			g.t.Errorf("lane %d waits for %d requests of which nothing tells", l.id, l.queue.requests)
		}
	}
	if len(g.writes) != 1 {
		g.t.Errorf("%d writes, want the one that rests: %+v", len(g.writes), g.rec.All("written", ""))
	}
}

// sent is what each stripe was given.
func (g *growing) sent() (out []uint64) {
	g.conn.mu.Lock()
	defer g.conn.mu.Unlock()
	for w := range g.writes {
		for _, j := range w.jobs {
			n := uint64(0)
			for _, s := range j.cursor.given {
				n += s.length
			}
			out = append(out, n)
		}
	}
	return out
}

func (g *growing) ends(want error) {
	g.t.Helper()
	if o := g.rec.Wait("written", "t", 1); !errors.Is(o.Err, want) || want == nil && o.Stats.Bytes != g.op.Bytes {
		g.t.Errorf("it ended with %v and %d bytes, want %v and %d", o.Err, o.Stats.Bytes, want, g.op.Bytes)
	}
	g.give(1) // nobody's
	if all := g.rec.All("written", "t"); len(all) != 1 {
		g.t.Errorf("%d outcomes are told, want 1", len(all))
	}
}
