package rdma

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// breakAll has all lanes of an agent break, as when its links go down.
func (s *agent) breakAll() {
	for _, p := range s.tr.ports {
		s.tr.sender.portDown(p, errors.New("broken by the test"))
		s.tr.receiver.portDown(p, errors.New("broken by the test"))
	}
}

func firstDevice(t *testing.T) string {
	t.Helper()
	lib, err := verbs.Load()
	if err != nil {
		t.Fatal(err)
	}
	list, err := lib.Devices()
	if err != nil {
		t.Fatal(err)
	}
	return list[0].Name
}

// soon waits for a condition of the other side's.
func soon(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// TestRevokeBetweenLanes: D has lost all lanes, so that a revoke needs no answer of P. P
// knows which stripes have not arrived. When P has lanes again, it must not write them.
func TestRevokeBetweenLanes(t *testing.T) {
	needsRDMA(t)
	c := newControl()
	held, release := make(chan struct{}), make(chan struct{})
	var hold atomic.Bool
	c.decide = func(from core.AgentID, s *signal) fault {
		if s.Kind == signalConnect && hold.CompareAndSwap(true, false) {
			close(held)
			<-release
		}
		return passes
	}
	const n = 160
	p, d := start(t, c, "p", n, nil), start(t, c, "d", n, nil)
	connect(t, d, p)
	usable(t, d, p)
	p.paint(1, 0, n)
	p.write("t", d, d.expect("t", p, 0, n), 0, 0, n)
	d.landed(0, n, false)
	hold.Store(true)
	d.breakAll()
	select {
	case <-held:
	case <-time.After(patience):
		t.Fatal("P makes no lanes")
	}
	d.tr.Revoke("t")
	if len(d.rec.All("received", "t")) > 0 {
		t.Fatal("the transfer had ended: it must be larger")
	}
	d.fill(0, n)
	close(release)
	if o := p.rec.Wait("written", "t", 1); !errors.Is(o.Err, core.ErrNotExpected) {
		t.Errorf("written: %v", o.Err)
	}
	p.paint(2, 0, 1)
	p.write("next", d, d.expect("next", p, 0, 1), 0, 0, 1)
	if o := d.rec.Wait("received", "next", 1); o.Err != nil {
		t.Error(o.Err)
	}
	d.untouched("a transfer that was revoked while there was no lane", 1, n-1)
}

// TestKeyGone: D's memory is not registered any more. The transfer, which no lane can carry, ends.
func TestKeyGone(t *testing.T) {
	needsRDMA(t)
	c := newControl()
	const n = 4
	p, d := start(t, c, "p", n, nil), start(t, c, "d", n, nil)
	connect(t, d, p)
	usable(t, d, p)
	for _, dev := range d.tr.devices {
		for _, mr := range dev.memory.Load().mrs {
			if err := mr.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	p.write("t", d, d.expect("t", p, 0, n), 0, 0, n)
	// A connection that is lost would be tried again. That D's device refuses twice in a row is D's memory's fault.
	if o := p.rec.Wait("written", "t", 1); o.Err == nil || errors.Is(o.Err, core.ErrConnectionLost) || !strings.Contains(o.Err.Error(), `does not let bytes into region "kv"`) {
		t.Errorf("written: %v", o.Err)
	} else {
		t.Log(o.Err)
	}
	d.tr.Revoke("t")
	d.untouched("memory that is not registered", 0, n)
}

// TestSignalsWhileAPortIsDown: P asks once per pause whether a port is back, not
// without end, though something is written all the time.
func TestSignalsWhileAPortIsDown(t *testing.T) {
	needsRDMA(t)
	c := newControl()
	const n = 16
	p, d := start(t, c, "p", n, nil), start(t, c, "d", n, nil)
	if len(p.tr.ports) < 2 {
		t.Skip("needs two devices: rxe-vm --paths 2")
	}
	connect(t, d, p)
	usable(t, d, p)
	down := *p.tr.ports[0].state.Load()
	down.up = false
	p.tr.ports[0].state.Store(&down)
	p.breakPort()
	began := time.Now()
	for i := 0; time.Since(began) < 4*firstPause; i++ {
		id := core.TransferID(fmt.Sprint("t", i))
		p.write(id, d, d.expect(id, p, 0, n), 0, 0, n)
		if o := d.rec.Wait("received", id, 1); o.Err != nil {
			t.Fatal(o.Err)
		}
	}
	got, most := c.count(signalPorts), 4+2*int(time.Since(began)/firstPause)
	t.Logf("P has asked for D's ports %d times", got)
	if got > most {
		t.Errorf("that is too often within %v, want at most %d", time.Since(began), most)
	}
}

// TestRevokeInClose: a Revoke beside Close, and one beside another Revoke, return
// when nothing can land any more.
func TestRevokeInClose(t *testing.T) {
	needsRDMA(t)
	c := newControl()
	const n = 8
	p, d := start(t, c, "p", n, nil), start(t, c, "d", n, nil)
	connect(t, d, p)
	usable(t, d, p)
	d.expect("t", p, 0, n)
	r := &d.tr.receiver
	src := r.source(p.id)
	src.mu.Lock() // neither gets on
	closed, revoked := make(chan struct{}), make(chan struct{}, 2)
	go func() {
		defer close(closed)
		d.close(c)
	}()
	soon(t, "D closes", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.closed
	})
	for range 2 {
		go func() {
			d.tr.Revoke("t")
			revoked <- struct{}{}
		}()
	}
	select {
	case <-revoked:
		t.Errorf("Revoke has returned while %d lanes were open", len(src.lanes))
	case <-time.After(100 * time.Millisecond):
	}
	src.mu.Unlock()
	<-closed
	<-revoked
}

// TestConnectInDismiss: a connect that meets a Dismiss leaves no lane behind.
func TestConnectInDismiss(t *testing.T) {
	needsRDMA(t)
	c := newControl()
	p, d := start(t, c, "p", 1, nil), start(t, c, "d", 1, nil)
	connect(t, d, p)
	usable(t, d, p)
	src := d.tr.receiver.source(p.id)
	l := p.tr.sender.conn(d.id)
	// As a handler of signals that has found the source just before.
	d.tr.receiver.dismiss(p.id)
	src.mu.Lock()
	err := src.knows(&signal{Ticket: l.ticket})
	src.mu.Unlock()
	if !errors.Is(err, errRefused) {
		t.Errorf("a dismissed peer may connect: %v", err)
	}
}

// holdDestroys has the destruction of all lanes that there are take until release.
func (s *agent) holdDestroys() (release func()) {
	var all []*lane
	if cn := s.tr.sender.conns["d"]; cn != nil {
		cn.mu.Lock()
		all = append(all, cn.lanes...)
		cn.mu.Unlock()
	}
	if src := s.tr.receiver.sources["p"]; src != nil {
		src.mu.Lock()
		for _, l := range src.lanes {
			all = append(all, l)
		}
		src.mu.Unlock()
	}
	let := make(chan struct{})
	for _, l := range all {
		held := make(chan struct{})
		go l.once.Do(func() {
			close(held)
			<-let
			l.end()
		})
		<-held
	}
	return sync.OnceFunc(func() { close(let) })
}

// TestSlowDestroy: the kernel takes its time to destroy queue pairs. Long before that, their
// transfers have gone on by other lanes and have ended, and a revoke has returned.
func TestSlowDestroy(t *testing.T) {
	needsRDMA(t)
	c := newControl()
	const n = 160
	p, d := start(t, c, "p", n, nil), start(t, c, "d", n, nil)
	connect(t, d, p)
	usable(t, d, p)
	p.paint(1, 0, n)
	grant := d.expect("t", p, 0, n)
	d.expect("revoked", p, 0, 1)
	for _, s := range []*agent{p, d} {
		release := s.holdDestroys()
		defer release()
	}
	p.write("t", d, grant, 0, 0, n)
	d.landed(0, n, false)
	p.breakAll()
	if o := p.rec.Wait("written", "t", 1); o.Err != nil && !errors.Is(o.Err, core.ErrNotExpected) { // D may have had all of it
		t.Errorf("written: %v", o.Err)
	}
	if o := d.rec.Wait("received", "t", 1); o.Err != nil {
		t.Errorf("received: %v", o.Err)
	}
	d.has(1, 0, n)
	d.breakAll()
	d.tr.Revoke("revoked")
}

// TestProbe: a lane's probe carries bytes, into memory that is nobody's.
func TestProbe(t *testing.T) {
	needsRDMA(t)
	c := newControl()
	p, d := start(t, c, "p", 1, nil), start(t, c, "d", 1, nil)
	for i := range p.tr.memory.scratch {
		p.tr.memory.scratch[i] = 0x5A
	}
	connect(t, d, p)
	usable(t, d, p)
	for i, b := range d.tr.memory.scratch {
		if b != 0x5A {
			t.Fatalf("byte %d of %d that a probe should have carried is %#x", i, scratchBytes, b)
		}
	}
	d.untouched("a probe", 0, 1)
}

// TestReceiversPortReturns: P hears that a port of D is active again, and tries it at
// once, though it had given it up for long.
func TestReceiversPortReturns(t *testing.T) {
	needsRDMA(t)
	c := newControl()
	p, d := start(t, c, "p", 1, nil), start(t, c, "d", 1, nil)
	if len(p.tr.ports) < 2 {
		t.Skip("needs two devices: rxe-vm --paths 2")
	}
	connect(t, d, p)
	usable(t, d, p)
	cn := p.tr.sender.conn(d.id)
	at := func() (n int) {
		cn.mu.Lock()
		defer cn.mu.Unlock()
		for _, l := range cn.lanes {
			if l.port == p.tr.ports[0] {
				n++
			}
		}
		return n
	}
	soon(t, "lanes at the first port", func() bool { return at() == p.tr.cfg.QueuePairs })
	cn.update(func(cn *conn) {
		for _, r := range cn.paths {
			r.pause, r.upSince = longPause, time.Now()
		}
	})
	p.breakPort()
	soon(t, "D has ended its side", func() bool {
		cn.mu.Lock()
		defer cn.mu.Unlock()
		return len(cn.lost) == 0 && !cn.reconnecting
	})
	if n := at(); n != 0 {
		t.Fatalf("%d lanes are at a port that is given up", n)
	}
	d.tr.receiver.portUp(d.tr.ports[0])
	soon(t, "lanes at the port that is active again", func() bool { return at() == p.tr.cfg.QueuePairs })
}
