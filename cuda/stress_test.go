package cuda

import (
	"bytes"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
)

// TestStress: many transfers in both directions, with moments, ended here and there in the middle: no
// wrong byte, no byte after the last Done, and each copy is told once.
func TestStress(t *testing.T) {
	e, d := open(t, Options{RingBytes: 2 << 20, SlotBytes: 64 << 10})
	const n, workers, turns = 256 << 10, 6, 40
	var patterns [8][]byte
	for i := range patterns {
		patterns[i] = e.Pattern(n, uint64(i+1))
	}
	var wg sync.WaitGroup
	for w := range workers {
		p, stream := memory(t, e, d, n), e.Stream()
		random := rand.New(rand.NewPCG(uint64(w), 3))
		wg.Go(func() {
			for range turns {
				read := random.IntN(2) == 0
				old, fresh := random.IntN(4), 4+random.IntN(4)
				s := &stressRun{t: t, d: d, p: p, n: n, old: patterns[old], fresh: patterns[fresh], random: random}
				if read {
					e.Kernel(stream, p, n, uint64(old+1))
				} else {
					e.Sync(stream)
					e.Fill(p, n, uint64(old+1))
				}
				m, err := d.Moment(stream)
				if err != nil {
					t.Error(err)
					return
				}
				if !s.run(read, m) {
					continue
				}
				// It was ended: the block is another request's.
				e.Sync(stream)
				e.Fill(p, n, uint64(8+w))
				for _, q := range d.made() {
					e.Sync(q.drv.Stream()) // what is late has come
				}
				if wrong := e.Wrong(p, n, uint64(8+w)); wrong > 0 {
					t.Errorf("%d bytes changed after the last Done", wrong)
				}
			}
		})
	}
	wg.Wait()
}

type stressRun struct {
	t          *testing.T
	d          *Device
	p          uintptr
	n          int
	old, fresh []byte
	random     *rand.Rand
	told       sync.WaitGroup
}

// run copies the block in pieces, and ends perhaps in the middle. When it returns, each piece was told.
func (s *stressRun) run(read bool, m uint64) (ended bool) {
	dir := ToDevice
	if read {
		dir = FromDevice
	}
	passed := make(chan error, 1)
	s.d.Await(m, func(err error) { passed <- err })
	if err := <-passed; err != nil {
		s.t.Error(err)
		return false
	}
	tr := s.d.Transfer("stress", dir)
	const each = 64 << 10
	end := s.n / each
	if ended = s.random.IntN(2) == 0; ended {
		end = s.random.IntN(end + 1)
	}
	for i := range end {
		slot, err := s.d.Slot(s.t.Context(), dir, "test")
		if err != nil {
			s.t.Error(err)
			return false
		}
		off := i * each
		if !read {
			copy(slot.Bytes(), s.fresh[off:off+each])
		}
		var runs []Run
		for at := 0; at < each; {
			l := min(1+s.random.IntN(9000), each-at)
			runs = append(runs, Run{Addr: s.p + uintptr(off+at), Len: uint64(l)})
			at += l
		}
		s.told.Add(1)
		var once atomic.Bool
		tr.Start(Copy{Slot: slot, Runs: runs, Done: func(err error) {
			if once.Swap(true) {
				s.t.Error("a copy was told twice")
				return
			}
			switch {
			case err != nil:
				s.t.Error(err)
			case err == nil && read && !bytes.Equal(slot.Bytes(), s.old[off:off+each]):
				s.t.Error("wrong bytes were read")
			}
			slot.Release()
			s.told.Done()
		}})
	}
	s.told.Wait()
	if tr.MayCopy() {
		s.t.Error("each copy was told, and one may land, it says")
	}
	return ended
}

// TestPanicInDone: a Done and an awaited function that panic harm nobody else.
func TestPanicInDone(t *testing.T) {
	e, d := open(t, Options{})
	p, tr, stream := memory(t, e, d, grain), d.Transfer("a", FromDevice), e.Stream()
	tr.Start(Copy{Slot: slot(t, d, FromDevice), Runs: []Run{{Addr: p, Len: 100}}, Done: func(error) { panic("of a test") }})
	if err := run(t, tr, Copy{Slot: slot(t, d, FromDevice), Runs: []Run{{Addr: p, Len: 100}}}); err != nil {
		t.Error(err)
	}
	m := moment(t, d, stream)
	d.Await(m, func(error) { panic("of a test") })
	heard := make(chan error, 1)
	d.Await(m, func(err error) { heard <- err })
	if err := answer(t, heard); err != nil {
		t.Error(err)
	}
}
