package cuda

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/kvconn/kvconn/cuda/internal/driver"
)

// methods are those in which the driver gets many copies.
var methods = []struct {
	name          string
	kernel, batch bool
	call          string // that must have been made
}{
	{"by the kernel", true, true, "cuLaunchKernel"},
	{"in batches", false, true, "cuMemcpyBatchAsync"},
	{"one by one", false, false, ""},
}

// TestCopies: bytes go where they should, in many copies at once, of few and of many runs, in each way.
func TestCopies(t *testing.T) {
	for _, method := range methods {
		t.Run(method.name, func(t *testing.T) {
			e, d := open(t, Options{RingBytes: 4 << 20, SlotBytes: 128 << 10, NoKernel: !method.kernel})
			if method.batch && !driver.HasBatch() {
				t.Log("this driver has no batches")
			}
			driver.UseBatch(method.batch)
			t.Cleanup(func() { driver.UseBatch(true) })
			calls := map[string]uint64{}
			for _, call := range []string{"cuLaunchKernel", "cuMemcpyBatchAsync"} {
				calls[call] = e.Count(call)
			}
			const n = 4 << 20
			// Half of it is mapped by handles, so runs cross mappings.
			at := reserve(t, e, 2*grain)
			mapAt(t, e, at, 1)
			mapAt(t, e, at+grain, 1)
			r, err := d.Register("cache", at, n)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(r.Close)
			random := rand.New(rand.NewPCG(7, uint64(len(t.Name()))))
			pattern := e.Pattern(n, 1)
			var wg sync.WaitGroup
			from, to := d.Transfer("from", FromDevice), d.Transfer("to", ToDevice)
			e.Fill(at, n, 1)
			copyAll(t, d, from, cuts(random, at, n), pattern, &wg)
			wg.Wait()
			fresh := e.Pattern(n, 2)
			copyAll(t, d, to, cuts(random, at, n), fresh, &wg)
			wg.Wait()
			if wrong := e.Wrong(at, n, 2); wrong > 0 {
				t.Errorf("%d bytes have not landed", wrong)
			}
			for call, before := range calls {
				made := e.Count(call) != before
				want := call == method.call && (method.kernel || driver.HasBatch())
				if made != want && !(method.kernel && call == "cuMemcpyBatchAsync") { // of odd pieces that are not tiny
					t.Errorf("%s was called: %v, want %v", call, made, want)
				}
			}
		})
	}
}

// piece is runs that go into one slot, and where their bytes are in the whole.
type piece struct {
	runs  []Run
	first []int
	bytes int
}

// cuts cuts memory into runs, shuffled, in pieces of a slot's size at most.
func cuts(random *rand.Rand, at uintptr, n int) (all []piece) {
	var runs []Run
	for off := 0; off < n; {
		most := 100
		if random.IntN(20) == 0 {
			most = 100 << 10
		}
		l := min(1+random.IntN(most), n-off)
		runs = append(runs, Run{Addr: at + uintptr(off), Len: uint64(l)})
		off += l
	}
	for i := range runs { // neighbours stay together here and there
		if j := random.IntN(len(runs)); random.IntN(2) == 0 {
			runs[i], runs[j] = runs[j], runs[i]
		}
	}
	var p piece
	for _, r := range runs {
		if p.bytes+int(r.Len) > 128<<10-64 {
			all, p = append(all, p), piece{}
		}
		p.runs, p.first, p.bytes = append(p.runs, r), append(p.first, int(r.Addr-at)), p.bytes+int(r.Len)
	}
	return append(all, p)
}

// copyAll copies all pieces; whole is what the memory has, or gets.
func copyAll(t *testing.T, d *Device, tr *Transfer, pieces []piece, whole []byte, wg *sync.WaitGroup) {
	t.Helper()
	for i, p := range pieces {
		s, err := d.Slot(t.Context(), tr.dir, "test")
		if err != nil {
			t.Fatal(err)
		}
		at := i % 64
		each := func(f func(slot, memory []byte)) {
			off := at
			for j, r := range p.runs {
				f(s.Bytes()[off:off+int(r.Len)], whole[p.first[j]:p.first[j]+int(r.Len)])
				off += int(r.Len)
			}
		}
		if tr.dir == ToDevice {
			each(func(slot, memory []byte) { copy(slot, memory) })
		}
		wg.Add(1)
		tr.Start(Copy{Slot: s, At: at, Runs: p.runs, Done: func(err error) {
			defer wg.Done()
			defer s.Release()
			if err != nil {
				t.Error(err)
			}
			if tr.dir == FromDevice {
				each(func(slot, memory []byte) {
					if string(slot) != string(memory) {
						t.Error("wrong bytes were read")
					}
				})
			}
		}})
	}
}

// TestRefusedCopies: what does not fit, is not registered, or goes the other way is an error, and no
// byte moves.
func TestRefusedCopies(t *testing.T) {
	e, d := open(t, Options{RingBytes: 1 << 20, SlotBytes: 4096})
	p := memory(t, e, d, grain)
	unregistered := e.Alloc(grain)
	from, to := slot(t, d, FromDevice), slot(t, d, ToDevice)
	tr := d.Transfer("a", FromDevice)
	for name, c := range map[string]Copy{
		"too long":        {Slot: from, Runs: []Run{{Addr: p, Len: 4097}}},
		"too far":         {Slot: from, At: 1, Runs: []Run{{Addr: p, Len: 4096}}},
		"negative":        {Slot: from, At: -1, Runs: []Run{{Addr: p, Len: 1}}},
		"overflow":        {Slot: from, Runs: []Run{{Addr: p, Len: 4000}, {Addr: p, Len: ^uint64(0) - 100}}},
		"not registered":  {Slot: from, Runs: []Run{{Addr: unregistered, Len: 1}}},
		"over the end":    {Slot: from, Runs: []Run{{Addr: p + grain - 1, Len: 2}}},
		"other direction": {Slot: to, Runs: []Run{{Addr: p, Len: 1}}},
	} {
		if err := run(t, tr, c); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	gone := slot(t, d, FromDevice)
	gone.Release()
	if err := run(t, tr, Copy{Slot: gone, Runs: []Run{{Addr: p, Len: 1}}}); err == nil {
		t.Error("a slot that was released was copied into")
	}
	if err := run(t, tr, Copy{Slot: from}); err != nil {
		t.Errorf("a copy of nothing: %v", err)
	}
	if n := e.Count("cuMemcpyDtoHAsync_v2"); n != ^uint64(0) && n > 0 {
		t.Logf("%d copies of other tests", n)
	}
}

// TestSlots: a direction gets three quarters of the slots, a waiting caller gets the slot that is
// released, and a wait ends with its context.
func TestSlots(t *testing.T) {
	_, d := open(t, Options{RingBytes: 16 * 4096, SlotBytes: 4096})
	var held []*Slot
	for range 12 {
		held = append(held, slot(t, d, FromDevice))
	}
	if s, err := d.TrySlot(FromDevice, "test"); s != nil || err != nil {
		t.Errorf("a 13th slot of 16: %v, %v", s, err)
	}
	for range 4 {
		slot(t, d, ToDevice)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := d.Slot(ctx, FromDevice, "test")
		ended <- err
	}()
	cancel()
	if err := answer(t, ended); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	got := make(chan *Slot, 1)
	go func() {
		s, err := d.Slot(t.Context(), ToDevice, "test")
		if err != nil {
			t.Error(err)
		}
		got <- s
	}()
	held[0].Release()
	held[0].Release() // a second release does nothing
	(<-got).Release()
}

// TestSlotTurns: among those that wait for a slot the one that has the fewest is the next, and an owner that keeps many does not keep
// others from theirs.
func TestSlotTurns(t *testing.T) {
	_, d := open(t, Options{RingBytes: 16 * 4096, SlotBytes: 4096})
	var held []*Slot
	for range 12 {
		s, err := d.Slot(t.Context(), FromDevice, "greedy")
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, s)
	}
	got := make(chan *Slot)
	wait := func(owner string) {
		before := d.waiting(FromDevice)
		go func() {
			s, err := d.Slot(t.Context(), FromDevice, owner)
			if err != nil {
				t.Error(err)
			}
			got <- s
		}()
		for d.waiting(FromDevice) == before {
			runtime.Gosched()
		}
	}
	for _, owner := range []string{"greedy", "greedy", "modest", "modest", "new"} {
		wait(owner)
	}
	var order []string
	for range 5 {
		held[0].Release()
		held = held[1:]
		s := <-got
		order = append(order, s.owner)
		defer s.Release()
	}
	// "modest" waits longer than "new", and has a slot then.
	if want := []string{"modest", "new", "modest", "greedy", "greedy"}; !slices.Equal(order, want) {
		t.Errorf("turns were %q, want %q", order, want)
	}
	for _, s := range held {
		s.Release()
	}
}

// waiting counts the callers that wait for a slot.
func (d *Device) waiting(dir Direction) int {
	d.ring.mu.Lock()
	defer d.ring.mu.Unlock()
	return len(d.ring.waiting[dir])
}

// BenchmarkMover: copies of 64 KiB runs, slots of 2 MiB, four in flight, beside plain copies of the same bytes.
func BenchmarkMover(b *testing.B) {
	const n, most, runBytes = 64 << 20, 2 << 20, 64 << 10
	for _, dir := range []Direction{FromDevice, ToDevice} {
		b.Run(dir.String(), func(b *testing.B) {
			e, d := open(b, Options{})
			e.Delay(0)
			b.Cleanup(func() { e.Delay(300) })
			p := e.Alloc(n)
			if _, err := d.Register("cache", p, n); err != nil {
				b.Fatal(err)
			}
			tr := d.Transfer("a", dir)
			flying := make(chan struct{}, 4)
			b.SetBytes(n)
			b.ReportAllocs()
			for b.Loop() {
				for off := 0; off < n; off += most {
					var runs []Run
					for i := range most / runBytes { // every second one, so none are neighbours
						at := (2*i*runBytes + off) % n
						runs = append(runs, Run{Addr: p + uintptr(at), Len: runBytes})
					}
					flying <- struct{}{}
					s, err := d.Slot(b.Context(), dir, "test")
					if err != nil {
						b.Fatal(err)
					}
					tr.Start(Copy{Slot: s, Runs: runs, Done: func(err error) {
						if err != nil {
							b.Error(err)
						}
						s.Release()
						<-flying
					}})
				}
			}
			for range cap(flying) {
				flying <- struct{}{}
			}
		})
	}
	b.Run("memcpy", func(b *testing.B) {
		from, to := make([]byte, n), make([]byte, n)
		b.SetBytes(n)
		for b.Loop() {
			for off := 0; off < n; off += runBytes {
				copy(to[off:off+runBytes], from[off:off+runBytes])
			}
		}
	})
}
