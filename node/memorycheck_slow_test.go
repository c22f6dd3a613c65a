package node

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/devices"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
	"github.com/kvconn/kvconn/rig/timed"
	"github.com/kvconn/kvconn/wire"
)

// answeredBus is a bus that tells of messages of one kind that were answered.
type answeredBus struct {
	core.Bus
	kind     wire.Kind
	of       string        // a transfer that a renewal must be of
	answered chan struct{} // has room for one
}

// watchAnswers has one of an agent's messages of a kind; renewals are those of a transfer.
func watchAnswers(a *Agent, kind wire.Kind, of string) *answeredBus {
	b := &answeredBus{Bus: a.bus, kind: kind, of: of, answered: make(chan struct{}, 1)}
	setBus(a, b)
	return b
}

func (b *answeredBus) Request(ctx context.Context, via core.Via, to core.AgentID, req *wire.Request) (*wire.Reply, error) {
	rep, err := b.Bus.Request(ctx, via, to, req)
	counts := req.Renew == nil || slices.Contains(req.Renew.Loads, b.of) || slices.Contains(req.Renew.Claims, b.of)
	if counts && req.Kind == b.kind && err == nil && rep.Code == 0 {
		select {
		case b.answered <- struct{}{}:
		default:
		}
	}
	return rep, err
}

// wait waits for so many answers.
func (b *answeredBus) wait(t *testing.T, n int) {
	t.Helper()
	late := time.NewTimer(bound)
	defer late.Stop()
	for range n {
		select {
		case <-b.answered:
		case <-late.C:
			t.Fatalf("no message of kind %v was answered within %v", b.kind, bound)
		}
	}
}

// onDevice opens an agent whose cache lies on a device of the driver double.
func onDevice(t *testing.T, role string, device int, set func(*Config)) (*side, *engine.Engine) {
	t.Helper()
	e := engine.New(t, device)
	cfg := testConfig(role)
	cfg.Transport = viaTCP
	set(&cfg)
	a, err := Open(cfg, Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })
	if err := a.RegisterKVCaches([]kv.Region{{Name: "layer.0", Base: uint64(e.Alloc(numBlocks * blockBytes)), Memory: kv.DeviceMemory(0),
		BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: numBlocks}}); err != nil {
		t.Fatal(err)
	}
	return &side{Agent: a, t: t, seen: map[core.TransferID]core.Report{}}, e
}

// slowCheck is a pair of agents. One of them checks its memory for the transfer "slow", and its driver does not answer until unblock. The
// transfers "waits" and "cancelled" wait at prefill meanwhile.
type slowCheck struct {
	p, d, checking *side
	e              *engine.Engine
	ends, renewals *answeredBus // messages of the one that checks, and of decode
	unblock        func()
}

func checkSlowly(t *testing.T, ours string, set func(*Config)) *slowCheck {
	t.Helper()
	p, pe := onDevice(t, RolePrefill, 0, set)
	d, de := onDevice(t, RoleDecode, 1, set)
	s := &slowCheck{p: p, d: d, checking: p, e: pe}
	if ours == RoleDecode {
		s.checking, s.e = d, de
	}
	s.ends, s.renewals = watchAnswers(s.checking.Agent, wire.KindFinish, ""), watchAnswers(d.Agent, wire.KindRenew, "slow")
	announce(t, p, "waits", "cancelled")
	d.load("waits", p.BootstrapAddress(), 1)
	d.load("cancelled", p.BootstrapAddress(), 2)
	until(t, "two loads wait at prefill", func() bool { return d.Stats().LoadsWaiting == 2 })

	stream := s.e.Stream()
	s.e.Hold(stream)
	after, err := s.checking.Moment(0, stream)
	if err != nil {
		t.Fatal(err)
	}
	selection := kv.Selection{Blocks: [][]kv.BlockID{{3}}}
	if ours == RolePrefill {
		d.load("slow", p.BootstrapAddress(), 3)
		_, err = p.Offer([]core.OfferRequest{{ID: "slow", Selection: selection, After: after}})
	} else {
		p.offer("slow", 3)
		from := core.Target{Bootstrap: p.BootstrapAddress()}
		_, err = d.StartLoad([]core.LoadRequest{{ID: "slow", From: from, Selection: selection, After: after}})
	}
	if err != nil {
		t.Fatal(err)
	}
	until(t, "the other side has begun", func() bool {
		return p.Stats().OffersUnderWay == 3 && (ours == RoleDecode || d.Stats().LoadsWaiting == 3)
	})
	s.e.Block("cuPointerGetAttribute")
	s.unblock = sync.OnceFunc(s.e.Unblock)
	t.Cleanup(s.unblock)
	s.e.Release(stream)
	until(t, "the check waits for the driver", func() bool { return s.e.Count("blocked") > 0 })
	return s
}

// TestSlowMemoryCheck: the driver does not answer what lies under the region of a transfer that is to begin. Meanwhile decode renews
// the transfer and is answered, and the agent tells its peer of an end by a message. When the driver has answered, the transfer goes well.
func TestSlowMemoryCheck(t *testing.T) {
	for _, ours := range []string{RolePrefill, RoleDecode} {
		t.Run(ours, func(t *testing.T) {
			leaktest.Check(t)
			s := checkSlowly(t, ours, func(c *Config) { c.PeerTimeout = Seconds(6 * time.Second) }) // three renewals in that time
			s.renewals.wait(t, 3)                                                                   // one was answered before, perhaps, and one asked for before: there is one at a time
			if _, err := s.checking.Cancel([]core.TransferID{"cancelled"}, "of a test"); err != nil {
				t.Fatal(err)
			}
			s.ends.wait(t, 1)
			if n := s.e.Count("blocked"); n == 0 {
				t.Error("the check has ended")
			}
			s.unblock()
			s.d.want("slow", core.OK)
			s.p.want("slow", core.OK)
		})
	}
}

// TestCloseDuringMemoryCheck: a close of an agent whose driver does not answer a check ends within close_timeout_s, with an error. Each half has
// its report. When the driver answers, nothing is left behind.
func TestCloseDuringMemoryCheck(t *testing.T) {
	for _, ours := range []string{RolePrefill, RoleDecode} {
		t.Run(ours, func(t *testing.T) {
			leaktest.Check(t)
			const closes = 2 * time.Second
			timed.Within(t, closes+2*time.Second, "Close", func() time.Duration { return closeDuringMemoryCheck(t, ours, closes) })
		})
	}
}

// closeDuringMemoryCheck returns how long the close took.
func closeDuringMemoryCheck(t *testing.T, ours string, closes time.Duration) time.Duration {
	t.Helper()
	s := checkSlowly(t, ours, func(c *Config) { c.CloseTimeout = Seconds(closes) })
	closed, began := make(chan error, 1), time.Now()
	go func() { closed <- s.checking.Close() }()
	select {
	case err := <-closed:
		if !errors.Is(err, devices.ErrDevice) {
			t.Errorf("the close ends with %v", err)
		}
	case <-time.After(bound):
		t.Fatalf("the close has not ended within %v", bound)
	}
	took := time.Since(began)
	for _, id := range []core.TransferID{"slow", "waits", "cancelled"} {
		if s.checking == s.p && id != "slow" {
			continue // the engine has announced it only
		}
		s.checking.want(id, core.Closed)
	}
	if n := s.e.Count("blocked"); n == 0 {
		t.Error("the check has ended")
	}
	s.unblock()
	return took
}

// TestWritesThatWait: what is added to a write that waits for the driver goes along with it. A write that is begun after a stop does not.
func TestWritesThatWait(t *testing.T) {
	src := kv.Selection{Blocks: [][]kv.BlockID{{7, 8, 9}}}
	some, both := kv.Selection{Blocks: [][]kv.BlockID{{7}}}, kv.Selection{Blocks: [][]kv.BlockID{{7, 8}}}
	first := core.Write{ID: "a", Src: some, End: []uint32{1}}
	more := core.Write{ID: "a", Src: both, Begin: []uint32{1}, End: []uint32{2}, Extends: true}
	rest := core.Write{ID: "a", Src: src, Begin: []uint32{2}, Extends: true}
	other := core.Write{ID: "b", Src: some, Begin: []uint32{4}, End: []uint32{5}, Extends: true}
	q := newActionQueue()
	for _, act := range []core.Action{first, other, more, rest, core.StopWrite{ID: "a"}, first, more} {
		q.add(act)
	}
	want := []core.Action{core.Write{ID: "a", Src: src}, other, core.StopWrite{ID: "a"}, core.Write{ID: "a", Src: both, End: []uint32{2}}}
	if !reflect.DeepEqual(q.list, want) {
		t.Errorf("these wait: %+v", q.list)
	}
	h := &lockedMachine{}
	if list, _ := h.take(&q); len(list) != len(want) {
		t.Fatalf("%d actions", len(list))
	}
	q.add(rest) // of a write that was taken
	if !reflect.DeepEqual(q.list, []core.Action{rest}) {
		t.Errorf("these wait: %+v", q.list)
	}
}
