package cuda

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// TestPeerDies: P is killed while D copies. The copy ends, D closes, and what P had is not open any more.
func TestPeerDies(t *testing.T) {
	e, d := open(t, Options{})
	for name, kind := range map[string]string{"allocated": "allocate", "mapped": "map"} {
		t.Run(name, func(t *testing.T) {
			o := start(t, 0)
			const n = 2 * grain
			at, to := o.memory(kind, n, 1), memory(t, e, d, n)
			p := o.openAll(d)
			a, files := o.try(order{Do: "share"})
			stream, done := hold(t, e, d, Copy{Peer: p, Runs: []Run{{Addr: at, Len: n}}, To: []Run{{Addr: to, Len: n}}})
			o.kill()
			e.Release(stream)
			if err := answer(t, done); err != nil {
				t.Error(err)
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
			var refused *RefusedError
			if err := openEach(p, a, files); kind == "allocate" && (!errors.As(err, &refused) || d.Err() != nil) {
				t.Errorf("the memory of a dead process: %v, and the device: %v", err, d.Err())
			}
		})
	}
}

// TestPeerChanges: P's memory is freed, or mapped anew, while D reads. P's check says so, and D's engine gets nothing of it. Then
// what lies there now is opened and read.
func TestPeerChanges(t *testing.T) {
	e, d := open(t, Options{})
	const n = 2 * grain
	noticed := func(t *testing.T, o *other, region string) {
		t.Helper()
		if err := o.checks(); !strings.Contains(err, "region "+region+": its memory at") {
			t.Errorf("it was not noticed: %q", err)
		}
	}
	t.Run("freed", func(t *testing.T) {
		o := start(t, 0)
		at, to := o.memory("allocate", n, 1), memory(t, e, d, n)
		p := o.openAll(d)
		stream, done := hold(t, e, d, Copy{Peer: p, Runs: []Run{{Addr: at, Len: n}}, To: []Run{{Addr: to, Len: n}}})
		o.ask(order{Do: "free", Addr: at})
		if o.ask(order{Do: "count", Count: "violations"}).N != 1 {
			t.Error("the double forgives an owner who frees what is open elsewhere")
		}
		e.Release(stream)
		if err := answer(t, done); err != nil {
			t.Error(err)
		}
		if e.Wrong(to, n, 1) == 0 {
			t.Error("freed memory has its old bytes: the test cannot fail")
		}
		noticed(t, o, "unknown") // it was closed
	})
	t.Run("slept", func(t *testing.T) {
		o := start(t, 0)
		at, to := o.memory("map", n, 1), memory(t, e, d, n)
		p := o.openAll(d)
		stream, done := hold(t, e, d, Copy{Peer: p, Runs: []Run{{Addr: at, Len: n}}, To: []Run{{Addr: to, Len: n}}})
		o.ask(order{Do: "sleep"})
		noticed(t, o, "mapped")
		o.ask(order{Do: "wake"})
		o.ask(order{Do: "fill", Addr: at, Bytes: n, Pattern: 2})
		e.Release(stream)
		if err := answer(t, done); err != nil {
			t.Error(err)
		}
		noticed(t, o, "mapped") // though P has renewed its regions
		a, files := o.try(order{Do: "share"})
		if err := openEach(p, a, files); err == nil || !strings.Contains(err.Error(), "close the peer first") {
			t.Errorf("new memory beside the old: %v", err)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
		if err := openEach(p, a, files); err != nil {
			t.Fatal(err)
		}
		if err := pull(t, d, p, at, to, n); err != nil || e.Wrong(to, n, 2) > 0 || o.checks() != "" {
			t.Errorf("%v, %d bytes are wrong, %s", err, e.Wrong(to, n, 2), o.checks())
		}
	})
	t.Run("freed after a close", func(t *testing.T) {
		o := start(t, 0)
		at := o.memory("allocate", n, 1)
		p := o.openAll(d)
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
		o.ask(order{Do: "free", Addr: at})
		if n := o.ask(order{Do: "count", Count: "violations"}).N; n != 0 {
			t.Errorf("%d violations at P", n)
		}
	})
}

// TestPeerCounts: P's engine frees and allocates anew at the same address, with other bytes, while D loads, every other time. D
// counts what P has said yes to after it was read: all of that is what P had when it offered.
func TestPeerCounts(t *testing.T) {
	e, d := open(t, Options{})
	o := start(t, 0)
	const n, loads = 256 << 10, 60
	at, to := o.memory("allocate", n, 1), memory(t, e, d, n)
	random := rand.New(rand.NewPCG(1, 9))
	counted, wrong := 0, 0
	for next := range uint64(loads) {
		e.Fill(to, n, 1000)
		p := o.openAll(d)
		offered := o.ask(order{Do: "pattern"}).N
		var engine sync.WaitGroup
		if random.IntN(2) == 0 {
			engine.Go(func() { o.try(order{Do: "anew", Addr: at, Bytes: n, Pattern: next + 2}) })
		}
		if err := pull(t, d, p, at, to, n); err != nil {
			t.Fatal(err)
		}
		if o.checks() == "" {
			counted++
			if e.Wrong(to, n, offered) > 0 {
				wrong++
			}
		}
		engine.Wait()
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d of %d loads were counted", counted, loads)
	if counted == 0 || wrong > 0 {
		t.Errorf("%d of %d counted loads are wrong", wrong, counted)
	}
}

// TestPeerCloseWaits: memory is closed when no copy uses it. A copy that the driver does not have yet is not waited for.
func TestPeerCloseWaits(t *testing.T) {
	e, d := open(t, Options{})
	before := e.Count("violations")
	for name, kind := range map[string]string{"allocated": "allocate", "mapped": "map"} {
		t.Run(name, func(t *testing.T) {
			o := start(t, 0)
			const n = grain
			at, to := o.memory(kind, n, 1), memory(t, e, d, n)
			p := o.openAll(d)
			stream, done := hold(t, e, d, Copy{Peer: p, Runs: []Run{{Addr: at, Len: n}}, To: []Run{{Addr: to, Len: n}}})
			waits := make(chan error, 1)
			j, err := d.Transfer("waits", FromPeer).ready(Copy{Peer: p,
				Runs: []Run{{Addr: at, Len: n}}, To: []Run{{Addr: to, Len: n}}, Done: func(err error) { waits <- err }})
			if err != nil {
				t.Fatal(err)
			}
			closed := make(chan error, 1)
			go func() { closed <- p.Close() }()
			for q := d.queue(FromPeer); !q.isDrained() && e.Count("violations") == before; {
				runtime.Gosched()
			}
			if _, _, err := p.here([]Run{{Addr: at, Len: 1}}); !errors.Is(err, ErrPeerClosed) {
				t.Errorf("a copy begins while the memory is closed: %v", err)
			}
			e.Release(stream)
			if err := errors.Join(answer(t, closed), answer(t, done)); err != nil {
				t.Error(err)
			}
			if e.Wrong(to, n, 1) > 0 {
				t.Error("the copy that was under way has not landed")
			}
			j.t.begin(j)
			if err := answer(t, waits); !errors.Is(err, ErrPeerClosed) {
				t.Errorf("a copy that began after the close: %v", err)
			}
			if now := e.Count("violations"); now != before {
				t.Errorf("the memory was closed %d times while a copy used it", now-before)
			}
		})
	}
}

// isDrained: somebody waits for batches.
func (q *queue) isDrained() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.drains) > 0
}

// TestPeerReopened: the driver does not have a copy yet when the memory is closed, and other memory of P's is opened at the very address.
// The copy was of the first, and reads nothing of the other.
func TestPeerReopened(t *testing.T) {
	e, d := open(t, Options{})
	e.Bare("kvgpu_reuse_addresses", 1)
	t.Cleanup(func() { e.Bare("kvgpu_reuse_addresses", 0) })
	o := start(t, 0)
	first, second := o.memory("allocate", grain, 1), o.memory("allocate", grain, 2)
	to := memory(t, e, d, grain)
	a, _ := o.try(order{Do: "share"})
	p := d.Peer("prefill 1", a.Process)
	defer p.Close()
	here := func(i int, at uintptr) uintptr {
		if err := p.Open(a.Allocations[i], nil); err != nil {
			t.Fatal(err)
		}
		runs, _, err := p.here([]Run{{Addr: at, Len: 1}})
		if err != nil {
			t.Fatal(err)
		}
		return runs[0].Addr
	}
	was := here(0, first)
	e.Fill(to, grain, 9)
	done := make(chan error, 1)
	j, err := d.Transfer("a", FromPeer).ready(Copy{Peer: p,
		Runs: []Run{{Addr: first, Len: grain}}, To: []Run{{Addr: to, Len: grain}}, Done: func(err error) { done <- err }})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if now := here(1, second); now != was {
		t.Fatalf("the other memory lies at %#x, and the first lay at %#x: the test cannot fail", now, was)
	}
	j.t.begin(j)
	err = answer(t, done)
	if e.Wrong(to, grain, 2) == 0 {
		t.Error("other memory was read")
	}
	if !errors.Is(err, ErrPeerClosed) || e.Wrong(to, grain, 9) > 0 {
		t.Errorf("it ended with %v", err)
	}
}

// TestPeerCloseBound: if a copy does not end, the memory stays open, and Close says so in bounded time.
func TestPeerCloseBound(t *testing.T) {
	e, d := open(t, Options{StallTimeout: 100 * time.Millisecond})
	o := start(t, 0)
	at, to := o.memory("allocate", grain, 1), memory(t, e, d, grain)
	p := o.openAll(d)
	stream, done := hold(t, e, d, Copy{Peer: p, Runs: []Run{{Addr: at, Len: grain}}, To: []Run{{Addr: to, Len: grain}}})
	if err := p.Close(); !errors.Is(err, ErrStuck) || e.Count("ipc") != 1 {
		t.Errorf("closed: %v, and %d allocations are open", err, e.Count("ipc"))
	}
	if err := answer(t, done); !errors.Is(err, ErrStuck) {
		t.Error(err)
	}
	e.Release(stream)
	d.settled(t)
}

// TestPeerAndDeviceClose: a device that is closed gives back what peers have open, also while a peer is closed.
func TestPeerAndDeviceClose(t *testing.T) {
	e := engine.New(t, 0)
	o := start(t, 0)
	o.memory("allocate", grain, 1)
	o.memory("map", grain, 1)
	a, files := o.try(order{Do: "share"})
	for turn := range 20 {
		d, err := Open(0, Options{SlotBytes: grain})
		if err != nil {
			t.Fatal(err)
		}
		p := d.Peer("prefill 1", a.Process)
		if err := openEach(p, a, files); err != nil {
			t.Fatal(err)
		}
		closed := make(chan error, 1)
		if turn%2 == 0 {
			closed <- nil
		} else {
			go func() { closed <- p.Close() }()
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		if err := answer(t, closed); err != nil && !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		if n := e.Count("ipc") + e.Count("mapped") + e.Count("reserved"); n != 0 {
			t.Errorf("%d are open", n)
		}
		if err := p.Close(); err != nil && !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	}
}
