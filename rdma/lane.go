package rdma

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// lane is one end of a reliable connection (an RC queue pair) between a port of P
// and a port of D. P's end writes. D's end takes marks, and pings to see whether P's end
// still answers.
type lane struct {
	id     uint32 // the lane's number, given by P, unique for the two agents
	b      *bundle
	port   *localPort
	remote int // index of the peer's port
	psn    uint32
	qp     *verbs.QP
	dead   chan struct{} // closed when the queue pair is destroyed: no byte of it moves or lands any more
	once   sync.Once
	stands error // set before dead is closed, if the queue pair could neither be destroyed nor put into error

	// D's end, guarded by its source.
	offer    laneOffer
	place    int // while the lane is on trial: the place where P writes; areaSlots' lock guards it
	posted   int // receives that are posted
	spent    int // receives that were used up since the last refill
	pinging  bool
	retired  bool
	lives    bool // the queue pair could not be put into error: only its destruction ends it
	verified bool // D has looked at the trial's bytes; guarded by the source's verifying
	verdict  error
	still    chan struct{} // closed when the lane is retired and all receives are back: no byte of it lands any more

	// P's end, guarded by its connection.
	conn    *conn
	queue   *sendQueue[*job]
	jobs    []*job // jobs that have something to post; the first is next
	path    *path
	keys    *keyTable      // D's memory by its port
	probe   chan error     // the result of the probe
	reached bool           // the probe without bytes has arrived
	large   bool           // the probe of a large packet has arrived
	tried   bool           // a trial follows it
	proven  bool           // all probes have arrived
	broken  bool           // the lane is out of the connection's list
	looks   int            // how many looks in a row found requests under way of which none had completed since the look before
	reads   map[*write]int // of a broken lane: requests that may still read a write's blocks
}

// laneExtra is how many requests a lane takes beyond its depth, for probes and pings.
const laneExtra = 2

// IDs of completions that are not a write's.
const (
	receiveID  = 1 << 63
	pingID     = 1 << 62
	probeID    = 1 << 61
	bigProbeID = 1 << 60
	trialID    = 1 << 59
)

// bundle is a completion queue and the lanes that were made with it, at one time
// and for one peer. Its goroutine owns it and ends with its last lane.
type bundle struct {
	t      *Transport
	cq     *verbs.CQ
	depth  int // requests of each lane
	handle func(l *lane, list []verbs.Completion)

	reaping sync.Mutex // held from a poll until its completions are handled
	list    [64]verbs.Completion

	mu    sync.Mutex
	lanes map[uint32]*lane // by the number of the queue pair; a destroyed one stays, since a late completion may name it
	open  int
	whole bool // no lane will be added
}

// newBundle makes a bundle for so many lanes. Each lane has depth requests at a time, or as
// many as the device takes. The queue must have room even if all requests fail.
func (t *Transport) newBundle(d *device, lanes, depth int, handle func(*lane, []verbs.Completion)) (*bundle, error) {
	a := d.verbs.Attr()
	depth = max(min(depth, a.MaxQPWR-laneExtra, a.MaxCQE/lanes-laneExtra), 2)
	cq, err := d.verbs.NewCQ(min(lanes*(depth+laneExtra), a.MaxCQE), 0)
	if err != nil {
		return nil, err
	}
	b := &bundle{t: t, cq: cq, depth: depth, handle: handle, lanes: map[uint32]*lane{}}
	if !t.goRun("rdma completions", b.run) {
		_ = cq.Close()
		return nil, errClosed
	}
	return b, nil
}

// add makes a lane with its queue pair. When all lanes are added, the caller must call seal.
func (b *bundle) add(id uint32, p *localPort, remote int, caps verbs.Caps) (*lane, error) {
	qp, err := verbs.NewQP(p.dev.pd, b.cq, caps)
	if err != nil {
		return nil, err
	}
	l := &lane{id: id, b: b, port: p, remote: remote, qp: qp, psn: rand.Uint32N(1 << 24), dead: make(chan struct{}), still: make(chan struct{}),
		probe: make(chan error, 1), reads: map[*write]int{}}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lanes[qp.Number()] = l
	b.open++
	return l, nil
}

func (b *bundle) seal() {
	b.mu.Lock()
	b.whole = true
	last := b.open == 0
	b.mu.Unlock()
	if last {
		b.cq.Interrupt()
	}
}

// destroy ends a lane for good. When it returns, no byte of the lane moves or lands, unless the lane stands.
func (l *lane) destroy() {
	l.once.Do(l.end)
	<-l.dead
}

func (l *lane) end() {
	if err := l.qp.Destroy(); err != nil {
		l.b.t.log.Error("rdma queue pair cannot be destroyed", zap.Error(err))
		if still := l.qp.ToError(); still != nil {
			l.stands = fmt.Errorf("rdma: %w: %w: %w", err, still, core.ErrMayLand)
			l.b.t.mayLand(l.stands)
		}
	}
	close(l.dead)
	b := l.b
	b.t.memory.places.drop(l)
	b.mu.Lock()
	b.open--
	last := b.whole && b.open == 0
	b.mu.Unlock()
	if last {
		b.cq.Interrupt()
	}
}

// drop puts a lane into error, which is quick. A goroutine destroys it and calls then,
// since the kernel may take seconds if a neighbour does not answer. If the transport is
// closing, drop destroys the lane itself and does not call then.
func (l *lane) drop(then func()) {
	if err := l.qp.ToError(); err != nil {
		l.b.t.log.Debug("rdma queue pair cannot be stopped, only destroyed", zap.Error(err))
	}
	if !l.b.t.goRun("rdma destroy", func() {
		l.destroy()
		then()
	}) {
		l.destroy()
	}
}

// spins is how many polls without a result come before the queue is armed. So a peer that
// keeps sending costs no interrupts.
const spins = 64

// run takes completions. It polls while they come, and otherwise waits for the channel's
// descriptor in Go's poller.
func (b *bundle) run() {
	defer func() {
		if err := b.cq.Close(); err != nil {
			b.t.log.Error("rdma completion queue cannot be closed", zap.Error(err))
		}
	}()
	idle, armed := 0, false
	for {
		n, err := b.reap()
		if err != nil {
			b.fail(err)
			return
		}
		if n > 0 {
			idle, armed = 0, false
			continue
		}
		if idle++; idle < spins {
			continue
		}
		if b.over() {
			return
		}
		if !armed {
			if err := b.cq.Arm(); err != nil {
				b.fail(err)
				return
			}
			armed = true // and poll once more: completions may have come before
			continue
		}
		if err := b.cq.Wait(time.Time{}); err != nil && !b.over() {
			b.fail(err)
			return
		}
		idle, armed = 0, false
	}
}

// reap handles the next completions, at most a list of them.
func (b *bundle) reap() (n int, err error) {
	b.reaping.Lock()
	defer b.reaping.Unlock()
	if n, err = b.cq.Poll(b.list[:]); n > 0 {
		b.sort(b.list[:n])
	}
	return n, err
}

// reapAll handles all completions that had come when it was called.
func (b *bundle) reapAll() {
	for left := b.cq.Depth(); left > 0; {
		n, err := b.reap()
		if n == 0 || err != nil {
			return
		}
		left -= n
	}
}

func (b *bundle) over() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.whole && b.open == 0
}

// sort hands each lane its completions, in their order.
func (b *bundle) sort(list []verbs.Completion) {
	for len(list) > 0 {
		n := 1
		for n < len(list) && list[n].QueuePair == list[0].QueuePair {
			n++
		}
		b.mu.Lock()
		l := b.lanes[list[0].QueuePair]
		b.mu.Unlock()
		if l != nil {
			b.handle(l, list[:n])
		}
		list = list[n:]
	}
}

// fail ends all lanes of a completion queue that broke.
func (b *bundle) fail(cause error) {
	b.t.log.Error("rdma completion queue broke", zap.Error(cause))
	b.mu.Lock()
	lanes := slices.Collect(maps.Values(b.lanes))
	b.mu.Unlock()
	for _, l := range lanes {
		b.handle(l, []verbs.Completion{{Status: verbs.Fatal}})
	}
	for _, l := range lanes {
		l.destroy()
	}
}

// failure is the error of a failed completion.
func (l *lane) failure(c *verbs.Completion) error {
	hint := ""
	switch c.Status {
	case verbs.RetryExceeded:
		hint = ": the peer's port does not answer"
	case verbs.RNRExceeded:
		hint = ": the peer takes no completions"
	case verbs.RemoteAccess:
		hint = ": the peer does not know the key any more; it was restarted, or has registered other memory"
	case verbs.Flushed:
		hint = ": the queue pair was in error already"
	}
	return fmt.Errorf("rdma: queue pair %d on %s: %v (vendor code %#x)%s", l.qp.Number(), l.port.name, c.Status, c.Vendor, hint)
}

// refill posts receives for marks; src.mu is held.
func (l *lane) refill(spent int) error {
	l.spent += spent
	if l.spent < l.b.depth/4 {
		return nil
	}
	n := l.spent
	l.spent = 0
	done, err := l.qp.PostReceives(receiveID, n)
	l.posted += done
	return err
}

// ping posts a write without bytes to P's end. P's queue pair answers as long as it
// exists, also when its process is stopped. src.mu is held.
func (l *lane) ping() {
	if l.pinging || l.retired {
		return
	}
	w := [1]verbs.Write{{ID: pingID, Flags: verbs.Signaled}}
	if _, err := l.qp.Post(w[:], nil); err == nil {
		l.pinging = true
	}
}

// verbsRoute turns a route into the verbs.Route of a queue pair on port p.
func (t *Transport) verbsRoute(p *localPort, to route, mtu int, qpn, psn, own uint32) *verbs.Route {
	c := &t.cfg
	return &verbs.Route{
		Port: p.num, PKeyIndex: c.PKeyIndex, RemoteWrite: true,
		RemoteQP: qpn, RemotePSN: psn, LocalPSN: own, MTU: mtu,
		Global: to.GRH, RemoteGID: to.Remote.Raw, SourceGIDIndex: to.Local.Index, HopLimit: 64,
		TrafficClass: c.TrafficClass, RemoteLID: to.LID, ServiceLevel: c.ServiceLevel,
		MinRNRTimer: c.MinRNRTimer, Timeout: c.Timeout, Retry: c.Retry, RNRRetry: c.RNRRetry,
	}
}

// ready brings a queue pair into the state in which it may write.
func (l *lane) ready(p *verbs.Route) error {
	if err := l.qp.Init(p); err != nil {
		return err
	}
	if l.conn == nil { // D's end; the device may have made the queue larger
		done, err := l.qp.PostReceives(receiveID, l.b.depth)
		l.posted = done
		if err != nil {
			return err
		}
	}
	if err := l.qp.ReadyToReceive(p); err != nil {
		return err
	}
	return l.qp.ReadyToSend(p)
}
