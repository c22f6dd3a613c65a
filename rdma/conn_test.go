package rdma

import (
	"context"
	"errors"
	"math"
	"slices"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
	"github.com/kvconn/kvconn/rig/coretest"
)

// newTestConn makes a conn whose lanes have no queue pair. D answers no signal.
func newTestConn(t *testing.T, lanes int) *conn {
	t.Helper()
	tr := &Transport{cfg: DefaultConfig(), log: zap.NewNop(), sink: coretest.NewRecorder(t, "p")}
	tr.ctx, tr.cancel = context.WithCancel(context.Background())
	tr.signal = func(ctx context.Context, to core.AgentID, msg []byte) ([]byte, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	tr.sender.init(tr)
	t.Cleanup(func() {
		tr.cancel()
		tr.mu.Lock()
		tr.shut = true
		tr.mu.Unlock()
		tr.wg.Wait()
	})
	cn := newConn(tr, "d")
	b := &bundle{t: tr, lanes: map[uint32]*lane{}}
	p := &localPort{dev: &device{name: "test"}, name: "test:1"}
	for i := range lanes {
		l := &lane{id: uint32(i + 1), b: b, port: p, qp: &verbs.QP{}, dead: make(chan struct{}), conn: cn, path: newPath(1e9), probe: make(chan error, 1), reads: map[*write]int{}}
		l.queue = newSendQueue[*job](16, maxFlight, signalEvery)
		cn.lanes = append(cn.lanes, l)
	}
	cn.lastID = uint32(lanes)
	cn.remote, cn.state = &remoteInfo{}, stateNoLanes
	if lanes > 0 {
		cn.on(eventLane)
	}
	return cn
}

// testWrite has a write with so many requests under way on a lane.
func (cn *conn) testWrite(id core.TransferID, seq uint64, l *lane, requests int) *write {
	w := &write{op: core.WriteOp{ID: id, Peer: cn.peer}, conn: cn, grant: grant{seq: seq}, known: true, left: 1, flight: requests, began: time.Now()}
	j := &job{w: w, lane: l, flight: requests, filled: true, cursor: cursor{whole: true, done: true}}
	w.jobs = []*job{j}
	cn.t.sender.untold++
	l.queue.posting(j, make([]verbs.Write, requests), nil, false)
	cn.writes[w], cn.bySeq[seq] = struct{}{}, w
	return w
}

// holdDestroy has the destruction of a lane take until release, as the kernel may.
func (cn *conn) holdDestroy(l *lane) (release func()) {
	held, let := make(chan struct{}), make(chan struct{})
	go l.once.Do(func() {
		close(held)
		<-let
		l.end()
	})
	<-held
	return func() { close(let) }
}

// TestDrainedAfterLoss: bytes of a lane that broke may still be on their way until D has
// ended its side. Before that, D must not hear that a revoked transfer has ended.
func TestDrainedAfterLoss(t *testing.T) {
	cn := newTestConn(t, 2)
	cn.reconnecting, cn.tells = true, true // the test does their work
	l := cn.lanes[0]
	w := cn.testWrite("t", 7, l, 3)
	cn.mu.Lock()
	defer cn.mu.Unlock()
	if pending := cn.drain(&signal{Seqs: []uint64{7}}); !slices.Equal(pending, []uint64{7}) {
		t.Fatalf("pending %v, want the transfer that has requests under way", pending)
	}
	cn.breakLane(l, errors.New("test"))
	if !w.over {
		t.Error("the write has not ended, though no request reads its blocks")
	}
	if len(cn.drained) > 0 {
		t.Errorf("%v are drained while lanes %v may still deliver", cn.drained, cn.lost)
	}
	if err := cn.arrived([]uint32{1}, nil, &reply{}); err != nil || !slices.Equal(cn.drained, []uint64{7}) {
		t.Errorf("%v, drained %v after D has ended the lane, want 7", err, cn.drained)
	}
}

// TestConfirmedByTwo: D's message that all is over crosses D's answer about some lanes.
func TestConfirmedByTwo(t *testing.T) {
	cn := newTestConn(t, 3)
	cn.reconnecting, cn.tells = true, true
	cn.mu.Lock()
	defer cn.mu.Unlock()
	cn.breakLane(cn.lanes[0], errors.New("test"))
	cn.breakLane(cn.lanes[0], errors.New("test"))
	asked := slices.Clone(cn.lost)
	cn.confirmed(cn.lost) // D has closed
	cn.breakLane(cn.lanes[0], errors.New("test"))
	if err := cn.arrived(asked, nil, &reply{}); err != nil || !slices.Equal(cn.lost, []uint32{3}) {
		t.Errorf("%v, lanes %v are lost, want 3", err, cn.lost)
	}
}

// TestRetryOncePerPause: a paused path that cannot be tried, since its port is down
// or in use, must not have D asked again and again while something is written.
func TestRetryOncePerPause(t *testing.T) {
	cn := newTestConn(t, 1)
	cn.reconnecting = true
	cn.testWrite("t", 7, cn.lanes[0], 1)
	r := newPath(1e9)
	r.fail(time.Now().Add(-time.Minute), errors.New("test"))
	cn.paths[pathKey{1, 1}] = r
	cn.mu.Lock()
	defer cn.mu.Unlock()
	if cn.next() != stepConnect {
		t.Fatal("a path whose pause is over is not tried again")
	}
	if due := cn.due(); !due[pathKey{1, 1}] || cn.next() != stepNone || cn.due()[pathKey{1, 1}] {
		t.Error("the path is due again before another pause")
	}
}

// TestUnansweredLanesGoOn: a D that does not answer for a while takes nothing from
// the lanes that work.
func TestUnansweredLanesGoOn(t *testing.T) {
	cn := newTestConn(t, 2)
	cn.t.cfg.ConnectTimeout = 30 * time.Millisecond
	kept, waits := cn.testWrite("kept", 7, cn.lanes[0], 1), cn.testWrite("waits", 8, cn.lanes[1], 1)
	cn.update(func(cn *conn) {
		cn.tasks |= makeLanes
		cn.breakLane(cn.lanes[1], errors.New("test"))
	})
	rec := cn.t.sink.(*coretest.Recorder)
	if o := rec.Wait("written", "waits", 1); !errors.Is(o.Err, core.ErrConnectionLost) {
		t.Errorf("what waits for D's word ended with %v", o.Err)
	}
	cn.mu.Lock()
	defer cn.mu.Unlock()
	if kept.cause != nil || len(cn.lanes) != 1 || waits.cause == nil {
		t.Errorf("%d lanes are left of the one that works, its write ended with %v", len(cn.lanes), kept.cause)
	}
}

// TestWrittenWaitsForReads: a lane that broke may read the blocks of a write until its
// last request has come back, or its queue pair is destroyed. Until then the engine does
// not hear that the write has ended.
func TestWrittenWaitsForReads(t *testing.T) {
	for _, c := range []struct {
		name  string
		ended error
		flush bool // the last request comes back before the queue pair is destroyed
	}{
		{"it ended well, flushed", nil, true},
		{"it ended well, destroyed", nil, false},
		{"it failed, flushed", errStopped, true},
		{"it failed, destroyed", errStopped, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			cn := newTestConn(t, 2)
			cn.reconnecting, cn.tells = true, true
			l := cn.lanes[0]
			w := cn.testWrite("t", 7, l, 3)
			release := cn.holdDestroy(l)
			var early, told int
			cn.update(func(cn *conn) { // which would wait, were the lane destroyed here
				cn.breakLane(l, errors.New("test"))
				if c.ended != nil {
					cn.fail(w, c.ended)
				} else if err := cn.arrived([]uint32{l.id}, []uint64{7}, &reply{Arrived: []uint64{1}, Live: []uint64{7}}); err != nil {
					t.Error(err)
				}
				cn.took(l, []verbs.Completion{{ID: 2, Status: verbs.Flushed}}, time.Now())
				early = len(cn.outcomes)
				if c.flush {
					cn.took(l, []verbs.Completion{{ID: 3, Status: verbs.Flushed}}, time.Now())
					told = len(cn.outcomes)
				}
			})
			if !w.over || early != 0 {
				t.Errorf("over: %v; %d outcomes are told while the lane may read", w.over, early)
			}
			if c.flush && told != 1 {
				t.Errorf("%d outcomes when the last request has come back, want 1", told)
			}
			release()
			rec := cn.t.sink.(*coretest.Recorder)
			if o := rec.Wait("written", "t", 1); !errors.Is(o.Err, c.ended) {
				t.Errorf("it ended with %v, want %v", o.Err, c.ended)
			}
		})
	}
}

// TestCloseTellsAll: an outcome that somebody is about to tell is told before Close has
// returned. The agent's other half does not wait for that: its lanes close at once.
func TestCloseTellsAll(t *testing.T) {
	cn := newTestConn(t, 1)
	cn.reconnecting, cn.tells = true, true
	s := &cn.t.sender
	s.mu.Lock()
	s.conns[cn.peer] = cn
	s.mu.Unlock()
	cn.mu.Lock()
	cn.lanes = nil // the write waits for a lane
	cn.on(eventNoLanes)
	cn.mu.Unlock()
	s.write(core.WriteOp{ID: "t", Peer: cn.peer})
	outcomes, _ := cn.locked(func(cn *conn) {
		for w := range cn.writes {
			cn.fail(w, errStopped)
		}
	})
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		_ = cn.t.Close()
	}()
	r := &cn.t.receiver
	soon(t, "nothing can land any more while an outcome is not told", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.closed
	})
	select {
	case <-closed:
		t.Error("Close has returned, and an outcome is not told")
	case <-time.After(100 * time.Millisecond):
	}
	for _, w := range outcomes {
		s.outcome(w)
	}
	<-closed
	if all := cn.t.sink.(*coretest.Recorder).All("written", "t"); len(all) != 1 {
		t.Errorf("%d outcomes are told, want 1", len(all))
	}
}

// TestStall: a lane that has something under way and completes nothing is given up, and
// no other. A lane that completes something now and then is kept.
func TestStall(t *testing.T) {
	cn := newTestConn(t, 3)
	cn.reconnecting, cn.tells = true, true
	cn.t.cfg.StallTimeout = time.Hour // the test looks
	stuck, slow, idle := cn.lanes[0], cn.lanes[1], cn.lanes[2]
	cn.testWrite("stuck", 7, stuck, 1)
	cn.testWrite("slow", 8, slow, 2*stallLooks)
	cn.update(func(cn *conn) {
		for i := range 2*stallLooks - 2 {
			if want := i < stallLooks; slices.Contains(cn.lanes, stuck) != want {
				t.Fatalf("after %d looks the lane that completes nothing is there: %v", i, !want)
			}
			if i%2 == 0 {
				cn.took(slow, []verbs.Completion{{ID: uint64(i + 1)}}, time.Now())
			}
			cn.look()
			if !slices.Contains(cn.lanes, slow) || !slices.Contains(cn.lanes, idle) {
				t.Fatalf("after %d looks %d lanes are left", i+1, len(cn.lanes))
			}
			if cn.looks == nil {
				t.Fatal("nobody looks at what is under way")
			}
			cn.looks.Stop()
		}
		cn.took(slow, []verbs.Completion{{ID: 2 * stallLooks}}, time.Now())
		if cn.look(); cn.looks != nil {
			t.Error("somebody looks though nothing is under way")
		}
	})
}

// TestPortUp: a port that is active again ends the pauses of its paths, and of no others.
// If no lane is at the port, some are made, unless all lanes are at rest.
func TestPortUp(t *testing.T) {
	at := func(k pathKey) bool { return k.remote == 1 }
	long := func(cn *conn, key pathKey) *path {
		r := newPath(1e9)
		r.pause, r.upSince = longPause, time.Now()
		r.fail(time.Now(), errors.New("test"))
		cn.paths[key] = r
		return r
	}
	for _, c := range []struct {
		name    string
		prepare func(cn *conn)
		wanted  bool
	}{
		{"lanes at another port", func(*conn) {}, true},
		{"a lane is at it", func(cn *conn) { cn.lanes[0].remote = 1 }, false},
		{"at rest", func(cn *conn) { cn.lanes, cn.state = nil, stateNoLanes }, false},
		{"none was reached", func(cn *conn) { cn.lanes, cn.remote, cn.state = nil, nil, stateDown }, true},
		{"nobody has asked yet", func(cn *conn) { cn.lanes, cn.remote, cn.state = nil, nil, stateNew }, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			cn := newTestConn(t, 1)
			cn.reconnecting = true
			mine, other := long(cn, pathKey{0, 1}), long(cn, pathKey{1, 0})
			cn.mu.Lock()
			defer cn.mu.Unlock()
			c.prepare(cn)
			cn.portUp(at)
			if wanted := cn.tasks&makeLanes != 0; wanted != c.wanted {
				t.Errorf("lanes are wanted: %v", wanted)
			}
			now := time.Now()
			if !mine.retry(now) || other.retry(now) {
				t.Error("not the paths of that port alone are tried")
			}
			if mine.fail(now, errors.New("again")); mine.retryAt.After(now.Add(firstPause)) {
				t.Errorf("the pauses go on with %v", mine.retryAt.Sub(now))
			}
		})
	}
}

// TestShortPath: a path that has lost one of its lanes gets another.
func TestShortPath(t *testing.T) {
	cn := newTestConn(t, 1)
	cn.reconnecting = true
	p := cn.lanes[0].port
	p.dev.memory.Store(&memory{})
	address := portAddress{Name: "x", Link: verbs.LinkEthernet, Index: -1, GIDs: []gid{gidOf(1, verbs.GIDRoCEv2, "10.0.0.1")}}
	p.state.Store(&portState{up: true, mtu: 4096, speed: 1e9, address: address})
	cn.t.ports = []*localPort{p}
	remote := &remoteInfo{ports: map[int]*portInfo{0: {Index: 0, Link: uint8(verbs.LinkEthernet), Forced: -1, GIDs: []gidInfo{{1, address.GIDs[0].Raw, uint8(verbs.GIDRoCEv2)}}}}}
	cn.paths[pathKey{}] = cn.lanes[0].path
	ask := func() ([]*planned, []error) { return cn.plan(remote, map[pathKey]bool{}, cn.due()) }
	for qps, lacks := range map[int]int{1: 0, 2: 1, 4: 3} {
		cn.t.cfg.QueuePairs = qps
		got := 0
		plan, causes := ask()
		for _, c := range plan {
			got += c.lanes
		}
		if got != lacks {
			t.Errorf("%d lanes are made beside the one, want %d: %v", got, lacks, causes)
		}
	}
	cn.lanes[0].path.fail(time.Now(), errors.New("test"))
	if got, _ := ask(); len(got) > 0 {
		t.Errorf("it is tried while it is paused: %v", got)
	}
}

// TestArrivedAndDead: a grant whose transfer has arrived is dead, as a revoked grant is.
// P must not take one for the other.
func TestArrivedAndDead(t *testing.T) {
	for _, c := range []struct {
		name string
		word func(cn *conn, l *lane) // of a D at which the grant is alive no more
		ends bool
		want error
	}{
		{"it had arrived when the lane broke", func(cn *conn, l *lane) {
			cn.breakLane(l, errors.New("test"))
			_ = cn.arrived([]uint32{l.id}, []uint64{7}, &reply{Arrived: []uint64{math.MaxUint64}, Next: 9})
		}, true, nil},
		{"it was revoked when the lane broke", func(cn *conn, l *lane) {
			cn.breakLane(l, errors.New("test"))
			_ = cn.arrived([]uint32{l.id}, []uint64{7}, &reply{Arrived: []uint64{0}, Next: 9})
		}, true, core.ErrNotExpected},
		{"other lanes are made before D was asked what had arrived", func(cn *conn, l *lane) {
			cn.breakLane(l, errors.New("test"))
			cn.grantsReceived(&reply{Next: 9})
		}, false, nil},
		{"other lanes are made while it is under way", func(cn *conn, l *lane) { cn.grantsReceived(&reply{Next: 9}) }, false, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			cn := newTestConn(t, 2)
			cn.reconnecting, cn.tells = true, true
			w := cn.testWrite("t", 7, cn.lanes[0], 3)
			cn.update(func(cn *conn) { c.word(cn, cn.lanes[0]) })
			if w.over != c.ends || !errors.Is(w.cause, c.want) {
				t.Errorf("over: %v with %v, want %v with %v", w.over, w.cause, c.ends, c.want)
			}
			cn.update(func(cn *conn) { cn.fail(w, errStopped) })
		})
	}
}
