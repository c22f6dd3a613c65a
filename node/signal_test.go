package node

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/wire"
)

func TestSignals(t *testing.T) {
	leaktest.Check(t)
	n := coretest.NewNetwork()
	p, d := openFakeAgent(t, n, testConfig(RolePrefill), nil), openFakeAgent(t, n, testConfig(RoleDecode), nil)
	unknownPeer := openFakeAgent(t, n, testConfig(RoleDecode), nil)
	goesBy(t, p, d, "t", viaRDMA)
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	target := core.Target{Bootstrap: p.BootstrapAddress()}
	_, via, err := unknownPeer.bus.Lookup(ctx, target)
	if err != nil {
		t.Fatal(err)
	}
	seen := p.fake.signals.Load()
	raw := func(s *fakeAgent, transport string, msg []byte) *wire.Reply {
		t.Helper()
		rep, err := s.bus.Request(ctx, via, p.ID(), &wire.Request{Kind: wire.KindSignal, From: string(s.ID()), Signal: &wire.Signal{Transport: transport, Data: msg}})
		if err != nil {
			t.Fatal(err)
		}
		return rep
	}
	if rep := raw(unknownPeer, viaRDMA, []byte("hello")); rep.Again != wire.AgainAfterHello {
		t.Errorf("an unknown peer's signal is answered with %+v", rep)
	}
	for _, name := range []string{viaTCP, "shm", ""} {
		if rep := raw(d, name, []byte("hello")); core.Code(rep.Code) != core.Refused || !strings.Contains(rep.Reason, `"rdma", "tcp"`) {
			t.Errorf("a signal for %q is answered with %+v", name, rep)
		}
	}
	if got := p.fake.signals.Load(); got != seen {
		t.Errorf("%d signals came through", got-seen)
	}

	echo := func(_ core.AgentID, msg []byte) ([]byte, error) {
		if string(msg) == "fail" {
			return nil, errors.New("the keys are stale")
		}
		return msg, nil
	}
	p.fake.answerer.Store(&echo)
	d.fake.answerer.Store(&echo)
	big := make([]byte, wire.MaxSignal)
	big[len(big)-1] = 7
	for what, s := range map[string]struct {
		signal core.Signal
		to     core.AgentID
	}{"to prefill": {d.fake.signal, p.ID()}, "to decode": {p.fake.signal, d.ID()}} {
		if got, err := s.signal(ctx, s.to, []byte("hi")); err != nil || string(got) != "hi" {
			t.Errorf("%s: %q, %v", what, got, err)
		}
		if got, err := s.signal(ctx, s.to, big); err != nil || !slices.Equal(got, big) {
			t.Errorf("%s: the longest signal: %d bytes, %v", what, len(got), err)
		}
		if _, err := s.signal(ctx, s.to, append(big, 1)); !errors.Is(err, core.ErrTooLarge) {
			t.Errorf("%s: one byte more: %v", what, err)
		}
		if _, err := s.signal(ctx, s.to, []byte("fail")); err == nil || !strings.Contains(err.Error(), "the keys are stale") || !strings.Contains(err.Error(), string(s.to)) {
			t.Errorf("%s: an error came as %v", what, err)
		}
	}
	if _, err := d.fake.signal(ctx, "nobody", []byte("hi")); err == nil {
		t.Error("a signal to an agent that was not met was sent")
	}
	more := func(core.AgentID, []byte) ([]byte, error) { return make([]byte, wire.MaxSignal+1), nil }
	p.fake.answerer.Store(&more)
	if _, err := d.fake.signal(ctx, p.ID(), []byte("hi")); err == nil || !strings.Contains(err.Error(), "at most") {
		t.Errorf("an answer of a byte too much: %v", err)
	}
}

// TestSlowSignals: signals that are slow to handle take only a part of the handlers, and
// those of one peer only a part of that. A peer that finds these handlers taken asks again.
func TestSlowSignals(t *testing.T) {
	leaktest.Check(t)
	n := coretest.NewNetwork()
	p, d := openFakeAgent(t, n, testConfig(RolePrefill), nil), openFakeAgent(t, n, testConfig(RoleDecode), nil)
	goesBy(t, p, d, "t", viaRDMA)
	var running, most atomic.Int32
	release := make(chan struct{})
	slow := func(_ core.AgentID, msg []byte) ([]byte, error) {
		now := running.Add(1)
		defer running.Add(-1)
		for old := most.Load(); now > old && !most.CompareAndSwap(old, now); old = most.Load() {
		}
		<-release
		return msg, nil
	}
	p.fake.answerer.Store(&slow)
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	errs := make(chan error, 20)
	for range cap(errs) {
		go func() {
			_, err := d.fake.signal(ctx, p.ID(), []byte("x"))
			errs <- err
		}()
	}
	until(t, "as many are handled as may be", func() bool { return running.Load() == maxSignalsEach })
	goesBy(t, p, d, "beside", viaRDMA)
	close(release)
	for range cap(errs) {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if got := most.Load(); got != maxSignalsEach {
		t.Errorf("%d signals of one peer were handled at a time, want %d", got, maxSignalsEach)
	}
	short, stop := context.WithTimeout(ctx, 50*time.Millisecond)
	defer stop()
	others := func(n int) { // of other peers
		p.signals.limiter.mu.Lock()
		defer p.signals.limiter.mu.Unlock()
		p.signals.limiter.total += n
	}
	others(maxSignals)
	if _, err := d.fake.signal(short, p.ID(), []byte("x")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a signal while all places are taken: %v", err)
	}
	others(-maxSignals)
	if _, err := d.fake.signal(ctx, p.ID(), []byte("x")); err != nil {
		t.Errorf("a signal when they are free again: %v", err)
	}
}
