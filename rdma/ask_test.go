package rdma

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/coretest"
)

// TestLostNamesWhatHasBegun: the lane that carried the mark of a transfer's begin broke before the mark had landed. P names the transfer when
// it asks what has arrived. When P reaches no port of D any more, D tells how the transfer ended, and leaves one that P has not named.
func TestLostNamesWhatHasBegun(t *testing.T) {
	tr := newTestConn(t, 0).t
	sink := coretest.NewRecorder(t, "d")
	tr.sink = sink
	r := &tr.receiver
	r.init(tr, 4)
	src := &source{r: r, peer: "p", lanes: map[uint32]*lane{}, dying: map[uint32]*lane{}, live: map[uint64]*expect{}}
	r.sources["p"] = src
	for _, id := range []core.TransferID{"begun", "not begun"} {
		if _, err := r.expect(id, "p", nil); err != nil {
			t.Fatal(err)
		}
	}
	src.mu.Lock()
	src.watching.Stop()
	src.lost(&signal{Kind: signalLost, Seqs: []uint64{r.expected["begun"].grant.seq}})
	src.connected(&signal{Kind: signalConnected, Reason: "port test:1 is down"})
	other := r.expected["not begun"]
	src.mu.Unlock()
	if err := sink.Wait("received", "begun", 1).Err; !errors.Is(err, core.ErrConnectionLost) {
		t.Errorf("the transfer that P had begun ended with %v, want a lost connection", err)
	}
	if other == nil || other.ended {
		t.Error("a transfer that P had not begun has ended: P may write it when a port is back")
	}
}

// TestAsksBeforeNoPath: the last lane breaks while P looks for paths. P asks D what has arrived by it before it says that there is no path.
func TestAsksBeforeNoPath(t *testing.T) {
	cn := newTestConn(t, 1)
	told, end := make(chan signalKind, 16), make(chan struct{})
	cn.t.signal = func(_ context.Context, _ core.AgentID, msg []byte) ([]byte, error) {
		var s signal
		if _, err := s.UnmarshalMsg(msg); err != nil {
			return nil, err
		}
		told <- s.Kind
		switch s.Kind {
		case signalPorts:
			cn.update(func(cn *conn) {
				for _, l := range cn.lanes {
					cn.breakLane(l, errors.New("a cable was drawn"))
				}
			})
			return (&reply{Secret: make([]byte, secretSize)}).MarshalMsg(nil)
		case signalConnected:
			close(end)
		}
		return (&reply{}).MarshalMsg(nil)
	}
	cn.update(func(cn *conn) { cn.tasks |= makeLanes })
	select {
	case <-end:
	case <-time.After(patience):
		t.Fatal("P says nothing about its lanes")
	}
	want := []signalKind{signalPorts, signalLost, signalPorts, signalConnected}
	got := []signalKind{}
	for len(told) > 0 {
		got = append(got, <-told)
	}
	if !slices.Equal(got, want) {
		t.Errorf("P's signals are of the kinds %v, want %v", got, want)
	}
}
