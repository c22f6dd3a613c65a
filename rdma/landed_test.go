package rdma

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
	"github.com/kvconn/kvconn/rig/coretest"
)

// twoGPUs are GPUs of which the second one answers a flush when it is let, with what it is given then.
type twoGPUs struct {
	GPUs
	second chan error
}

func (twoGPUs) Check() error { return nil }
func (twoGPUs) Count() int   { return 2 }

func (g twoGPUs) Flush(gpu int) error {
	if gpu == 0 {
		return nil
	}
	return <-g.second
}

// onTwoGPUs is D's half of a transport on two GPUs, and a P, with a lane that takes no more receives.
func onTwoGPUs(t *testing.T) (tr *Transport, second chan error, src *source, l *lane) {
	t.Helper()
	tr, second = newTestConn(t, 0).t, make(chan error)
	tr.cfg.GPUs = twoGPUs{nil, second}
	tr.receiver.init(tr, 4)
	l = newTestConn(t, 1).lanes[0]
	l.retired, l.lives, l.still = true, true, make(chan struct{})
	src = &source{r: &tr.receiver, peer: "p", lanes: map[uint32]*lane{}, dying: map[uint32]*lane{}, live: map[uint64]*expect{}}
	tr.receiver.sources["p"] = src
	t.Cleanup(func() {
		src.mu.Lock()
		defer src.mu.Unlock()
		if src.watching != nil {
			src.watching.Stop()
		}
	})
	return tr, second, src, l
}

// placed are transfers by name, and on which GPUs their bytes lie.
var placed = map[core.TransferID]gpuSet{"host": 0, "first": 1, "second": 2, "both": 3}

func armPlaced(t *testing.T, tr *Transport) (marks []verbs.Completion) {
	t.Helper()
	for id, gpus := range placed {
		if _, err := tr.receiver.arm(id, "p", 0, 0, gpus); err != nil {
			t.Fatal(err)
		}
		g := tr.receiver.expected[id].grant
		marks = append(marks, verbs.Completion{Status: verbs.Success, Opcode: verbs.OpReceiveImm, ID: receiveID, Imm: mark{g.slot, g.generation, 0, 1}.encode()})
	}
	return marks
}

// soonEnds waits for what a GPU that does not answer must not hold up.
func soonEnds(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Fatalf("%s waits for a GPU that does not answer", what)
	}
}

// TestLandedOnAStuckGPU: transfers have arrived on two GPUs and in host memory, all in one poll, and one GPU does not answer a flush. The lane goes on,
// and the other transfers are told. Those of this GPU, which are limited, are told when it answers, and revokes wait for that.
func TestLandedOnAStuckGPU(t *testing.T) {
	tr, second, src, l := onTwoGPUs(t)
	sink := tr.sink.(*coretest.Recorder)
	marks := armPlaced(t, tr)
	l.posted = len(marks) + 1
	soonEnds(t, "the lane", func() { src.received(l, marks) })
	for _, id := range []core.TransferID{"host", "first"} {
		if err := sink.Wait("received", id, 1).Err; err != nil {
			t.Errorf("%q: %v", string(id), err)
		}
	}
	revoked := make(chan error, 1)
	go func() { revoked <- tr.Revoke("second") }()
	for i := range 3 {
		_, err := tr.receiver.arm(core.TransferID(fmt.Sprint("more ", i)), "p", 0, 0, 0)
		if full := err != nil && strings.Contains(err.Error(), "max_transfers"); full != (i == 2) {
			t.Errorf("%d transfers beside two that wait for their GPU, of four: %v", i+1, err)
		}
	}
	for _, id := range []core.TransferID{"second", "both"} {
		if n := len(sink.All("received", id)); n > 0 {
			t.Errorf("%q was told before its GPU was flushed", string(id))
		}
	}
	select {
	case err := <-revoked:
		t.Errorf("the revoke ended with %v before the GPU was flushed", err)
	default:
	}
	close(second)
	for _, id := range []core.TransferID{"second", "both"} {
		if err := sink.Wait("received", id, 1).Err; err != nil {
			t.Errorf("%q: %v", string(id), err)
		}
	}
	soonEnds(t, "a revoke", func() {
		if err := <-revoked; err != nil {
			t.Error(err)
		}
	})
}

// TestLandedIsShared: transfers that arrive while their GPU is flushed share one flush after that.
func TestLandedIsShared(t *testing.T) {
	tr, second, src, l := onTwoGPUs(t)
	sink := tr.sink.(*coretest.Recorder)
	l.posted = 10
	for i := range 3 {
		id := core.TransferID(fmt.Sprint(i))
		if _, err := tr.receiver.arm(id, "p", 0, 0, 2); err != nil {
			t.Fatal(err)
		}
		g := tr.receiver.expected[id].grant
		soonEnds(t, "the lane", func() {
			src.received(l, []verbs.Completion{{Status: verbs.Success, Opcode: verbs.OpReceiveImm, ID: receiveID, Imm: mark{g.slot, g.generation, 0, 1}.encode()}})
		})
		if i == 0 {
			for waits := 1; waits > 0; time.Sleep(time.Millisecond) { // until the goroutine has taken it
				tr.receiver.mu.Lock()
				waits = len(tr.receiver.arrived[2])
				tr.receiver.mu.Unlock()
			}
		}
	}
	second <- errors.New("of the first")
	second <- errors.New("of the others")
	for i := range 3 {
		want := "of the others"
		if i == 0 {
			want = "of the first"
		}
		if err := sink.Wait("received", core.TransferID(fmt.Sprint(i)), 1).Err; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("transfer %d: %v", i, err)
		}
	}
}

// TestEndOnAStuckGPU: P is lost, or the transport is closed, while transfers are under way, and one GPU does not answer a flush for a time and says then
// that bytes may land. Of transfers of other memory the end is told, or they are fenced, meanwhile. Those of this GPU have no end, and their revokes say why.
func TestEndOnAStuckGPU(t *testing.T) {
	lands := fmt.Errorf("a test: %w", core.ErrMayLand)
	for _, how := range []string{"lost", "closed"} {
		t.Run(how, func(t *testing.T) {
			tr, second, src, _ := onTwoGPUs(t)
			sink := tr.sink.(*coretest.Recorder)
			armPlaced(t, tr)
			expected := map[core.TransferID]*expect{}
			for id := range placed {
				expected[id] = tr.receiver.expected[id]
				expected[id].begun = time.Now()
			}
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				if how == "closed" {
					_ = tr.receiver.close()
				} else {
					src.disconnect(errors.New("P is lost"))
				}
			}()
			for _, id := range []core.TransferID{"host", "first"} {
				soonEnds(t, "the end of "+string(id), func() { <-expected[id].told })
				soonEnds(t, "the fence of "+string(id), func() { <-expected[id].fenced })
				if err := tr.Revoke(id); err != nil {
					t.Errorf("the revoke of %q: %v", string(id), err)
				}
				if n := len(sink.All("received", id)); (n == 1) != (how == "lost") {
					t.Errorf("%q was told %d times", string(id), n)
				}
			}
			second <- lands
			second <- lands
			soonEnds(t, "all", func() { <-ended })
			for _, id := range []core.TransferID{"second", "both"} {
				if err := tr.Revoke(id); !errors.Is(err, core.ErrMayLand) {
					t.Errorf("the revoke of %q: %v", string(id), err)
				}
				if n := len(sink.All("received", id)); n > 0 {
					t.Errorf("%q was told", string(id))
				}
			}
		})
	}
}

// TestProbedOnAStuckGPU: P asks D about the bytes of lanes on trial, and one of D's GPUs does not answer a flush. D's answer comes in its time all the same,
// since an agent handles few signals at a time. The lanes can be asked about again.
func TestProbedOnAStuckGPU(t *testing.T) {
	tr, second, src, l := onTwoGPUs(t)
	tr.cfg.ConnectTimeout = 100 * time.Millisecond
	src.lanes[l.id] = l
	for range 2 {
		soonEnds(t, "the answer", func() {
			rep, err := src.probed(&signal{Kind: signalProbed, Lanes: []uint32{l.id}})
			if err != nil || len(rep.Lanes) != 1 || !strings.Contains(rep.Lanes[0].Error, "does not answer a flush") {
				t.Errorf("%+v, %v", rep, err)
			}
		})
		if l.verified {
			t.Error("nobody has looked at the lane's bytes, and they count as seen")
		}
	}
	for range 2 {
		second <- fmt.Errorf("a test: %w", core.ErrMayLand)
	}
	soonEnds(t, "the flushes", tr.wg.Wait)
	if tr.lands != nil {
		t.Errorf("Close would fail for bytes of lanes on trial, which land in no engine's block: %v", tr.lands)
	}
	close(second)
	tr.cfg.ConnectTimeout = time.Hour
	soonEnds(t, "the answer", func() {
		rep, err := src.probed(&signal{Kind: signalProbed, Lanes: []uint32{l.id}})
		if err != nil || len(rep.Lanes) != 1 || !strings.Contains(rep.Lanes[0].Error, "is not on trial") {
			t.Errorf("%+v, %v", rep, err)
		}
	})
}
