package verbs

import (
	"bytes"
	"errors"
	"testing"
	"time"
)

// wire is two connected queue pairs on one device, each with its queue, and
// memory that both may use.
type wire struct {
	dev      *Device
	pd       *PD
	mem      []byte
	mr       *MR
	cqA, cqB *CQ
	a, b     *QP
	routeA   Route // how a reaches b
}

const testMemory = 1 << 20

func newWire(t testing.TB, caps Caps) *wire {
	t.Helper()
	w := &wire{dev: openFirst(t)}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	end := func(f func() error) {
		t.Cleanup(func() {
			if err := f(); err != nil {
				t.Error(err)
			}
		})
	}
	var err error
	w.pd, err = w.dev.NewPD()
	must(err)
	end(w.pd.Close)
	w.mem = memory(t, testMemory)
	w.mr, err = w.pd.Register(uintptr(address(w.mem)), testMemory, LocalWrite|RemoteWrite|RelaxedOrdering)
	must(err)
	end(w.mr.Close)
	w.cqA, err = w.dev.NewCQ(256, 0)
	must(err)
	end(w.cqA.Close)
	w.cqB, err = w.dev.NewCQ(256, 0)
	must(err)
	end(w.cqB.Close)
	w.a, err = NewQP(w.pd, w.cqA, caps)
	must(err)
	end(w.a.Destroy)
	w.b, err = NewQP(w.pd, w.cqB, caps)
	must(err)
	end(w.b.Destroy)
	w.routeA = w.connect(t, w.a, w.b)
	return w
}

// connect brings two queue pairs of the device to ready to send and gives the
// path of the first.
func (w *wire) connect(t testing.TB, a, b *QP) Route {
	t.Helper()
	port, err := w.dev.Port(1)
	if err != nil {
		t.Fatal(err)
	}
	gids, err := w.dev.GIDs(1)
	if err != nil {
		t.Fatal(err)
	}
	gid := gids[0]
	for _, g := range gids {
		if g.Type == GIDRoCEv2 && bytes.HasPrefix(g.GID[:], []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff}) {
			gid = g
		}
	}
	path := func(from, to *QP) *Route {
		return &Route{
			Port: 1, RemoteWrite: true, RemoteQP: to.Number(), RemotePSN: to.Number() & 0xfff, LocalPSN: from.Number() & 0xfff,
			MTU: port.ActiveMTU, Global: port.LinkLayer == LinkEthernet, RemoteGID: gid.GID, SourceGIDIndex: gid.Index, HopLimit: 64,
			RemoteLID: port.LID, MinRNRTimer: 12, Timeout: 14, Retry: 6, RNRRetry: 6,
		}
	}
	for _, q := range [][2]*QP{{a, b}, {b, a}} {
		p := path(q[0], q[1])
		if err := errors.Join(q[0].Init(p), q[0].ReadyToReceive(p), q[0].ReadyToSend(p)); err != nil {
			t.Fatal(err)
		}
		if s, err := q[0].State(); err != nil || s != ReadyToSend {
			t.Fatalf("the queue pair is in %v, %v", s, err)
		}
	}
	return *path(a, b)
}

// await polls until n completions are there, by events.
func await(t testing.TB, q *CQ, n int) []Completion {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second) // a bound for a test that fails, not an expectation
	var all []Completion
	buf := make([]Completion, 16)
	for len(all) < n {
		if err := q.Arm(); err != nil {
			t.Fatal(err)
		}
		got, err := q.Poll(buf)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, buf[:got]...)
		if len(all) >= n || got > 0 {
			continue
		}
		if err := q.Wait(deadline); err != nil {
			t.Fatalf("%d of %d completions: %v", len(all), n, err)
		}
	}
	if len(all) > n {
		t.Fatalf("%d completions, want %d: %v", len(all), n, all)
	}
	return all
}

func (w *wire) sge(from, length int) SGE {
	return SGE{Addr: address(w.mem) + uint64(from), Length: uint32(length), Key: w.mr.LKey}
}
