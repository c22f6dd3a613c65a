package rdma

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kvconn/kvconn/core"
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
