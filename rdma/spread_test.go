package rdma

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/coretest"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// chunk is the unit of what these tests write: chunk i of P's memory goes to chunk
// landing(i) of D's, so that none is adjacent on both sides.
const chunk = 64 << 10

func landing(i, of int) int { return i * 7 % of } // of is no multiple of 7

// chunks is that of some, and the table of all.
func chunks(from, to, of int) []core.Pair {
	var out []core.Pair
	for i := from; i < to; i++ {
		out = append(out, core.Pair{SrcOffset: uint64(i) * chunk, DstOffset: uint64(landing(i, of)) * chunk, Length: chunk})
	}
	return out
}

func chunkTable(t *testing.T, n int) *keyTable {
	return mustTable(t, "anywhere", []memRange{{1 << 40, uint64(n) * chunk}}, key(1<<40, uint64(n)*chunk, 1))
}

// Whatever is given when, and whatever lanes break: each stripe's mark follows all of its
// bytes and comes when all stripes have been given all, and each byte is in one stripe.
func TestDealRandom(t *testing.T) {
	rnd := newRand(t)
	for range 50 {
		n := 100 + 7*rnd.IntN(50) + 1
		table := chunkTable(t, n)
		w := &write{bytes: uint64(n) * chunk}
		jobs := 1 + rnd.IntN(6)
		written := make([][]int, jobs) // of each stripe: how often each page
		marked := make([]bool, jobs)
		for i := range jobs {
			w.jobs = append(w.jobs, &job{w: w, index: i, cursor: cursor{imm: uint32(i)}})
			written[i] = make([]int, n*chunk/cutAlign)
		}
		fill := func(i int) {
			c := &w.jobs[i].cursor
			writes, pieces := make([]verbs.Write, 1+rnd.IntN(maxChain)), make([]verbs.SGE, 64)
			nw, np, _, done, err := c.fill(writes, pieces, table, table, writeLimits{4, maxWrite, 1 + uint64(rnd.IntN(4<<20))})
			if err != nil {
				t.Fatal(err)
			}
			used := 0
			for k := range writes[:nw] {
				at := writes[k].RemoteAddr - 1<<40
				for _, p := range pieces[used:][:writes[k].Pieces] {
					for from := p.Addr - 1<<40; from < p.Addr-1<<40+uint64(p.Length); from, at = from+cutAlign, at+cutAlign {
						if want := uint64(landing(int(from/chunk), n))*chunk + from%chunk; at != want {
							t.Fatalf("byte %d is written to %d, want %d", from, at, want)
						}
						written[i][from/cutAlign]++
					}
				}
				used += int(writes[k].Pieces)
				if marks := writes[k].Flags&verbs.WithImm != 0; marks != (done && k == nw-1) || marks && writes[k].Imm != uint32(i) {
					t.Fatalf("write %d of %d, done %v: %+v", k, nw, done, writes[k])
				}
			}
			if used != np || done && w.given < w.bytes {
				t.Fatalf("%d pieces of %d; done %v with %d of %d bytes given", used, np, done, w.given, w.bytes)
			}
			marked[i] = marked[i] || done
		}
		for given := 0; given < n; {
			switch i := rnd.IntN(jobs); rnd.IntN(6) {
			case 0, 1:
				to := min(given+1+rnd.IntN(60), n)
				weights := make([]float64, jobs)
				for k := range weights {
					weights[k] = float64(rnd.IntN(3))
				}
				w.given += uint64(to-given) * chunk
				w.deal(chunks(given, to, n), weights)
				given = to
			case 2:
				w.jobs[i].cursor.rewind()
				clear(written[i])
				marked[i] = false
			default:
				if w.jobs[i].cursor.ready() {
					fill(i)
				}
			}
		}
		for i := range jobs {
			for w.jobs[i].cursor.ready() {
				fill(i)
			}
		}
		for page := range written[0] {
			times := 0
			for i := range written {
				times += written[i][page]
			}
			if times != 1 {
				t.Fatalf("page %d is written %d times", page, times)
			}
		}
		if slices.Contains(marked, false) {
			t.Fatalf("stripes with a mark: %v", marked)
		}
	}
}

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

// TestGrows: lanes that come before the first bytes take part; what is given at once is
// spread over them, what is small goes to one; the marks come with the last.
func TestGrows(t *testing.T) {
	g := grow(t, 0, 100)
	g.give(0)
	g.another()
	g.another()
	g.rests()
	g.give(40)
	if got := g.sent(); !slices.Equal(got, []uint64{20 * chunk, 20 * chunk}) {
		t.Fatalf("stripes of %d bytes", got)
	}
	g.give(3) // before a completion of the others
	if got := g.sent(); got[0]+got[1] != 43*chunk || min(got[0], got[1]) != 20*chunk {
		t.Errorf("stripes of %d bytes, 3 chunks are not worth two lanes", got)
	}
	g.rests()
	requests := g.conn.t.requests.Load()
	g.give(56)
	g.rests()
	g.give(1)
	// Two marks, one with the chunk, and one that stands alone.
	if got := g.conn.t.requests.Load() - requests; got != 56+2 {
		t.Errorf("%d requests for 56 chunks and an end, want %d", got, 56+2)
	}
	if requests != 1+43 {
		t.Errorf("%d requests for 43 chunks and the word that they come, want 44", requests)
	}
	if g.write() == nil {
		t.Fatal("it has ended before its marks have arrived")
	}
	g.complete()
	g.ends(nil)
}

// TestGivenBeforeLanes: what is given while there is no lane is not lost.
func TestGivenBeforeLanes(t *testing.T) {
	g := grow(t, 0, 40)
	g.give(10)
	g.give(20)
	g.another()
	if got := g.sent(); !slices.Equal(got, []uint64{30 * chunk}) {
		t.Fatalf("stripes of %d bytes", got)
	}
	g.rests()
	g.give(10)
	g.complete()
	g.ends(nil)
}

// TestRestEnds: what ends a write that rests ends it at once.
func TestRestEnds(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(g *growing)
		want error
	}{
		{"stop", func(g *growing) { g.conn.t.sender.stop("t") }, errStopped},
		{"drain", func(g *growing) {
			g.update(func(cn *conn) {
				if pending := cn.drain(&signal{Seqs: []uint64{7}}); len(pending) > 0 {
					g.t.Errorf("%v are pending, nothing is under way", pending)
				}
			})
		}, core.ErrNotExpected},
		{"dismiss", func(g *growing) { g.conn.t.sender.dismiss(g.peer) }, core.ErrConnectionLost},
		{"revoked meanwhile", func(g *growing) {
			l := g.lose(0)
			g.update(func(cn *conn) { _ = cn.arrived([]uint32{l.id}, []uint64{7}, &reply{Arrived: []uint64{0}, Next: 8}) })
		}, core.ErrNotExpected},
	} {
		for _, given := range []int{0, 40} {
			t.Run(fmt.Sprint(c.name, " after ", given), func(t *testing.T) {
				g := grow(t, 2, 100)
				if given > 0 {
					g.give(given)
				}
				g.rests()
				if c.name == "dismiss" { // which cuts them
					for _, l := range g.lanes {
						l.qp = &verbs.QP{}
					}
				}
				if c.end(g); g.write() != nil && given == 0 && c.name == "revoked meanwhile" {
					g.update(func(cn *conn) { cn.told(&reply{Next: 8}) }) // nothing of it was lost
				}
				g.ends(c.want)
			})
		}
	}
}

// TestTooMuch: a write that is given more than it has ends with an error, when what is
// under way has come back.
func TestTooMuch(t *testing.T) {
	g := grow(t, 2, 40)
	g.give(30)
	op := g.op
	op.Pairs = chunks(0, 11, 40)
	g.conn.t.sender.extend(op)
	if g.write() == nil {
		t.Error("it has ended while its requests read")
	}
	g.complete()
	if o := g.rec.Wait("written", "t", 1); o.Err == nil || o.Err.Error() != `rdma: transfer "t" has 2621440 bytes, 2686976 were given to write` {
		t.Errorf("it ended with %v", o.Err)
	}
	op.ID, op.Pairs, op.Bytes = "at once", chunks(0, 11, 40), 10*chunk
	g.conn.t.sender.write(op)
	if o := g.rec.Wait("written", op.ID, 1); o.Err == nil || o.Err.Error() != `rdma: transfer "at once" has 655360 bytes, 720896 were given to write` {
		t.Errorf("a write that begins with more than it has ended with %v", o.Err)
	}
}

// TestGrowsByOtherLanes: a lane breaks while the write rests, and in the middle of what
// it is given. All of that stripe goes by another, and the write goes on.
func TestGrowsByOtherLanes(t *testing.T) {
	for _, rests := range []bool{true, false} {
		t.Run(fmt.Sprint("at rest: ", rests), func(t *testing.T) {
			g := grow(t, 2, 100)
			g.give(40)
			if rests {
				g.rests()
			}
			l := g.lose(1)
			before, requests := g.sent(), g.conn.t.requests.Load()
			g.give(20) // D has not said what has arrived
			if got := g.sent(); got[0] != before[0]+20*chunk || got[1] != before[1] {
				t.Errorf("stripes of %d bytes, then of %d: the second has no lane", before, got)
			}
			g.hear(0)
			g.complete()
			// The lane that broke may have been the one that told D that bytes come.
			if got, want := g.conn.t.requests.Load()-requests, 1+20+before[1]/chunk; got != want {
				t.Errorf("%d requests for the word that bytes come, 20 chunks, and the stripe that was lost: want %d", got, want)
			}
			g.rests()
			g.give(40)
			g.complete()
			if g.write() != nil != !rests {
				t.Errorf("outcome: %v, the lane that broke reads: %v", g.rec.All("written", "t"), !rests)
			}
			close(l.dead)
			g.ends(nil)
		})
	}
}

// TestPostThatFailed: of what a post gave back with an error the mark may have arrived. D
// has the stripe then, and may have ended its transfer: nothing of it is written again.
func TestPostThatFailed(t *testing.T) {
	g := grow(t, 1, 10)
	g.lanes[0].qp.DestroyNull()
	g.give(10)
	if g.write() == nil {
		t.Fatal("it has ended, and nobody knows whether it has arrived")
	}
	g.hear(1)
	g.ends(nil)
}

// TestArrivedTooEarly: a D that says of a stripe that it has arrived whose mark was not
// sent does not end the write.
func TestArrivedTooEarly(t *testing.T) {
	g := grow(t, 2, 100)
	g.give(40)
	g.rests()
	g.lose(0)
	requests := g.conn.t.requests.Load()
	g.hear(3)
	g.rests()
	g.give(60)
	g.complete()
	if got, want := g.conn.t.requests.Load()-requests, uint64(1+20+60); got != want {
		t.Errorf("%d requests for the stripe that was lost and the rest, want %d", got, want)
	}
	g.ends(nil)
}

// TestQueuedOnce: what is given while its lane is full waits there once, also when that
// lane breaks.
func TestQueuedOnce(t *testing.T) {
	g := grow(t, 1, 300)
	g.give(200) // more than its lane takes at a time
	g.give(20)
	if n := len(g.lanes[0].jobs); n != 1 {
		t.Errorf("the stripe stands %d times in its lane's list", n)
	}
	l := g.lose(0)
	g.give(20)
	g.hear(0)
	g.another()
	if n := len(g.lanes[0].jobs); n != 1 {
		t.Errorf("the stripe stands %d times in the list of the lane that it was given to", n)
	}
	close(l.dead)
	g.rests()
	if n := len(g.lanes[0].jobs); n != 0 {
		t.Errorf("%d stripes in the list of a lane that has all posted", n)
	}
	g.give(60)
	g.complete()
	g.ends(nil)
}

// TestBreaksAtRest: lanes that break one after the other end a write only if they carry
// nothing in between.
func TestBreaksAtRest(t *testing.T) {
	for _, rests := range []bool{true, false} {
		t.Run(fmt.Sprint("at rest: ", rests), func(t *testing.T) {
			g := grow(t, 1, 100)
			g.give(40)
			for range maxBreaks + 1 {
				if rests {
					g.rests()
				}
				close(g.lose(0).dead)
				g.hear(0)
				g.another()
			}
			if !rests {
				g.ends(core.ErrConnectionLost)
				return
			}
			g.rests()
			g.give(60)
			g.complete()
			g.ends(nil)
		})
	}
}

// TestRestIsNoStall: while a write rests nobody looks whether its lanes complete
// something.
func TestRestIsNoStall(t *testing.T) {
	g := grow(t, 2, 100)
	g.give(40)
	look := func() {
		g.update(func(cn *conn) {
			if cn.looks != nil {
				cn.looks.Stop()
			}
			cn.look()
		})
	}
	look()
	g.rests()
	for range 2 * stallLooks {
		look()
	}
	if g.looks != nil || len(g.lanes) != 2 {
		t.Errorf("somebody looks: %v; %d lanes are left of 2", g.looks != nil, len(g.lanes))
	}
	g.give(60)
	if g.looks == nil {
		t.Error("nobody looks though something is under way")
	}
	g.complete()
	g.ends(nil)
}

// TestDealsByLoad: what is small goes by the lane that has least to do.
func TestDealsByLoad(t *testing.T) {
	g := grow(t, 4, 100+1)
	g.give(40)
	g.rests()
	for range 4 {
		before := g.sent()
		g.give(2)
		took := 0
		for i, n := range g.sent() {
			if n > before[i] {
				took++
			}
		}
		if took != 1 {
			t.Errorf("%d stripes take 2 chunks", took)
		}
	}
	for i, n := range g.sent() {
		if n != 12*chunk {
			t.Errorf("stripe %d has %d chunks, the small ones are not spread", i, n/chunk)
		}
	}
}
