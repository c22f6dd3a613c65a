package rdma

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
)

// slowSink holds one outcome, and with it the goroutine that takes completions.
type slowSink struct {
	core.Sink
	id      core.TransferID
	held    chan struct{}
	release chan struct{}
}

func newSlowSink(id core.TransferID) *slowSink {
	return &slowSink{id: id, held: make(chan struct{}), release: make(chan struct{})}
}

func (s *slowSink) wrap(to core.Sink) core.Sink {
	s.Sink = to
	return s
}

func (s *slowSink) Received(id core.TransferID, st core.TransferStats, err error) {
	if id == s.id {
		close(s.held)
		<-s.release
	}
	s.Sink.Received(id, st, err)
}

func (s *slowSink) Written(id core.TransferID, st core.TransferStats, err error) {
	if id == s.id {
		close(s.held)
		<-s.release
	}
	s.Sink.Written(id, st, err)
}

// TestUnreadMarks: the lanes break before D has looked at the marks that landed by them.
// The marks must count before D tells P which stripes have arrived, or not at all. P
// writes the missing stripes again, and a mark that counts later would end the transfer
// while bytes still come.
func TestUnreadMarks(t *testing.T) {
	needsRDMA(t)
	c := newControl()
	c.config = func(cfg *Config) {
		cfg.ConnectTimeout = patience          // signals may wait
		cfg.Devices = []string{firstDevice(t)} // whose completions have one goroutine
	}
	var lost atomic.Bool
	release := make(chan struct{})
	let := sync.OnceFunc(func() { close(release) })
	defer let()
	pSink, dSink := newSlowSink("first"), newSlowSink("first")
	look := sync.OnceFunc(func() { close(dSink.release) })
	c.decide = func(from core.AgentID, s *signal) fault {
		if s.Kind == signalConnect && lost.Load() {
			look() // D has said what has arrived, and looks at its marks now
			<-release
		}
		return passes
	}
	const n = 8
	p, d := start(t, c, "p", n, pSink.wrap), start(t, c, "d", n, dSink.wrap)
	defer look()
	connect(t, d, p)
	usable(t, d, p)
	p.paint(1, 0, 1)
	p.write("first", d, d.expect("first", p, 0, 1), 0, 0, 1)
	<-pSink.held
	<-dSink.held // from here on neither side reads completions of these lanes
	p.paint(2, 1, n-1)
	p.write("t", d, d.expect("t", p, 1, n-1), 1, 1, n-1)
	d.landed(1, n-1, true)
	lost.Store(true)
	d.breakAll()
	close(pSink.release) // P has lost its lanes before it hears that all is written
	// Or D does not say what has arrived before it has looked at the marks.
	late := time.AfterFunc(3*flushBound, look)
	defer late.Stop()
	if o := d.rec.Wait("received", "t", 1); o.Err != nil {
		t.Fatalf("received: %v", o.Err)
	}
	d.has(2, 1, n-1)
	d.fill(0, n) // the blocks are the engine's
	let()
	if o := p.rec.Wait("written", "t", 1); o.Err != nil {
		t.Logf("written: %v", o.Err)
	}
	p.paint(3, 0, 1)
	p.write("next", d, d.expect("next", p, 0, 1), 0, 0, 1)
	if o := d.rec.Wait("received", "next", 1); o.Err != nil {
		t.Error(o.Err)
	}
	d.untouched("a transfer that had ended", 1, n-1)
}
