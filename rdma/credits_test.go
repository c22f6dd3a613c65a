package rdma

import (
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/kvconn/kvconn/rdma/internal/verbs"
	"github.com/kvconn/kvconn/rig/seed"
)

// chainOf makes writes of one piece each.
func chainOf(sizes ...uint32) ([]verbs.Write, []verbs.SGE) {
	writes, pieces := make([]verbs.Write, len(sizes)), make([]verbs.SGE, len(sizes))
	for i, n := range sizes {
		writes[i] = verbs.Write{First: uint32(i), Pieces: 1}
		pieces[i].Length = n
	}
	return writes, pieces
}

func same(n int, size uint32) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = size
	}
	return out
}

func TestSendQueueSignals(t *testing.T) {
	type post struct {
		sizes []uint32
		end   bool
		want  []uint64 // IDs that are signalled
	}
	for _, c := range []struct {
		name  string
		depth int
		bytes uint64
		every int
		posts []post
	}{
		{"alone: the last", 64, 1 << 20, 16, []post{{same(3, 1), false, []uint64{3}}}},
		{"then each 16th after it", 64, 1 << 20, 16, []post{{same(3, 1), false, []uint64{3}}, {same(40, 1), false, []uint64{19, 35}}}},
		{"the end of a stripe", 64, 1 << 20, 16, []post{{same(3, 1), true, []uint64{3}}, {same(2, 1), true, []uint64{5}}, {same(2, 1), false, nil}}},
		{"the end is also the 16th", 64, 1 << 20, 16, []post{{same(16, 1), true, []uint64{16}}, {same(17, 1), false, []uint64{32}}}},
		{"half of the bytes", 64, 100, 16, []post{{[]uint32{20, 20, 20, 20, 20, 49}, false, []uint64{3, 6}}}},
		{"each, when the queue is short", 3, 1 << 20, 16, []post{{same(3, 1), false, []uint64{1, 2, 3}}}},
		{"half of a short queue", 8, 1 << 20, 16, []post{{same(8, 1), false, []uint64{4, 8}}}},
		{"an empty write", 8, 1 << 20, 16, []post{{[]uint32{0}, true, []uint64{1}}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			q := newSendQueue[int](c.depth, c.bytes, c.every)
			id := uint64(0)
			for i, p := range c.posts {
				writes, pieces := chainOf(p.sizes...)
				q.posting(i, writes, pieces, p.end)
				var got []uint64
				for _, w := range writes {
					if id++; w.ID != id {
						t.Fatalf("ID %d, want %d", w.ID, id)
					}
					if w.Flags&verbs.Signaled != 0 {
						got = append(got, w.ID)
					}
				}
				if !reflect.DeepEqual(got, p.want) {
					t.Errorf("post %d: %v are signalled, want %v", i, got, p.want)
				}
			}
		})
	}
}

func TestSendQueueFrees(t *testing.T) {
	q := newSendQueue[string](16, 1000, 4)
	post := func(owner string, end bool, sizes ...uint32) {
		writes, pieces := chainOf(sizes...)
		q.posting(owner, writes, pieces, end)
	}
	free := func(id uint64) (out []batch[string]) {
		for b, ok := q.completed(id); ok; b, ok = q.completed(id) {
			b.last, b.signaled = 0, false
			out = append(out, b)
		}
		return out
	}
	wantRoom := func(requests int, bytes uint64) {
		t.Helper()
		if r, b := q.room(); r != requests || b != bytes {
			t.Errorf("room for %d requests and %d bytes, want %d and %d", r, b, requests, bytes)
		}
	}
	post("a", false, 10, 10, 10, 10, 10) // 4 is signalled
	post("a", true, 10)                  // 6
	post("b", false, 1, 1)
	wantRoom(8, 938)
	for _, c := range []struct {
		id   uint64
		want []batch[string]
	}{
		{0, nil}, {3, nil}, {9, nil}, // never posted
		{4, []batch[string]{{Owner: "a", Requests: 4, Bytes: 40}}},
		{4, nil},
		{6, []batch[string]{{Owner: "a", Requests: 1, Bytes: 10}, {Owner: "a", Requests: 1, Bytes: 10, End: true}}},
	} {
		if got := free(c.id); !reflect.DeepEqual(got, c.want) {
			t.Errorf("the completion of %d frees %+v, want %+v", c.id, got, c.want)
		}
	}
	wantRoom(14, 998)
	post("b", true, 2000) // one write may go over
	wantRoom(13, 0)
	// Request 8 fails: 7 is done, but no completion tells of it alone.
	if got := free(7); got != nil || q.idle() {
		t.Errorf("%+v are done with the first of two", got)
	}
	var lost []string
	for b, ok := q.flush(); ok; b, ok = q.flush() {
		lost = append(lost, b.Owner)
	}
	if !reflect.DeepEqual(lost, []string{"b", "b"}) || !q.idle() {
		t.Errorf("%v are flushed", lost)
	}
	wantRoom(16, 1000)
	post("c", false, 1)
	if got := free(10); len(got) != 1 {
		t.Errorf("after a flush the first is not signalled: %+v", got)
	}
	if posted, signalled := q.counts(); posted != 10 || signalled != 4 {
		t.Errorf("%d posted, %d signalled", posted, signalled)
	}
}

func TestSendQueueRefusesMoreThanItHasRoomFor(t *testing.T) {
	q := newSendQueue[int](4, 1000, 4)
	writes, pieces := chainOf(same(5, 1)...)
	defer func() {
		if recover() == nil {
			t.Error("5 requests went into a queue of 4")
		}
	}()
	q.posting(0, writes, pieces, false)
}

// modelRequest is one request of the model's queue pair.
type modelRequest struct {
	id       uint64
	owner    int
	bytes    uint64
	end      bool
	signaled bool
}

// The counts are held against a list of all requests. The queue pair completes in order,
// tells of signalled requests only, many at a time, and sometimes as late as it may.
func TestSendQueueRandom(t *testing.T) {
	rnd := seed.Rand(t)
	for range 300 {
		modelSendQueue(t, rnd)
	}
}

func modelSendQueue(t *testing.T, rnd *rand.Rand) {
	depth, maxBytes, every := 1+rnd.IntN(70), 1+uint64(rnd.IntN(5000)), rnd.IntN(40)
	q := newSendQueue[int](depth, maxBytes, every)
	var under []modelRequest // oldest first
	var total, freed uint64
	owner := 0
	for range 200 {
		var bytes uint64
		signals := 0
		for _, r := range under {
			bytes += r.bytes
			if r.signaled {
				signals++
			}
		}
		requests, room := q.room()
		if requests != depth-len(under) || room != maxBytes-min(bytes, maxBytes) || q.idle() != (len(under) == 0) {
			t.Fatalf("room for %d and %d with %d requests of %d bytes under way; depth %d, %d bytes", requests, room, len(under), bytes, depth, maxBytes)
		}
		if signals == 0 && (requests == 0 || room == 0) {
			t.Fatalf("it stalls: nothing that is under way is signalled, and there is room for %d requests and %d bytes", requests, room)
		}
		switch k := rnd.IntN(10); {
		case k < 5 && requests > 0 && room > 0:
			sizes := make([]uint32, 0, depth)
			for n := 1 + rnd.IntN(requests); len(sizes) < n; {
				size := uint32(rnd.IntN(200))
				sizes = append(sizes, size)
				if room -= min(room, uint64(size)); room == 0 {
					break
				}
			}
			writes, pieces := chainOf(sizes...)
			end := rnd.IntN(4) == 0
			q.posting(owner, writes, pieces, end)
			for i, w := range writes {
				total++
				r := modelRequest{w.ID, owner, uint64(sizes[i]), end && i == len(writes)-1, w.Flags&verbs.Signaled != 0}
				if r.id != total || r.end && !r.signaled {
					t.Fatalf("request %d: %+v", total, r)
				}
				under = append(under, r)
			}
			if end {
				owner++
			}
		case k < 9 && signals > 0:
			// One of the signalled ones; the completions before it may have come with it.
			nth := rnd.IntN(signals)
			at := 0
			for i, r := range under {
				if r.signaled {
					if nth == 0 {
						at = i
						break
					}
					nth--
				}
			}
			freed += checkFreed(t, under[:at+1], func() (batch[int], bool) { return q.completed(under[at].id) })
			under = under[at+1:]
		case k == 9 && rnd.IntN(5) == 0: // the queue pair fails
			freed += checkFreed(t, under, q.flush)
			under = nil
		}
	}
	freed += checkFreed(t, under, q.flush)
	if posted, signalled := q.counts(); posted != total || freed != total || signalled > total {
		t.Fatalf("%d posted, %d freed, %d signalled of %d", posted, freed, signalled, total)
	}
}

// checkFreed: the batches are these requests, in order, by owner.
func checkFreed(t *testing.T, want []modelRequest, next func() (batch[int], bool)) (n uint64) {
	t.Helper()
	for b, ok := next(); ok; b, ok = next() {
		if b.Requests == 0 || b.Requests > len(want) {
			t.Fatalf("a batch of %d requests, %d are left", b.Requests, len(want))
		}
		bytes := uint64(0)
		for i, r := range want[:b.Requests] {
			if bytes += r.bytes; r.owner != b.Owner || r.end != (b.End && i == b.Requests-1) {
				t.Fatalf("%+v in %+v", r, b)
			}
		}
		if bytes != b.Bytes {
			t.Fatalf("%d bytes in %+v", bytes, b)
		}
		want = want[b.Requests:]
		n += uint64(b.Requests)
	}
	if len(want) != 0 {
		t.Fatalf("%d are not freed: %+v", len(want), want)
	}
	return n
}

// In a long transfer there is one signal to 16 writes, whatever comes and goes.
func TestSendQueueRatio(t *testing.T) {
	q := newSendQueue[int](128, 1<<30, 16)
	var signaled []uint64
	writes, pieces := make([]verbs.Write, 32), make([]verbs.SGE, 32)
	for n := 0; n < 20000; {
		requests, _ := q.room()
		k := min(requests, 32)
		if k == 0 && len(signaled) == 0 {
			t.Fatalf("after %d requests: no room, and no signal under way", n)
		}
		for i := range k {
			writes[i] = verbs.Write{First: uint32(i), Pieces: 1}
			pieces[i].Length = 4096
		}
		q.posting(0, writes[:k], pieces, false)
		for _, w := range writes[:k] {
			if w.Flags&verbs.Signaled != 0 {
				signaled = append(signaled, w.ID)
			}
		}
		n += k
		if len(signaled) > 4 || k == 0 {
			for _, ok := q.completed(signaled[0]); ok; _, ok = q.completed(signaled[0]) {
			}
			signaled = signaled[1:]
		}
	}
	if posted, signalled := q.counts(); signalled*16 > posted {
		t.Errorf("%d of %d are signalled", signalled, posted)
	}
}

func TestSendQueueAllocatesNothing(t *testing.T) {
	q := newSendQueue[*job](64, 1<<30, 16)
	writes, pieces := chainOf(same(32, 4096)...)
	owner := &job{}
	if n := testing.AllocsPerRun(100, func() {
		q.posting(owner, writes, pieces, true)
		last := writes[len(writes)-1].ID
		for _, ok := q.completed(last); ok; _, ok = q.completed(last) {
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkSendQueue(b *testing.B) {
	q := newSendQueue[*job](64, 1<<30, 16)
	writes, pieces := chainOf(same(32, 4096)...)
	owner := &job{}
	for b.Loop() { // 20,000 requests
		for range 625 {
			q.posting(owner, writes, pieces, false)
			last := writes[len(writes)-1].ID
			for _, ok := q.completed(last); ok; _, ok = q.completed(last) {
			}
		}
	}
}

// counts are the requests ever posted and the signalled ones among them.
func (q *sendQueue[H]) counts() (posted, signalled uint64) { return q.next - 1, q.signalled }
