package rdma

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
)

// changing are GPUs whose memory becomes another. Each Check takes an answer from the test.
type changing struct {
	GPUs
	t      *testing.T
	asked  chan struct{}
	answer chan error
	over   chan struct{}
}

func (c *changing) Count() int { return 1 }

func (c *changing) Check() error {
	select {
	case c.asked <- struct{}{}:
		return <-c.answer
	case <-c.over:
		return errors.New("the test is over")
	}
}

// says answers the next Check.
func (c *changing) says(err error) {
	c.t.Helper()
	c.asks()
	c.answer <- err
}

// asks waits for a Check.
func (c *changing) asks() {
	c.t.Helper()
	select {
	case <-c.asked:
	case <-time.After(patience):
		c.t.Fatal("nobody asks for the memory")
	}
}

// renewable is a transport without cards.
func renewable(t *testing.T, signal core.Signal) (*Transport, *changing, *coretest.Recorder) {
	c := &changing{t: t, asked: make(chan struct{}), answer: make(chan error), over: make(chan struct{})}
	rec := coretest.NewRecorder(t, "agent")
	tr := &Transport{cfg: DefaultConfig(), id: "agent", log: zap.NewNop(), layout: &kv.Layout{}, sink: rec, signal: signal}
	tr.cfg.GPUs = c
	tr.ctx, tr.cancel = context.WithCancel(context.Background())
	tr.remapping.held = true
	tr.receiver.init(tr, 4)
	tr.sender.init(tr)
	t.Cleanup(func() {
		close(c.over)
		tr.cancel()
		tr.wg.Wait()
		rec.Shut()
	})
	return tr, c, rec
}

func silentPeer(context.Context, core.AgentID, []byte) ([]byte, error) { return nil, core.ErrAbsent }

// ended waits until a registration that is under way has ended, and the peers have been asked.
func (t *Transport) ended() {
	late := time.After(patience)
	for busy := t.remapping.waits(); busy != nil; busy = t.remapping.waits() {
		select {
		case <-busy:
		case <-late:
			return // what the test looks at then is not there
		}
	}
}

// lacking compares what is said of the memory.
func lacking(t *testing.T, tr *Transport, says string, wantAgain bool) {
	t.Helper()
	why, again := tr.Lacks()
	if says == "" && why != nil || says != "" && (why == nil || !strings.Contains(why.Error(), says)) || again != wantAgain {
		t.Fatalf("it lacks the memory: %v, again: %v; want %q, %v", why, again, says, wantAgain)
	}
}

// idle waits until the goroutine that renews has nothing to do.
func idle(t *testing.T, tr *Transport) {
	t.Helper()
	soon(t, "the goroutine that renews ends", func() bool {
		tr.remapping.mu.Lock()
		defer tr.remapping.mu.Unlock()
		return !tr.remapping.runs
	})
}

// TestRenew: the memory is given up once, and is there when it has been registered and is the same still.
func TestRenew(t *testing.T) {
	tr, gpus, _ := renewable(t, silentPeer)
	lacking(t, tr, "", false)
	tr.Renew() // nothing to do
	tr.Forget(errors.New("region k has changed"))
	tr.Forget(errors.New("another word of it"))
	idle(t, tr)
	lacking(t, tr, "region k has changed", true)
	if err := tr.registered(time.Hour); err == nil || !strings.Contains(err.Error(), "region k") {
		t.Errorf("nobody registers it, and it is registered: %v", err)
	}
	tr.Renew()
	tr.Renew()
	gpus.says(nil)
	lacking(t, tr, "region k has changed", false)
	gpus.says(nil)
	if err := tr.registered(time.Hour); err != nil {
		t.Error(err)
	}
	lacking(t, tr, "", false)
}

// TestRenewOvertaken: memory that becomes another while it is registered is not used, and is forgotten once more.
func TestRenewOvertaken(t *testing.T) {
	tr, gpus, _ := renewable(t, silentPeer)
	tr.Forget(errors.New("region k has changed"))
	tr.Renew()
	gpus.asks()
	tr.Forget(errors.New("region v has changed")) // while it is looked at
	gpus.answer <- nil
	gpus.says(nil)
	idle(t, tr)
	lacking(t, tr, "region v has changed", true)

	tr.Renew()
	gpus.says(nil)
	gpus.says(errors.New("region w has changed")) // when it has been registered
	idle(t, tr)
	tr.remapping.mu.Lock()
	tr.remapping.retryAt = time.Now().Add(time.Hour)
	tr.remapping.mu.Unlock()
	lacking(t, tr, "cannot be registered: region w has changed", false) // soon
	tr.Forget(errors.New("it was forgotten already"))
	lacking(t, tr, "region w has changed", false)
	tr.Renew()
	gpus.says(nil)
	tr.Forget(errors.New("region x has changed"))
	tr.Renew() // in the same moment
	gpus.says(nil)
	gpus.says(nil)
	gpus.says(nil)
	if err := tr.registered(time.Hour); err != nil {
		t.Error(err)
	}
	lacking(t, tr, "", false)
}

// TestRenewFails: a failure is tried again, later each time.
func TestRenewFails(t *testing.T) {
	tr, gpus, _ := renewable(t, silentPeer)
	tr.Forget(errors.New("region k has changed"))
	for _, want := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second} {
		tr.Renew()
		before := time.Now()
		gpus.says(errors.New("BAR1 is full"))
		tr.ended()
		idle(t, tr)
		tr.remapping.mu.Lock()
		if at := tr.remapping.retryAt; at.Before(before.Add(want)) {
			t.Errorf("it is tried again %v after it has failed, want %v", at.Sub(before), want)
		}
		tr.remapping.retryAt = before
		tr.remapping.mu.Unlock()
		lacking(t, tr, "BAR1 is full", true)
	}
}

// told are the signals that a peer gets, which answers none with lanes.
type told struct {
	mu   sync.Mutex
	list []signal
}

func (p *told) signal(_ context.Context, _ core.AgentID, msg []byte) ([]byte, error) {
	s, err := decodeSignal(msg)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.list = append(p.list, *s)
	return (&reply{}).MarshalMsg(nil)
}

// TestForgetWrites: P's writes of before fail with the cause. One that comes later goes another way, when D has been told
// that this one is not there.
func TestForgetWrites(t *testing.T) {
	peer := &told{}
	tr, _, rec := renewable(t, peer.signal)
	if _, err := tr.Admit("d"); err != nil {
		t.Fatal(err)
	}
	cn := tr.sender.conn("d")
	cn.mu.Lock()
	cn.remote, cn.reconnecting = &remoteInfo{secret: []byte("secret")}, true // the test reconnects
	cn.on(eventPorts)
	cn.mu.Unlock()
	tr.Write(core.WriteOp{ID: "before", Peer: "d", Bytes: 10})
	tr.Forget(errors.New("region k has changed"))
	if err := rec.Wait("written", "before", 1).Err; err == nil || !strings.Contains(err.Error(), "region k has changed") || errors.Is(err, core.ErrOtherWay) {
		t.Errorf("a write of before ended with %v", err)
	}
	idle(t, tr)
	tr.Write(core.WriteOp{ID: "after", Peer: "d", Bytes: 10})
	tr.Extend(core.WriteOp{ID: "after", Peer: "d", Pairs: []kv.Pair{{Length: 10}}})
	cn.reconnectLoop()
	if err := rec.Wait("written", "after", 1).Err; !errors.Is(err, core.ErrOtherWay) || !strings.Contains(err.Error(), "region k has changed") {
		t.Errorf("a write of after ended with %v", err)
	}
	peer.mu.Lock()
	defer peer.mu.Unlock()
	if len(peer.list) == 0 || peer.list[0].Kind != signalConnected || !strings.Contains(peer.list[0].Reason, "region k has changed") || len(peer.list[0].Lanes) > 0 {
		t.Errorf("D was told %+v", peer.list)
	}
}

// TestForgetKeys: with the memory D gives up what P may know: P gets no keys until the memory is registered again, and
// lanes that P makes with keys of before are refused.
func TestForgetKeys(t *testing.T) {
	tr, gpus, rec := renewable(t, silentPeer)
	ticket := []byte("ticket")
	if err := tr.Connect("p", "", ticket); err != nil {
		t.Fatal(err)
	}
	src := tr.receiver.source("p")
	soon(t, "P was not reached", func() bool {
		src.mu.Lock()
		defer src.mu.Unlock()
		return src.cause != nil && src.cause != errUnsettled
	})
	ask := func(s *signal) (*reply, error) {
		s.Ticket = ticket
		return tr.receiver.signalled("p", s)
	}
	ports := func() *reply {
		t.Helper()
		rep, err := ask(&signal{Kind: signalPorts, Tries: true})
		if err != nil {
			t.Fatal(err)
		}
		return rep
	}
	old := ports().Secret
	if _, err := ask(&signal{Kind: signalConnected, Secret: []byte("any")}); err != nil {
		t.Errorf("before: %v", err)
	}
	if _, err := tr.Expect("armed", "p", nil); err != nil {
		t.Fatal(err)
	}
	tr.Forget(errors.New("region k has changed"))
	if err := rec.Wait("received", "armed", 1).Err; err == nil || !strings.Contains(err.Error(), "region k has changed") || errors.Is(err, core.ErrConnectionLost) {
		t.Errorf("a transfer of before ended with %v", err)
	}
	if _, err := tr.Expect("next", "p", nil); err == nil || !strings.Contains(err.Error(), "region k has changed") {
		t.Errorf("a transfer without memory: %v", err)
	}
	if rep := ports(); len(rep.Ports) > 0 || !strings.Contains(rep.Lacks, "region k has changed") {
		t.Errorf("P was told %+v", rep)
	} else if _, err := (&Config{}).newRemoteInfo(rep); err == nil || !strings.Contains(err.Error(), "region k has changed") {
		t.Errorf("P reads it as %v", err)
	}
	tr.Renew()
	gpus.says(nil)
	gpus.says(nil)
	tr.ended()
	now := ports()
	if bytes.Equal(now.Secret, old) || now.Lacks != "" {
		t.Errorf("keys of before count: %+v", now)
	}
	for _, kind := range []signalKind{signalConnect, signalConnected} {
		for _, secret := range [][]byte{old, nil} {
			if _, err := ask(&signal{Kind: kind, Secret: secret}); err == nil || !strings.Contains(err.Error(), "other memory since") {
				t.Errorf("signal %d with keys of before: %v", kind, err)
			}
		}
		if _, err := ask(&signal{Kind: kind, Secret: now.Secret}); err != nil {
			t.Errorf("signal %d: %v", kind, err)
		}
	}
	if _, err := tr.Expect("next", "p", nil); err != nil {
		t.Error(err)
	}
	tr.Revoke("next")
}
