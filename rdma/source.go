package rdma

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// source is a P as D sees it.
type source struct {
	r    *receiver
	peer core.AgentID

	verifying sync.Mutex // held while trials are looked at; taken before mu

	mu         sync.Mutex
	gone       bool // dismissed
	ticket     []byte
	secret     []byte // signs the grants for this P
	renewed    bool   // the secret is not the first one, since the memory has changed
	lanes      map[uint32]*lane
	dying      map[uint32]*lane   // in error, until their last completions were counted
	connecting int                // lanes that are being made
	broken     []uint32           // lanes that broke here; P must be told
	up         []int              // ports that became active; P must be told
	live       map[uint64]*expect // by the grant's number, until nothing of them can land
	whole      [maxWhole]uint64   // grants whose transfers have arrived, the latest; 0: none
	wholes     int                // transfers that ever arrived
	cause      error              // why no transfer can come this way; nil: it can
	settled    chan struct{}      // closed when cause says something
	owed       bool               // if P becomes unreachable the sink must be told, since P was reached or is asked for
	requesting bool               // a goroutine says hello to P
	tooEarly   bool               // when P last asked for keys, the memory was not registered
	requestAt  time.Time          // D says no hello before this time, since it could not reach P
	backoff    time.Duration

	draining []*expect // revoked: P must hear of it
	drains   bool      // a goroutine tells P

	watching *time.Timer // while there are lanes: pings P's ends
	lookAt   time.Time
}

// maxWhole is how many transfers that have arrived D remembers. If P loses its lanes
// before it learns that a transfer has arrived, P asks.
const maxWhole = 1024

// errUnsettled is the cause while the handshake is under way.
var errUnsettled = errors.New("the handshake is under way")

// settle notes whether P can write to this D: yes if cause is nil, else no because of cause; src.mu is held.
func (src *source) settle(cause error) {
	if src.cause == errUnsettled {
		close(src.settled)
	}
	src.cause = cause
}

// usable says whether P can write to this D. settled is closed when the handshake has shown it.
func (src *source) usable() (settled <-chan struct{}, cause error) {
	src.mu.Lock()
	defer src.mu.Unlock()
	if src.cause != nil && src.cause != errUnsettled && !time.Now().Before(src.requestAt) {
		src.requestConnect() // P may be reached again
	}
	return src.settled, src.cause
}

// disconnect closes all lanes of a P. Transfers that have begun to land end. The others may
// still come when P connects again.
func (src *source) disconnect(cause error) {
	src.mu.Lock()
	tell := src.disconnecting(fmt.Errorf("%w: %w", core.ErrConnectionLost, cause))
	src.mu.Unlock()
	tell()
}

// disconnecting is the part of lose that holds src.mu. tell does the rest without it: it waits
// for the lanes and tells the sink.
func (src *source) disconnecting(cause error) (tell func()) {
	var ended []*expect
	for _, e := range src.live {
		if !e.begun.IsZero() && src.r.take(e) {
			ended = append(ended, e)
		}
	}
	dying := src.cut()
	src.settle(cause)
	src.backOff()
	owed := src.owed && !src.gone
	src.owed = false
	return func() {
		await(dying)
		byGPUs(ended, func(gpus gpuSet, list []*expect) {
			end := cause
			if unflushed := src.r.t.flushEnded(gpus); unflushed != nil {
				end = unflushed
			}
			for _, e := range list {
				src.fence(e)
				e.tell(end)
			}
		})
		if owed {
			src.r.t.down(src.peer, cause)
		}
	}
}

// cut retires all lanes. When the lanes that it returns are still, no byte that P has
// posted until now can land. src.mu is held.
func (src *source) cut() (dying []*lane) {
	for _, l := range src.lanes {
		src.broken = append(src.broken, l.id)
		src.retire(l)
	}
	for _, l := range src.dying {
		dying = append(dying, l)
	}
	return dying
}

func await(lanes []*lane) {
	for _, l := range lanes {
		<-l.still
	}
}

// flushBound is how long a lane in error may keep its last completions to itself.
const flushBound = time.Second

// retire puts a lane into error. The lane is dying until its last completions are
// counted, since a mark that has landed must count: P believes that the stripe is done,
// or, if the lane broke at P first, would write it again under a transfer that has ended.
// When all receives have come back, no byte of the lane lands any more. So D does not
// wait for the queue pair's destruction, which may take seconds. src.mu is held.
func (src *source) retire(l *lane) {
	if l.retired {
		return
	}
	l.retired = true
	delete(src.lanes, l.id)
	src.dying[l.id] = l
	bound := flushBound
	err := l.qp.ToError()
	if l.lives = err != nil; l.lives || l.posted == 0 {
		bound = 0
	}
	if !src.r.t.goRun("rdma retire", func() {
		late := time.NewTimer(bound)
		defer late.Stop()
		var stands error
		select {
		case <-l.still:
		case <-late.C:
			l.b.reapAll()
			l.destroy()
			l.b.reapAll()
			stands = l.stands
		}
		src.mu.Lock()
		src.mayLand(stands)
		src.laneDrained(l)
		missing := l.posted > 0 && !src.gone
		src.mu.Unlock()
		if missing { // marks of stripes that P believes done may never be counted
			src.disconnectAll(fmt.Errorf("rdma: queue pair %d on %s has not given back its receives", l.qp.Number(), l.port.name))
		}
		l.destroy()
	}) {
		l.destroy()
		src.mayLand(l.stands)
		src.laneDrained(l)
	}
}

// mayLand notes why bytes of the transfers that there are may land for ever, if they may; src.mu is held.
func (src *source) mayLand(cause error) {
	if cause == nil {
		return
	}
	for _, e := range src.live {
		e.lands = cause
	}
}

// laneDrained is called when a retired lane's marks are counted and no byte of it lands any
// more; src.mu is held.
func (src *source) laneDrained(l *lane) {
	if src.dying[l.id] == l {
		delete(src.dying, l.id)
		close(l.still)
	}
}

// disconnectAll does what lose does, and also ends the transfers that have not begun.
func (src *source) disconnectAll(cause error) {
	src.mu.Lock()
	src.beginAll()
	src.mu.Unlock()
	src.disconnect(cause)
}

// beginAll has all transfers count as begun; src.mu is held.
func (src *source) beginAll() {
	for _, e := range src.live {
		e.begin()
	}
}

// How often D pings P's ends: while it expects transfers, and while it does not. A queue
// pair that only receives learns nothing of a sender that died.
const (
	watchInterval = time.Second
	idleInterval  = 10 * time.Second
)

// watch arranges that look is called, or is called sooner; src.mu is held.
func (src *source) watch() {
	if src.gone {
		return
	}
	every := idleInterval
	if len(src.live) > 0 {
		every = watchInterval
	}
	if src.watching == nil {
		// look takes only locks that are held shortly, so Close need not wait for it.
		src.watching = time.AfterFunc(every, src.look)
		src.lookAt = time.Now().Add(every)
	} else if at := time.Now().Add(every); at.Before(src.lookAt) && src.watching.Reset(every) {
		src.lookAt = at
	}
}

// look pings P's ends.
func (src *source) look() {
	src.mu.Lock()
	defer src.mu.Unlock()
	src.watching = nil
	for _, l := range src.lanes {
		l.ping()
	}
	if len(src.lanes) > 0 || len(src.live) > 0 {
		src.watch()
	}
}

// received handles the completions of a lane's receives and pings. It waits for no GPU: a driver that does not answer holds up no lane.
func (src *source) received(l *lane, list []verbs.Completion) {
	var onGPUs []*expect
	for _, e := range src.count(l, list) {
		if e.gpus == 0 {
			e.tell(nil)
		} else {
			onGPUs = append(onGPUs, e)
		}
	}
	if len(onGPUs) > 0 {
		src.r.land(onGPUs)
	}
}

// count counts marks. It returns the expects that are complete: fenced, but not told.
func (src *source) count(l *lane, list []verbs.Completion) (done []*expect) {
	landed := 0
	var cause error
	src.mu.Lock()
	defer src.mu.Unlock()
	for i := range list {
		c := &list[i]
		switch {
		case c.Status != verbs.Success:
			cause = l.failure(c)
			if c.ID == receiveID {
				l.posted--
			}
		case c.Opcode == verbs.OpReceiveImm:
			landed++
			if e := src.landed(decodeMark(c.Imm)); e != nil {
				done = append(done, e)
			}
		default:
			l.pinging = false
		}
	}
	l.posted -= landed
	if cause == nil && !l.retired {
		cause = l.refill(landed)
	}
	if cause != nil && !l.retired {
		src.r.t.log.Warn("rdma lane broke", zap.String("peer", string(src.peer)), zap.Uint32("lane", l.id), zap.Error(cause))
		src.broken = append(src.broken, l.id)
		src.retire(l)
		src.requestConnect()
	}
	for _, e := range done {
		src.whole[src.wholes%maxWhole] = e.grant.seq
		src.wholes++
		src.fenced(e)
	}
	if l.retired && l.posted <= 0 && !l.lives {
		src.laneDrained(l)
	}
	return done
}

// landed counts a mark. It takes and returns the expect that the mark completes. src.mu
// is held.
func (src *source) landed(m mark) *expect {
	r := src.r
	if int(m.slot) >= len(r.slots) {
		return nil
	}
	r.mu.Lock()
	e, generation := r.slots[m.slot].e, r.slots[m.slot].generation
	r.mu.Unlock()
	if e == nil || e.src != src || generation != m.generation {
		return nil
	}
	e.begin()
	if m.begins() || m.index >= m.total {
		return nil
	}
	e.stripes |= 1 << m.index
	if bits.OnesCount64(e.stripes) < int(m.total) || !r.take(e) {
		return nil
	}
	return e
}
