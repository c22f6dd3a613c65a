package core

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/kv"
)

// demanding is a P whose engine is told when its transfers are demanded.
type demanding struct {
	*Told
	t   *testing.T
	now time.Time
}

func newDemanding(t *testing.T) *demanding {
	l, err := kv.NewLayout([]kv.Region{{Name: "k", Base: 0x1000, BlockStride: 64, BlockBytes: 64, NumBlocks: 16}})
	if err != nil {
		t.Fatal(err)
	}
	return &demanding{&Told{Machine: New(l, Options{ReportDemands: true})}, t, time.Unix(0, 0)}
}

func (w *demanding) announce(id TransferID) {
	w.t.Helper()
	if err := w.Try(w.now, Announce{ID: id}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *demanding) load(id TransferID, first uint32, blocks ...kv.BlockID) {
	w.t.Helper()
	if answer := w.Tell(w.now, LoadMessage{ID: id, Peer: "D", Grant: []byte(id), Selection: kv.Selection{First: []uint32{first}, Blocks: [][]kv.BlockID{blocks}}}); answer != accepted {
		w.t.Fatal(answer)
	}
}

// reported are the demands since the last call.
func (w *demanding) reported() (out []Report) {
	for _, a := range w.Actions() {
		if r, ok := a.(Report); ok && r.Side == SideDemand {
			out = append(out, r)
		}
	}
	return out
}

func (w *demanding) expect(id TransferID, code Code, first int, reason string) {
	w.t.Helper()
	got := w.reported()
	if len(got) != 1 || got[0].ID != id || got[0].Code != code || got[0].Blocks != first || !strings.Contains(got[0].Reason, reason) {
		w.t.Errorf("reported %+v, want %q with %v, from block %d, because %q", got, string(id), code, first, reason)
	}
	if len(w.demands) != 0 {
		w.t.Errorf("demands are left: %v", w.demands)
	}
}

func (w *demanding) nothing() {
	w.t.Helper()
	if got := w.reported(); got != nil {
		w.t.Errorf("reported %+v, want nothing", got)
	}
}

func TestWantIsReportedWhenTheLoadIsHere(t *testing.T) {
	w := newDemanding(t)
	w.announce("later")
	w.nothing()
	w.Tell(w.now, RenewMessage{From: "D", Claims: []TransferID{"later"}}) // a claim is no room
	w.nothing()
	w.load("later", 3, 1, 2)
	w.expect("later", OK, 3, "")
	w.load("before", 0, 3)
	w.nothing()
	w.announce("before")
	w.expect("before", OK, 0, "")
	if err := w.Try(w.now, OfferRequest{ID: "before", Selection: kv.Selection{Blocks: [][]kv.BlockID{{1}}}}); err != nil {
		t.Fatal(err)
	}
	w.nothing()
	w.announce("unwaited")
	if err := w.Try(w.now, OfferRequest{ID: "unwaited", Selection: kv.Selection{Blocks: [][]kv.BlockID{{1}}}}); err != nil {
		t.Fatal(err)
	}
	w.expect("unwaited", OK, 0, "")
}

func TestWantIsReportedOnceForAllShares(t *testing.T) {
	w := newDemanding(t)
	w.announce("x")
	w.load(PartID("x", kv.Share{K: 0, Of: 2, Source: 0}), 2, 1)
	w.nothing()
	w.load(PartID("x", kv.Share{K: 1, Of: 2, Source: 0}), 1, 1, 2)
	w.expect("x", OK, 1, "")

	w.announce("y") // one share fails, the other's load is here
	w.load(PartID("y", kv.Share{K: 0, Of: 2, Source: 0}), 0, 1)
	w.Tell(w.now, FinishMessage{From: "E", ID: PartID("y", kv.Share{K: 1, Of: 2, Source: 0})})
	w.expect("y", OK, 0, "")

	w.announce("z") // no share needs anything
	w.Tell(w.now, FinishMessage{From: "D", ID: PartID("z", kv.Share{K: 0, Of: 2, Source: 0}), Code: Cancelled, Reason: "not needed"})
	w.nothing()
	w.Tell(w.now, FinishMessage{From: "E", ID: PartID("z", kv.Share{K: 1, Of: 2, Source: 0}), Code: Cancelled, Reason: "not needed"})
	w.expect("z", PeerCancelled, 0, "not needed")
}

// A share that is loaded is no reason to begin when this side ends the transfer.
func TestWantOfSharesThatPrefillEnds(t *testing.T) {
	share := func(k int) TransferID { return PartID("x", kv.Share{K: k, Of: 3, Source: 0}) }
	for name, c := range map[string]struct {
		lost bool // decode has given another share up
		ends Event
		code Code
	}{
		"cancelled":                              {false, Cancel{ID: "x"}, Cancelled},
		"closed":                                 {false, Close{}, Closed},
		"cancelled after decode gave a share up": {true, Cancel{ID: "x"}, PeerCancelled},
		"closed after decode gave a share up":    {true, Close{}, PeerCancelled},
	} {
		for loaded := range 3 {
			t.Run(fmt.Sprintf("%s, share %d is loaded", name, loaded), func(t *testing.T) {
				w := newDemanding(t)
				w.announce("x")
				w.load(share(loaded), 0, 1)
				if c.lost {
					w.Tell(w.now, FinishMessage{From: "E", ID: share((loaded + 1) % 3), Code: Cancelled})
				}
				w.nothing()
				if err := w.Try(w.now, c.ends); err != nil {
					t.Fatal(err)
				}
				w.expect("x", c.code, 0, "")
			})
		}
	}
}

// What became of a share before the engine announced counts as it does after.
func TestWantOfSharesThatEndedBefore(t *testing.T) {
	w := newDemanding(t)
	part := func(id TransferID, k int) TransferID { return PartID(id, kv.Share{K: k, Of: 2, Source: 0}) }
	w.Tell(w.now, FinishMessage{From: "E", ID: part("x", 1), Code: Cancelled, Reason: "not needed"})
	w.announce("x")
	w.nothing()
	w.Tell(w.now, FinishMessage{From: "D", ID: part("x", 0), Code: Cancelled, Reason: "not needed"})
	w.expect("x", PeerCancelled, 0, "not needed")

	w.Tell(w.now, FinishMessage{From: "E", ID: part("y", 1)})
	w.announce("y")
	w.nothing()
	w.load(part("y", 0), 4, 1)
	w.expect("y", OK, 4, "")
}

func TestWantIsReportedWhenItEnds(t *testing.T) {
	for name, c := range map[string]struct {
		end    func(w *demanding)
		code   Code
		reason string
	}{
		"cancelled by decode": {func(w *demanding) {
			w.Tell(w.now, FinishMessage{From: "D", ID: "x", Code: Cancelled, Reason: "the client went"})
		}, PeerCancelled, "the client went"},
		"cancelled by prefill": {func(w *demanding) { _ = w.Try(w.now, Cancel{ID: "x", Reason: "aborted"}) }, Cancelled, "aborted"},
		"decode is gone": {func(w *demanding) {
			w.Tell(w.now, RenewMessage{From: "D", Claims: []TransferID{"x"}})
			for range 400 {
				w.now = w.now.Add(100 * time.Millisecond)
				w.Tell(w.now, Tick{})
			}
		}, PeerLost, "has not renewed its claim"},
		"closed": {func(w *demanding) { w.Tell(w.now, Close{}) }, Closed, "closed"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newDemanding(t)
			w.announce("x")
			c.end(w)
			w.expect("x", c.code, 0, c.reason)
		})
	}
	w := newDemanding(t)
	w.Tell(w.now, FinishMessage{From: "D", ID: "early", Code: Cancelled, Reason: "the client went"})
	w.announce("early")
	w.expect("early", PeerCancelled, 0, "the client went")
}

// An id that is announced twice is refused, also when the first has ended.
func TestWantOfAUsedID(t *testing.T) {
	w := newDemanding(t)
	w.announce("x")
	if err := w.Try(w.now, Announce{ID: "x"}); !errors.Is(err, ErrDuplicate) {
		t.Errorf("announced twice: %v", err)
	}
	w.load("x", 0, 1)
	w.expect("x", OK, 0, "")
	if err := w.Try(w.now, Announce{ID: "x"}); !errors.Is(err, ErrDuplicate) {
		t.Errorf("announced after it was demanded: %v", err)
	}
	if err := w.Try(w.now, OfferRequest{ID: "x", Selection: kv.Selection{Blocks: [][]kv.BlockID{{1}}}}); err != nil {
		t.Fatal(err)
	}
	w.Tell(w.now, Written{ID: "x"})
	w.Actions()
	w.announce("x")
	w.expect("x", Refused, 0, "offered before")
}
