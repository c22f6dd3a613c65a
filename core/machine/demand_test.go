package machine

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
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
	return &demanding{&Told{Machine: New(l, core.Options{ReportDemands: true})}, t, time.Unix(0, 0)}
}

func (w *demanding) announce(id core.TransferID) {
	w.t.Helper()
	if err := w.Try(w.now, core.Announce{ID: id}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *demanding) load(id core.TransferID, first uint32, blocks ...kv.BlockID) {
	w.t.Helper()
	if answer := w.Tell(w.now, core.LoadMessage{ID: id, Peer: "D", Grant: []byte(id), Selection: kv.Selection{First: []uint32{first}, Blocks: [][]kv.BlockID{blocks}}}); answer != accepted {
		w.t.Fatal(answer)
	}
}

// reported are the demands since the last call.
func (w *demanding) reported() (out []core.Report) {
	for _, a := range w.Actions() {
		if r, ok := a.(core.Report); ok && r.Side == core.SideDemand {
			out = append(out, r)
		}
	}
	return out
}

func (w *demanding) expect(id core.TransferID, code core.Code, first int, reason string) {
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
	w.Tell(w.now, core.RenewMessage{From: "D", Claims: []core.TransferID{"later"}}) // a claim is no room
	w.nothing()
	w.load("later", 3, 1, 2)
	w.expect("later", core.OK, 3, "")
	w.load("before", 0, 3)
	w.nothing()
	w.announce("before")
	w.expect("before", core.OK, 0, "")
	if err := w.Try(w.now, core.OfferRequest{ID: "before", Selection: kv.Selection{Blocks: [][]kv.BlockID{{1}}}}); err != nil {
		t.Fatal(err)
	}
	w.nothing()
	w.announce("unwaited")
	if err := w.Try(w.now, core.OfferRequest{ID: "unwaited", Selection: kv.Selection{Blocks: [][]kv.BlockID{{1}}}}); err != nil {
		t.Fatal(err)
	}
	w.expect("unwaited", core.OK, 0, "")
}

func TestWantIsReportedOnceForAllShares(t *testing.T) {
	w := newDemanding(t)
	w.announce("x")
	w.load(PartID("x", kv.Share{K: 0, Of: 2, Source: 0}), 2, 1)
	w.nothing()
	w.load(PartID("x", kv.Share{K: 1, Of: 2, Source: 0}), 1, 1, 2)
	w.expect("x", core.OK, 1, "")

	w.announce("y") // one share fails, the other's load is here
	w.load(PartID("y", kv.Share{K: 0, Of: 2, Source: 0}), 0, 1)
	w.Tell(w.now, core.FinishMessage{From: "E", ID: PartID("y", kv.Share{K: 1, Of: 2, Source: 0})})
	w.expect("y", core.OK, 0, "")

	w.announce("z") // no share needs anything
	w.Tell(w.now, core.FinishMessage{From: "D", ID: PartID("z", kv.Share{K: 0, Of: 2, Source: 0}), Code: core.Cancelled, Reason: "not needed"})
	w.nothing()
	w.Tell(w.now, core.FinishMessage{From: "E", ID: PartID("z", kv.Share{K: 1, Of: 2, Source: 0}), Code: core.Cancelled, Reason: "not needed"})
	w.expect("z", core.PeerCancelled, 0, "not needed")
}

// A share that is loaded is no reason to begin when this side ends the transfer.
func TestWantOfSharesThatPrefillEnds(t *testing.T) {
	share := func(k int) core.TransferID { return PartID("x", kv.Share{K: k, Of: 3, Source: 0}) }
	for name, c := range map[string]struct {
		lost bool // decode has given another share up
		ends core.Event
		code core.Code
	}{
		"cancelled":                              {false, core.Cancel{ID: "x"}, core.Cancelled},
		"closed":                                 {false, core.Close{}, core.Closed},
		"cancelled after decode gave a share up": {true, core.Cancel{ID: "x"}, core.PeerCancelled},
		"closed after decode gave a share up":    {true, core.Close{}, core.PeerCancelled},
	} {
		for loaded := range 3 {
			t.Run(fmt.Sprintf("%s, share %d is loaded", name, loaded), func(t *testing.T) {
				w := newDemanding(t)
				w.announce("x")
				w.load(share(loaded), 0, 1)
				if c.lost {
					w.Tell(w.now, core.FinishMessage{From: "E", ID: share((loaded + 1) % 3), Code: core.Cancelled})
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
	part := func(id core.TransferID, k int) core.TransferID { return PartID(id, kv.Share{K: k, Of: 2, Source: 0}) }
	w.Tell(w.now, core.FinishMessage{From: "E", ID: part("x", 1), Code: core.Cancelled, Reason: "not needed"})
	w.announce("x")
	w.nothing()
	w.Tell(w.now, core.FinishMessage{From: "D", ID: part("x", 0), Code: core.Cancelled, Reason: "not needed"})
	w.expect("x", core.PeerCancelled, 0, "not needed")

	w.Tell(w.now, core.FinishMessage{From: "E", ID: part("y", 1)})
	w.announce("y")
	w.nothing()
	w.load(part("y", 0), 4, 1)
	w.expect("y", core.OK, 4, "")
}

func TestWantIsReportedWhenItEnds(t *testing.T) {
	for name, c := range map[string]struct {
		end    func(w *demanding)
		code   core.Code
		reason string
	}{
		"cancelled by decode": {func(w *demanding) {
			w.Tell(w.now, core.FinishMessage{From: "D", ID: "x", Code: core.Cancelled, Reason: "the client went"})
		}, core.PeerCancelled, "the client went"},
		"cancelled by prefill": {func(w *demanding) { _ = w.Try(w.now, core.Cancel{ID: "x", Reason: "aborted"}) }, core.Cancelled, "aborted"},
		"decode is gone": {func(w *demanding) {
			w.Tell(w.now, core.RenewMessage{From: "D", Claims: []core.TransferID{"x"}})
			for range 400 {
				w.now = w.now.Add(100 * time.Millisecond)
				w.Tell(w.now, core.Tick{})
			}
		}, core.PeerLost, "has not renewed its claim"},
		"closed": {func(w *demanding) { w.Tell(w.now, core.Close{}) }, core.Closed, "closed"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newDemanding(t)
			w.announce("x")
			c.end(w)
			w.expect("x", c.code, 0, c.reason)
		})
	}
	w := newDemanding(t)
	w.Tell(w.now, core.FinishMessage{From: "D", ID: "early", Code: core.Cancelled, Reason: "the client went"})
	w.announce("early")
	w.expect("early", core.PeerCancelled, 0, "the client went")
}

// An id that is announced twice is refused, also when the first has ended.
func TestWantOfAUsedID(t *testing.T) {
	w := newDemanding(t)
	w.announce("x")
	if err := w.Try(w.now, core.Announce{ID: "x"}); !errors.Is(err, core.ErrDuplicate) {
		t.Errorf("announced twice: %v", err)
	}
	w.load("x", 0, 1)
	w.expect("x", core.OK, 0, "")
	if err := w.Try(w.now, core.Announce{ID: "x"}); !errors.Is(err, core.ErrDuplicate) {
		t.Errorf("announced after it was demanded: %v", err)
	}
	if err := w.Try(w.now, core.OfferRequest{ID: "x", Selection: kv.Selection{Blocks: [][]kv.BlockID{{1}}}}); err != nil {
		t.Fatal(err)
	}
	w.Tell(w.now, core.Written{ID: "x"})
	w.Actions()
	w.announce("x")
	w.expect("x", core.Refused, 0, "offered before")
}
