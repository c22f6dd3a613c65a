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
	"github.com/kvconn/kvconn/core/coretest"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// newTestLink makes a link whose lanes have no queue pair. D answers no signal.
func newTestLink(t *testing.T, lanes int) *link {
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
	lk := newLink(tr, "d")
	b := &bundle{t: tr, lanes: map[uint32]*lane{}}
	p := &localPort{dev: &device{name: "test"}, name: "test:1"}
	for i := range lanes {
		l := &lane{id: uint32(i + 1), b: b, port: p, qp: &verbs.QP{}, dead: make(chan struct{}), link: lk, rail: newRail(1e9), probe: make(chan error, 1), reads: map[*write]int{}}
		l.queue = newSendQueue[*job](16, maxFlight, signalEvery)
		lk.lanes = append(lk.lanes, l)
	}
	lk.lastID = uint32(lanes)
	lk.there, lk.state = &far{}, stateBare
	if lanes > 0 {
		lk.on(eventLane)
	}
	return lk
}

// testWrite has a write with so many requests under way on a lane.
func (lk *link) testWrite(id core.TransferID, seq uint64, l *lane, requests int) *write {
	w := &write{op: core.WriteOp{ID: id, Peer: lk.peer}, link: lk, grant: grant{seq: seq}, known: true, left: 1, flight: requests, began: time.Now()}
	j := &job{w: w, lane: l, flight: requests, filled: true, cursor: cursor{whole: true, done: true}}
	w.jobs = []*job{j}
	lk.t.sender.untold++
	l.queue.posting(j, make([]verbs.Write, requests), nil, false)
	lk.writes[w], lk.bySeq[seq] = struct{}{}, w
	return w
}

// holdDestroy has the destruction of a lane take until release, as the kernel may.
func (lk *link) holdDestroy(l *lane) (release func()) {
	held, let := make(chan struct{}), make(chan struct{})
	go l.once.Do(func() {
		close(held)
		<-let
		l.end()
	})
	<-held
	return func() { close(let) }
}

// TestDrainedAfterLoss: a lane that breaks has what it sent on its way still, until
// D has ended its side. D must not hear before that a revoked transfer has ended.
func TestDrainedAfterLoss(t *testing.T) {
	lk := newTestLink(t, 2)
	lk.mends, lk.tells = true, true // the test does their work
	l := lk.lanes[0]
	w := lk.testWrite("t", 7, l, 3)
	lk.mu.Lock()
	defer lk.mu.Unlock()
	if pending := lk.drain(&signal{Seqs: []uint64{7}}); !slices.Equal(pending, []uint64{7}) {
		t.Fatalf("pending %v, want the transfer that has requests under way", pending)
	}
	lk.breakLane(l, errors.New("test"))
	if !w.over {
		t.Error("the write has not ended, though no request reads its blocks")
	}
	if len(lk.drained) > 0 {
		t.Errorf("%v are drained while lanes %v may still deliver", lk.drained, lk.lost)
	}
	if err := lk.arrived([]uint32{1}, nil, &reply{}); err != nil || !slices.Equal(lk.drained, []uint64{7}) {
		t.Errorf("%v, drained %v after D has ended the lane, want 7", err, lk.drained)
	}
}

// TestConfirmedByTwo: D's word that all is over crosses its answer about some lanes.
func TestConfirmedByTwo(t *testing.T) {
	lk := newTestLink(t, 3)
	lk.mends, lk.tells = true, true
	lk.mu.Lock()
	defer lk.mu.Unlock()
	lk.breakLane(lk.lanes[0], errors.New("test"))
	lk.breakLane(lk.lanes[0], errors.New("test"))
	asked := slices.Clone(lk.lost)
	lk.confirmed(lk.lost) // D has closed
	lk.breakLane(lk.lanes[0], errors.New("test"))
	if err := lk.arrived(asked, nil, &reply{}); err != nil || !slices.Equal(lk.lost, []uint32{3}) {
		t.Errorf("%v, lanes %v are lost, want 3", err, lk.lost)
	}
}

// TestRetryOncePerPause: a paused rail that cannot be tried, since its port is down
// or in use, must not have D asked again and again while something is written.
func TestRetryOncePerPause(t *testing.T) {
	lk := newTestLink(t, 1)
	lk.mends = true
	lk.testWrite("t", 7, lk.lanes[0], 1)
	r := newRail(1e9)
	r.fail(time.Now().Add(-time.Minute), errors.New("test"))
	lk.rails[railKey{1, 1}] = r
	lk.mu.Lock()
	defer lk.mu.Unlock()
	if lk.next() != stepConnect {
		t.Fatal("a rail whose pause is over is not tried again")
	}
	if due := lk.due(); !due[railKey{1, 1}] || lk.next() != stepNone || lk.due()[railKey{1, 1}] {
		t.Error("the rail is due again before another pause")
	}
}

// TestUnansweredLanesGoOn: a D that does not answer for a while takes nothing from
// the lanes that work.
func TestUnansweredLanesGoOn(t *testing.T) {
	lk := newTestLink(t, 2)
	lk.t.cfg.ConnectTimeout = 30 * time.Millisecond
	kept, waits := lk.testWrite("kept", 7, lk.lanes[0], 1), lk.testWrite("waits", 8, lk.lanes[1], 1)
	lk.update(func(lk *link) {
		lk.tasks |= makeLanes
		lk.breakLane(lk.lanes[1], errors.New("test"))
	})
	rec := lk.t.sink.(*coretest.Recorder)
	if o := rec.Wait("written", "waits", 1); !errors.Is(o.Err, core.ErrConnectionLost) {
		t.Errorf("what waits for D's word ended with %v", o.Err)
	}
	lk.mu.Lock()
	defer lk.mu.Unlock()
	if kept.cause != nil || len(lk.lanes) != 1 || waits.cause == nil {
		t.Errorf("%d lanes are left of the one that works, its write ended with %v", len(lk.lanes), kept.cause)
	}
}

// TestWrittenWaitsForReads: a lane that broke may read the blocks of a write until its
// last request has come back, or its queue pair is destroyed. Until then the engine does
// not hear that the write has ended, however it has.
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
			lk := newTestLink(t, 2)
			lk.mends, lk.tells = true, true
			l := lk.lanes[0]
			w := lk.testWrite("t", 7, l, 3)
			release := lk.holdDestroy(l)
			var early, told int
			lk.update(func(lk *link) { // which would wait, were the lane destroyed here
				lk.breakLane(l, errors.New("test"))
				if c.ended != nil {
					lk.fail(w, c.ended)
				} else if err := lk.arrived([]uint32{l.id}, []uint64{7}, &reply{Arrived: []uint64{1}, Live: []uint64{7}}); err != nil {
					t.Error(err)
				}
				lk.took(l, []verbs.Completion{{ID: 2, Status: verbs.Flushed}}, time.Now())
				early = len(lk.outcomes)
				if c.flush {
					lk.took(l, []verbs.Completion{{ID: 3, Status: verbs.Flushed}}, time.Now())
					told = len(lk.outcomes)
				}
			})
			if !w.over || early != 0 {
				t.Errorf("over: %v; %d outcomes are told while the lane may read", w.over, early)
			}
			if c.flush && told != 1 {
				t.Errorf("%d outcomes when the last request has come back, want 1", told)
			}
			release()
			rec := lk.t.sink.(*coretest.Recorder)
			if o := rec.Wait("written", "t", 1); !errors.Is(o.Err, c.ended) {
				t.Errorf("it ended with %v, want %v", o.Err, c.ended)
			}
		})
	}
}

// TestCloseTellsAll: an outcome that somebody is about to tell is told before Close has
// returned.
func TestCloseTellsAll(t *testing.T) {
	lk := newTestLink(t, 1)
	lk.mends, lk.tells = true, true
	s := &lk.t.sender
	s.mu.Lock()
	s.links[lk.peer] = lk
	s.mu.Unlock()
	lk.mu.Lock()
	lk.lanes = nil // the write waits for one
	lk.on(eventBare)
	lk.mu.Unlock()
	s.write(core.WriteOp{ID: "t", Peer: lk.peer})
	outcomes, _ := lk.locked(func(lk *link) {
		for w := range lk.writes {
			lk.fail(w, errStopped)
		}
	})
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		_ = lk.t.Close()
	}()
	select {
	case <-closed:
		t.Error("Close has returned, and an outcome is not told")
	case <-time.After(100 * time.Millisecond):
	}
	for _, w := range outcomes {
		s.outcome(w)
	}
	<-closed
	if all := lk.t.sink.(*coretest.Recorder).All("written", "t"); len(all) != 1 {
		t.Errorf("%d outcomes are told, want 1", len(all))
	}
}

// TestStall: a lane that has something under way and completes nothing is given up, and
// no other. One that completes something now and then is not.
func TestStall(t *testing.T) {
	lk := newTestLink(t, 3)
	lk.mends, lk.tells = true, true
	lk.t.cfg.StallTimeout = time.Hour // the test looks
	stuck, slow, idle := lk.lanes[0], lk.lanes[1], lk.lanes[2]
	lk.testWrite("stuck", 7, stuck, 1)
	lk.testWrite("slow", 8, slow, 2*stallLooks)
	lk.update(func(lk *link) {
		for i := range 2*stallLooks - 2 {
			if want := i < stallLooks; slices.Contains(lk.lanes, stuck) != want {
				t.Fatalf("after %d looks the lane that completes nothing is there: %v", i, !want)
			}
			if i%2 == 0 {
				lk.took(slow, []verbs.Completion{{ID: uint64(i + 1)}}, time.Now())
			}
			lk.look()
			if !slices.Contains(lk.lanes, slow) || !slices.Contains(lk.lanes, idle) {
				t.Fatalf("after %d looks %d lanes are left", i+1, len(lk.lanes))
			}
			if lk.looks == nil {
				t.Fatal("nobody looks at what is under way")
			}
			lk.looks.Stop()
		}
		lk.took(slow, []verbs.Completion{{ID: 2 * stallLooks}}, time.Now())
		if lk.look(); lk.looks != nil {
			t.Error("somebody looks though nothing is under way")
		}
	})
}

// TestPortUp: a port that is active again ends the pauses of its rails, and only these;
// where no lane is at it some are made, unless all are at rest.
func TestPortUp(t *testing.T) {
	at := func(k railKey) bool { return k.remote == 1 }
	long := func(lk *link, key railKey) *rail {
		r := newRail(1e9)
		r.pause, r.upSince = longPause, time.Now()
		r.fail(time.Now(), errors.New("test"))
		lk.rails[key] = r
		return r
	}
	for _, c := range []struct {
		name    string
		prepare func(lk *link)
		wanted  bool
	}{
		{"lanes at another port", func(*link) {}, true},
		{"a lane is at it", func(lk *link) { lk.lanes[0].remote = 1 }, false},
		{"at rest", func(lk *link) { lk.lanes, lk.state = nil, stateBare }, false},
		{"none was reached", func(lk *link) { lk.lanes, lk.there, lk.state = nil, nil, stateDown }, true},
		{"nobody has asked yet", func(lk *link) { lk.lanes, lk.there, lk.state = nil, nil, stateNew }, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			lk := newTestLink(t, 1)
			lk.mends = true
			mine, other := long(lk, railKey{0, 1}), long(lk, railKey{1, 0})
			lk.mu.Lock()
			defer lk.mu.Unlock()
			c.prepare(lk)
			lk.portUp(at)
			if wanted := lk.tasks&makeLanes != 0; wanted != c.wanted {
				t.Errorf("lanes are wanted: %v", wanted)
			}
			now := time.Now()
			if !mine.retry(now) || other.retry(now) {
				t.Error("not the rails of that port alone are tried")
			}
			if mine.fail(now, errors.New("again")); mine.retryAt.After(now.Add(firstPause)) {
				t.Errorf("the pauses go on with %v", mine.retryAt.Sub(now))
			}
		})
	}
}

// TestShortRail: a rail that has lost one of its lanes gets another.
func TestShortRail(t *testing.T) {
	lk := newTestLink(t, 1)
	lk.mends = true
	p := lk.lanes[0].port
	p.dev.memory.Store(&memory{})
	address := portAddress{Name: "x", Link: verbs.LinkEthernet, Index: -1, GIDs: []gid{gidOf(1, verbs.GIDRoCEv2, "10.0.0.1")}}
	p.state.Store(&portState{up: true, mtu: 4096, speed: 1e9, address: address})
	lk.t.ports = []*localPort{p}
	there := &far{ports: map[int]*portInfo{0: {Index: 0, Link: uint8(verbs.LinkEthernet), Forced: -1, GIDs: []gidInfo{{1, address.GIDs[0].Raw, uint8(verbs.GIDRoCEv2)}}}}}
	lk.rails[railKey{}] = lk.lanes[0].rail
	ask := func() ([]*planned, []error) { return lk.plan(there, map[railKey]bool{}, lk.due()) }
	for qps, lacks := range map[int]int{1: 0, 2: 1, 4: 3} {
		lk.t.cfg.QueuePairs = qps
		got := 0
		plan, causes := ask()
		for _, c := range plan {
			got += c.lanes
		}
		if got != lacks {
			t.Errorf("%d lanes are made beside the one, want %d: %v", got, lacks, causes)
		}
	}
	lk.lanes[0].rail.fail(time.Now(), errors.New("test"))
	if got, _ := ask(); len(got) > 0 {
		t.Errorf("it is tried while it is paused: %v", got)
	}
}

// TestArrivedAndDead: a grant whose transfer has arrived is dead, as one that was revoked
// is. P must not take the one for the other.
func TestArrivedAndDead(t *testing.T) {
	for _, c := range []struct {
		name string
		word func(lk *link, l *lane) // of a D at which the grant is alive no more
		ends bool
		want error
	}{
		{"it had arrived when the lane broke", func(lk *link, l *lane) {
			lk.breakLane(l, errors.New("test"))
			_ = lk.arrived([]uint32{l.id}, []uint64{7}, &reply{Arrived: []uint64{math.MaxUint64}, Next: 9})
		}, true, nil},
		{"it was revoked when the lane broke", func(lk *link, l *lane) {
			lk.breakLane(l, errors.New("test"))
			_ = lk.arrived([]uint32{l.id}, []uint64{7}, &reply{Arrived: []uint64{0}, Next: 9})
		}, true, core.ErrNotExpected},
		{"other lanes are made before D was asked what had arrived", func(lk *link, l *lane) {
			lk.breakLane(l, errors.New("test"))
			lk.told(&reply{Next: 9})
		}, false, nil},
		{"other lanes are made while it is under way", func(lk *link, l *lane) { lk.told(&reply{Next: 9}) }, false, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			lk := newTestLink(t, 2)
			lk.mends, lk.tells = true, true
			w := lk.testWrite("t", 7, lk.lanes[0], 3)
			lk.update(func(lk *link) { c.word(lk, lk.lanes[0]) })
			if w.over != c.ends || !errors.Is(w.cause, c.want) {
				t.Errorf("over: %v with %v, want %v with %v", w.over, w.cause, c.ends, c.want)
			}
			lk.update(func(lk *link) { lk.fail(w, errStopped) })
		})
	}
}
