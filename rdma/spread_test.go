package rdma

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// chunk is the unit of what these tests write: chunk i of P's memory goes to chunk
// landing(i) of D's, so that none is adjacent on both sides.
const chunk = 64 << 10

func landing(i, of int) int { return i * 7 % of } // of is no multiple of 7

// chunks is that of some, and the table of all.
func chunks(from, to, of int) []kv.Pair {
	var out []kv.Pair
	for i := from; i < to; i++ {
		out = append(out, kv.Pair{SrcOffset: uint64(i) * chunk, DstOffset: uint64(landing(i, of)) * chunk, Length: chunk})
	}
	return out
}

func chunkTable(t *testing.T, n int) *keyTable {
	return mustTable(t, "anywhere", []memRange{{1 << 40, uint64(n) * chunk}}, key(1<<40, uint64(n)*chunk, 1))
}

// TestPartialWrite: lanes that come before the first bytes take part. Many chunks that are
// given at once are spread over all lanes, few go to one lane. The marks come with the
// last bytes.
func TestPartialWrite(t *testing.T) { inBothForms(t, partialWriteIn) }

func partialWriteIn(t *testing.T, how form) {
	sp := beginSpread(t, how, 0, 100)
	sp.give(0)
	sp.another()
	sp.another()
	sp.rests()
	sp.give(40)
	if got := sp.sent(); !slices.Equal(got, []uint64{20 * chunk, 20 * chunk}) {
		t.Fatalf("stripes of %d bytes", got)
	}
	sp.give(3) // before a completion of the others
	if got := sp.sent(); got[0]+got[1] != 43*chunk || min(got[0], got[1]) != 20*chunk {
		t.Errorf("stripes of %d bytes, 3 chunks are not worth two lanes", got)
	}
	sp.rests()
	requests := sp.conn.t.requests.Load()
	sp.give(56)
	sp.rests()
	sp.give(1)
	// Two marks, one with the chunk, and one that stands alone.
	if got := sp.conn.t.requests.Load() - requests; got != 56+2 {
		t.Errorf("%d requests for 56 chunks and an end, want %d", got, 56+2)
	}
	if requests != 1+43 {
		t.Errorf("%d requests for 43 chunks and the word that they come, want 44", requests)
	}
	if sp.write() == nil {
		t.Fatal("it has ended before its marks have arrived")
	}
	sp.complete()
	sp.ends(nil)
}

// TestGivenBeforeLanes: chunks that are given while there is no lane are not lost.
func TestGivenBeforeLanes(t *testing.T) { inBothForms(t, givenBeforeLanesIn) }

func givenBeforeLanesIn(t *testing.T, how form) {
	sp := beginSpread(t, how, 0, 40)
	sp.give(10)
	sp.give(20)
	sp.another()
	if got := sp.sent(); !slices.Equal(got, []uint64{30 * chunk}) {
		t.Fatalf("stripes of %d bytes", got)
	}
	sp.rests()
	sp.give(10)
	sp.complete()
	sp.ends(nil)
}

// TestRestEnds: a write that rests ends at once, whatever ends it.
func TestRestEnds(t *testing.T) { inBothForms(t, restEndsIn) }

func restEndsIn(t *testing.T, how form) {
	for _, c := range []struct {
		name string
		end  func(sp *spreadWrite)
		want error
	}{
		{"stop", func(sp *spreadWrite) { sp.conn.t.sender.stop("t") }, errStopped},
		{"drain", func(sp *spreadWrite) {
			sp.update(func(cn *conn) {
				if pending := cn.drain(&signal{Seqs: []uint64{7}}); len(pending) > 0 {
					sp.t.Errorf("%v are pending, nothing is under way", pending)
				}
			})
		}, core.ErrNotExpected},
		{"dismiss", func(sp *spreadWrite) { sp.conn.t.sender.dismiss(sp.peer) }, core.ErrConnectionLost},
		{"revoked meanwhile", func(sp *spreadWrite) {
			l := sp.lose(0)
			sp.update(func(cn *conn) { _ = cn.arrived([]uint32{l.id}, []uint64{7}, &reply{Arrived: []uint64{0}, Next: 8}) })
		}, core.ErrNotExpected},
	} {
		for _, given := range []int{0, 40} {
			t.Run(fmt.Sprint(c.name, " after ", given), func(t *testing.T) {
				sp := beginSpread(t, how, 2, 100)
				if given > 0 {
					sp.give(given)
				}
				sp.rests()
				if c.name == "dismiss" { // which cuts them
					for _, l := range sp.lanes {
						l.qp = &verbs.QP{}
					}
				}
				if c.end(sp); sp.write() != nil && given == 0 && c.name == "revoked meanwhile" {
					sp.update(func(cn *conn) { cn.grantsReceived(&reply{Next: 8}) }) // nothing of it was lost
				}
				sp.ends(c.want)
			})
		}
	}
}

// TestTooMuch: a write that is given more than it has ends with an error, when what is
// under way has come back.
func TestTooMuch(t *testing.T) { inBothForms(t, tooMuchIn) }

func tooMuchIn(t *testing.T, how form) {
	sp := beginSpread(t, how, 2, 40)
	sp.give(30)
	op := sp.op
	op.Pairs = chunks(0, 11, 40)
	sp.conn.t.sender.extend(how.given(op))
	if sp.write() == nil {
		t.Error("it has ended while its requests read")
	}
	sp.complete()
	if o := sp.rec.Wait("written", "t", 1); o.Err == nil || o.Err.Error() != `rdma: transfer "t" has 2621440 bytes, 2686976 were given to write` {
		t.Errorf("it ended with %v", o.Err)
	}
	op.ID, op.Pairs, op.Bytes = "at once", chunks(0, 11, 40), 10*chunk
	sp.conn.t.sender.write(how.given(op))
	if o := sp.rec.Wait("written", op.ID, 1); o.Err == nil || o.Err.Error() != `rdma: transfer "at once" has 655360 bytes, 720896 were given to write` {
		t.Errorf("a write that begins with more than it has ended with %v", o.Err)
	}
}

// TestPartialByOtherLanes: a lane breaks while the write rests, and in the middle of a
// part. All of that stripe goes by another lane, and the write goes on.
func TestPartialByOtherLanes(t *testing.T) { inBothForms(t, partialByOtherLanesIn) }

func partialByOtherLanesIn(t *testing.T, how form) {
	for _, rests := range []bool{true, false} {
		t.Run(fmt.Sprint("at rest: ", rests), func(t *testing.T) {
			sp := beginSpread(t, how, 2, 100)
			sp.give(40)
			if rests {
				sp.rests()
			}
			l := sp.lose(1)
			before, requests := sp.sent(), sp.conn.t.requests.Load()
			sp.give(20) // D has not said what has arrived
			if got := sp.sent(); got[0] != before[0]+20*chunk || got[1] != before[1] {
				t.Errorf("stripes of %d bytes, then of %d: the second has no lane", before, got)
			}
			sp.receive(0)
			sp.complete()
			// The lane that broke may have been the one that told D that bytes come.
			if got, want := sp.conn.t.requests.Load()-requests, 1+20+before[1]/chunk; got != want {
				t.Errorf("%d requests for the word that bytes come, 20 chunks, and the stripe that was lost: want %d", got, want)
			}
			sp.rests()
			sp.give(40)
			sp.complete()
			if sp.write() != nil != !rests {
				t.Errorf("outcome: %v, the lane that broke reads: %v", sp.rec.All("written", "t"), !rests)
			}
			close(l.dead)
			sp.ends(nil)
		})
	}
}

// TestPostThatFailed: if a post fails, the mark in it may have arrived all the same. D
// has the stripe then, and may have ended its transfer: nothing of it is written again.
func TestPostThatFailed(t *testing.T) {
	sp := beginSpread(t, byLists, 1, 10)
	sp.lanes[0].qp.DestroyNull()
	sp.give(10)
	if sp.write() == nil {
		t.Fatal("it has ended, and nobody knows whether it has arrived")
	}
	sp.receive(1)
	sp.ends(nil)
}

// TestArrivedTooEarly: if D says that a stripe has arrived whose mark was not sent, the
// write does not end.
func TestArrivedTooEarly(t *testing.T) {
	sp := beginSpread(t, byLists, 2, 100)
	sp.give(40)
	sp.rests()
	sp.lose(0)
	requests := sp.conn.t.requests.Load()
	sp.receive(3)
	sp.rests()
	sp.give(60)
	sp.complete()
	if got, want := sp.conn.t.requests.Load()-requests, uint64(1+20+60); got != want {
		t.Errorf("%d requests for the stripe that was lost and the rest, want %d", got, want)
	}
	sp.ends(nil)
}

// TestQueuedOnce: chunks that are given while their lane is full wait there once, also
// when that lane breaks.
func TestQueuedOnce(t *testing.T) { inBothForms(t, queuedOnceIn) }

func queuedOnceIn(t *testing.T, how form) {
	sp := beginSpread(t, how, 1, 300)
	sp.give(200) // more than its lane takes at a time
	sp.give(20)
	if n := len(sp.lanes[0].jobs); n != 1 {
		t.Errorf("the stripe stands %d times in its lane's list", n)
	}
	l := sp.lose(0)
	sp.give(20)
	sp.receive(0)
	sp.another()
	if n := len(sp.lanes[0].jobs); n != 1 {
		t.Errorf("the stripe stands %d times in the list of the lane that it was given to", n)
	}
	close(l.dead)
	sp.rests()
	if n := len(sp.lanes[0].jobs); n != 0 {
		t.Errorf("%d stripes in the list of a lane that has all posted", n)
	}
	sp.give(60)
	sp.complete()
	sp.ends(nil)
}

// TestBreaksAtRest: lanes that break one after the other end a write only if they carry
// nothing in between.
func TestBreaksAtRest(t *testing.T) { inBothForms(t, breaksAtRestIn) }

func breaksAtRestIn(t *testing.T, how form) {
	for _, rests := range []bool{true, false} {
		t.Run(fmt.Sprint("at rest: ", rests), func(t *testing.T) {
			sp := beginSpread(t, how, 1, 100)
			sp.give(40)
			for range maxBreaks + 1 {
				if rests {
					sp.rests()
				}
				close(sp.lose(0).dead)
				sp.receive(0)
				sp.another()
			}
			if !rests {
				sp.ends(core.ErrConnectionLost)
				return
			}
			sp.rests()
			sp.give(60)
			sp.complete()
			sp.ends(nil)
		})
	}
}

// TestIdleIsNoStall: while a write rests nobody looks whether its lanes complete
// something.
func TestIdleIsNoStall(t *testing.T) {
	sp := beginSpread(t, byLists, 2, 100)
	sp.give(40)
	look := func() {
		sp.update(func(cn *conn) {
			if cn.looks != nil {
				cn.looks.Stop()
			}
			cn.look()
		})
	}
	look()
	sp.rests()
	for range 2 * stallLooks {
		look()
	}
	if sp.looks != nil || len(sp.lanes) != 2 {
		t.Errorf("somebody looks: %v; %d lanes are left of 2", sp.looks != nil, len(sp.lanes))
	}
	sp.give(60)
	if sp.looks == nil {
		t.Error("nobody looks though something is under way")
	}
	sp.complete()
	sp.ends(nil)
}

// TestDealsByLoad: a few chunks go by the lane that has least to do.
func TestDealsByLoad(t *testing.T) { inBothForms(t, dealsByLoadIn) }

func dealsByLoadIn(t *testing.T, how form) {
	sp := beginSpread(t, how, 4, 100+1)
	sp.give(40)
	sp.rests()
	for range 4 {
		before := sp.sent()
		sp.give(2)
		took := 0
		for i, n := range sp.sent() {
			if n > before[i] {
				took++
			}
		}
		if took != 1 {
			t.Errorf("%d stripes take 2 chunks", took)
		}
	}
	for i, n := range sp.sent() {
		if n != 12*chunk {
			t.Errorf("stripe %d has %d chunks, the small ones are not spread", i, n/chunk)
		}
	}
}
