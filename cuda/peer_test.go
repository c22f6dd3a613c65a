package cuda

import (
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// pull copies from a peer's memory to ours, and waits for the end.
func pull(t *testing.T, d *Device, p *Peer, from, to uintptr, bytes int) error {
	t.Helper()
	return run(t, d.Transfer("a", FromPeer), Copy{Peer: p,
		Runs: []Run{{Addr: from, Len: uint64(bytes)}}, To: []Run{{Addr: to, Len: uint64(bytes)}}})
}

// TestPeer: what P wrote before its moment is read by D, from an allocation and from mapped memory, to the device and to
// slots, in many runs that cross allocations and mappings. Opened once, it stays open until it is closed.
func TestPeer(t *testing.T) {
	e, d := open(t, Options{RingBytes: 4 << 20, SlotBytes: 256 << 10})
	for name, kind := range map[string]string{"allocated": "allocate", "mapped": "map", "of the preload": "expose"} {
		t.Run(name, func(t *testing.T) {
			o := start(t, 0)
			const n = 3 * grain
			at, to := o.memory(kind, n, 1), memory(t, e, d, n)
			p := o.openAll(d)
			opens := e.Count("ipc") + e.Count("mapped")
			a, files := o.try(order{Do: "share"})
			if err := openEach(p, a, files); err != nil {
				t.Errorf("what is open already: %v", err)
			}
			if now := e.Count("ipc") + e.Count("mapped"); now != opens || opens == 0 || p.Opened() != len(a.Allocations) {
				t.Errorf("%d mappings are open, and were %d; %d of %d allocations", now, opens, p.Opened(), len(a.Allocations))
			}
			random := rand.New(rand.NewPCG(5, 6))
			for pattern := uint64(2); pattern < 5; pattern++ {
				o.ask(order{Do: "kernel", Addr: at, Bytes: n, Pattern: pattern})
				e.Fill(to, n, 100)
				pullScattered(t, d, p, random, at, to, n)
				if wrong := e.Wrong(to, n, pattern); wrong > 0 {
					t.Errorf("%d bytes of pattern %d are wrong", wrong, pattern)
				}
				from, whole := d.Transfer("to slots", FromDevice), e.Pattern(n, pattern)
				s := slot(t, d, FromDevice)
				const off = grain - 1000
				if err := run(t, from, Copy{Slot: s, At: 7, Peer: p, Runs: []Run{{Addr: at + off, Len: 5000}}}); err != nil {
					t.Fatal(err)
				}
				if string(s.Bytes()[7:5007]) != string(whole[off:off+5000]) {
					t.Error("wrong bytes came into a slot")
				}
				s.Release()
			}
			if err := o.checks(); err != "" {
				t.Error(err)
			}
			if n := o.ask(order{Do: "wrong", Addr: at, Bytes: n, Pattern: 4}).N; n > 0 {
				t.Errorf("%d bytes of P's memory have changed", n)
			}
			if err := p.Close(); err != nil || p.Opened() != 0 || e.Count("ipc")+e.Count("mapped")+e.Count("reserved") != 0 {
				t.Errorf("closed: %v, and %d are open", err, p.Opened())
			}
			if err := pull(t, d, p, at, to, 100); err == nil || !strings.Contains(err.Error(), "prefill 1 has not opened to us") {
				t.Errorf("a copy from what is closed: %v", err)
			}
		})
	}
}

// pullScattered copies all of P's memory in shuffled runs: those of the sources end elsewhere than those of the targets.
func pullScattered(t *testing.T, d *Device, p *Peer, random *rand.Rand, from, to uintptr, n int) {
	t.Helper()
	type both struct{ off, n int }
	var pieces []both
	for off := 0; off < n; {
		l := min(1+random.IntN(20000), n-off)
		pieces = append(pieces, both{off, l})
		off += l
	}
	for i := range pieces {
		if j := random.IntN(len(pieces)); random.IntN(2) == 0 {
			pieces[i], pieces[j] = pieces[j], pieces[i]
		}
	}
	runs := func(at uintptr) (all []Run) {
		for _, b := range pieces {
			cut := random.IntN(b.n + 1)
			all = append(all, Run{Addr: at + uintptr(b.off), Len: uint64(cut)}, Run{Addr: at + uintptr(b.off+cut), Len: uint64(b.n - cut)})
		}
		return all
	}
	var wg sync.WaitGroup
	wg.Add(1)
	d.Transfer("scattered", FromPeer).Start(Copy{Peer: p, Runs: runs(from), To: runs(to), Done: func(err error) {
		defer wg.Done()
		if err != nil {
			t.Error(err)
		}
	}})
	wg.Wait()
}

// hold starts a copy that the driver has and does not begin, until e.Release of the stream.
func hold(t *testing.T, e *engine.Engine, d *Device, c Copy) (stream uintptr, done chan error) {
	t.Helper()
	if err := d.preparePeers(); err != nil {
		t.Fatal(err)
	}
	stream = d.queue(FromPeer).drv.Stream()
	e.Hold(stream)
	done = make(chan error, 1)
	c.Done = func(err error) { done <- err }
	d.Transfer("held", FromPeer).Start(c)
	return stream, done
}

// TestPeersOfOneProcess: two agents of P share the same memory, which CUDA opens once here. When one is closed the other goes on.
func TestPeersOfOneProcess(t *testing.T) {
	e, d := open(t, Options{})
	o := start(t, 0)
	at, to := o.memory("allocate", grain, 1), memory(t, e, d, grain)
	first, second := o.openAll(d), o.openAll(d)
	if err := pull(t, d, first, at, to, grain); err != nil {
		t.Error(err)
	}
	if err := first.Close(); err != nil {
		t.Error(err)
	}
	e.Fill(to, grain, 9)
	if err := pull(t, d, second, at, to, grain); err != nil || e.Wrong(to, grain, 1) > 0 {
		t.Errorf("%v, %d bytes are wrong", err, e.Wrong(to, grain, 1))
	}
	if err := pull(t, d, first, at, to, 100); err == nil {
		t.Error("what is closed was read")
	}
}

// TestPeerStress: copies in both ways while the memory is closed and opened anew: each ends well with the right bytes, or says that the memory
// was closed.
func TestPeerStress(t *testing.T) {
	e, d := open(t, Options{RingBytes: 2 << 20, SlotBytes: 64 << 10})
	o := start(t, 0)
	const n, workers, turns = 256 << 10, 4, 30
	at := o.memory("map", 2*grain, 1) + grain - n/2 // over the seam
	p := o.openAll(d)
	a, files := o.try(order{Do: "share"})
	whole := e.Pattern(2*grain, 1)[grain-n/2:]
	var wg, closes sync.WaitGroup
	over := make(chan struct{})
	closes.Go(func() {
		for {
			select {
			case <-over:
				return
			default:
			}
			if err := errors.Join(p.Close(), openEach(p, a, files)); err != nil {
				t.Error(err)
				return
			}
		}
	})
	for w := range workers {
		to, s := memory(t, e, d, n), slot(t, d, FromDevice)
		random := rand.New(rand.NewPCG(uint64(w), 8))
		wg.Go(func() {
			for range turns {
				e.Fill(to, n, 9)
				off := random.IntN(n - 1000)
				l := 1 + random.IntN(min(n-off, len(s.Bytes())))
				done := make(chan error, 1)
				c := Copy{Peer: p, Runs: []Run{{Addr: at + uintptr(off), Len: uint64(l)}}, Done: func(err error) { done <- err }}
				toSlot := random.IntN(2) == 0
				if toSlot {
					c.Slot = s
					d.Transfer("stress", FromDevice).Start(c)
				} else {
					c.To = []Run{{Addr: to, Len: uint64(l)}}
					d.Transfer("stress", FromPeer).Start(c)
				}
				err := <-done
				switch {
				case errors.Is(err, ErrPeerClosed) || err != nil && strings.Contains(err.Error(), "has not opened"):
				case err != nil:
					t.Error(err)
				case toSlot && string(s.Bytes()[:l]) != string(whole[off:off+l]):
					t.Error("wrong bytes came into a slot")
				case !toSlot && string(e.Alias(to, l)) != string(whole[off:off+l]):
					t.Error("wrong bytes came to the device")
				}
			}
		})
	}
	wg.Wait()
	close(over)
	closes.Wait()
}

// TestPeerAsksOnce: a copy over many runs to and fro between a few mappings asks for each of these once, before and after.
func TestPeerAsksOnce(t *testing.T) {
	e, d := open(t, Options{})
	o := start(t, 0)
	at, to := o.memory("map", 2*grain, 1), memory(t, e, d, grain)
	p := o.openAll(d)
	var from, into []Run
	for i := range uintptr(100) {
		from = append(from, Run{Addr: at + i%2*grain + i*100, Len: 100})
		into = append(into, Run{Addr: to + i*100, Len: 100})
	}
	before := e.Count("cuPointerGetAttribute")
	if err := run(t, d.Transfer("a", FromPeer), Copy{Peer: p, Runs: from, To: into}); err != nil {
		t.Fatal(err)
	}
	if n := e.Count("cuPointerGetAttribute") - before; n > 2*5 { // two ids of P's two, one of ours
		t.Errorf("%d questions about three mappings", n)
	}
}
