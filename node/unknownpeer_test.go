package node

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/kvconn/kvconn/bootstrap"
	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/natsbus"
	"github.com/kvconn/kvconn/wire"
)

// livingHost says of each rank that it is connected.
type livingHost struct{ fakeHost }

func (*livingHost) Listens(context.Context, core.AgentID) bool { return true }

// TestWhatUnknownPeersAreTold: whatever an unknown peer asks while others have loads under way and a
// rank has joined, no answer holds another agent's id, or the id of a transfer that the
// unknown peer has not named. No line of the log that it causes holds another decode agent's id
// or a transfer's.
func TestWhatUnknownPeersAreTold(t *testing.T) {
	o, logs := observer.New(zap.InfoLevel)
	a, _ := agentWithoutBus(t)
	a.cfg.EngineID, a.cfg.DPSize, a.cfg.TPSize, a.cfg.PPSize = "e", 1, 2, 1
	g := newJoinedRanks(&a.cfg, zap.New(o), &rankListing{&bootstrap.Table{}, func() string { return "http://127.0.0.1:1" }}, &livingHost{})
	a.server.joined, a.server.log = g, g.log
	defer g.close()
	// Others: agents with an id of their own key and with one of an nkey, and a rank.
	others := []string{string(natsbus.NewIdentity().ID()), "U" + strings.Repeat("A2", 27) + "B-" + "C3D4E5F", string(natsbus.NewIdentity().ID())}
	unknownPeer := string(natsbus.NewIdentity().ID())
	load := func(id string, blocks ...uint32) *wire.Request {
		return &wire.Request{Kind: wire.KindLoad, Load: &wire.Load{TransferID: id, Transport: "tcp", Grant: []byte{1}, Groups: []wire.Blocks{{IDs: blocks}}, LeaseMS: 30000}}
	}
	renew := func(loads ...string) *wire.Request {
		return &wire.Request{Kind: wire.KindRenew, Renew: &wire.Renew{Loads: loads, Claims: loads}}
	}
	join := func(id string, tp int) *wire.Request {
		return &wire.Request{Kind: wire.KindJoin, Join: &wire.Join{New: true, Agent: &wire.Agent{Version: wire.Version, ID: id, EngineID: "e", TPRank: tp, TPSize: 2, PPSize: 1, Joined: true}}}
	}
	for i, id := range []core.TransferID{"secret-0", "secret-1", "secret-2"} {
		if _, err := a.Offer([]core.OfferRequest{{ID: id, Selection: kv.Selection{Blocks: [][]kv.BlockID{{kv.BlockID(i + 1)}, {}}}}}); err != nil {
			t.Fatal(err)
		}
	}
	for i, list := range [][]*wire.Request{
		{helloOf(nil), load("secret-0", 7), load("secret-1", 8), renew("secret-early")}, {helloOf(nil), load("secret-2", 9)}, {join(others[2], 1)},
	} {
		for _, req := range list {
			req.From = others[i]
			if rep := a.server.serve("via", req); rep.Code != 0 {
				t.Fatalf("%+v is refused: %s", req, rep.Reason)
			}
		}
	}
	a.machine.tell(core.Written{ID: "secret-0", Err: errors.New("it broke, secretly")}) // its end names the agent that it was sent to
	told := ""
	hear := func(knows string, req *wire.Request) {
		req.From = unknownPeer
		rep := a.server.serve("via", req)
		said := rep.Reason
		for _, e := range rep.Ends {
			said += "\n" + e.Reason
		}
		for _, id := range []string{others[0], others[1], others[2], "secret-"} {
			if id != knows && strings.Contains(said, id) {
				t.Errorf("kind %d is answered with %q", req.Kind, said)
			}
		}
		told += said + "\n"
	}
	var named []*wire.Request // the unknown peer has heard of these transfers
	for _, id := range []string{"secret-0", "secret-1", "secret-2", "secret-early"} {
		named = append(named, load(id, 7), load(id, 7, 8, 9), load(id+"\x000/2@0", 7), renew(id), renew(id+"\x001/2@0"),
			&wire.Request{Kind: wire.KindFinish, Finishes: []wire.Finish{{TransferID: id, Code: 5, Reason: "x"}}}, renew(id))
	}
	asked := []*wire.Request{
		load("t", 7), renew("t"), {Kind: wire.KindFinish, Finishes: []wire.Finish{{TransferID: "t"}}},
		{Kind: wire.KindSignal, Signal: &wire.Signal{Transport: "sig"}},
		join(unknownPeer, 1), join(others[0], 1), join(unknownPeer, 0), {Kind: 99},
		helloOf(func(h *wire.Agent) { h.Version++ }), helloOf(func(h *wire.Agent) { h.Shapes = nil }), helloOf(func(h *wire.Agent) { h.Endpoints = nil }),
		helloOf(func(h *wire.Agent) { h.ID = others[0] }), // from here on it was met
		load("t", 7), load("u", 1<<31), renew("t", "u"), {Kind: wire.KindSignal, Signal: &wire.Signal{Transport: "tcp"}},
	}
	for i := range 12 { // more than there is room for
		asked = append(asked, load(fmt.Sprint("flood-", i), 7), renew(fmt.Sprint("claim-", i)))
	}
	for _, req := range asked {
		hear("", req)
	}
	for _, req := range named {
		hear("secret-", req)
	}
	for _, text := range []string{
		"of another engine has it and still answers", "asks to register agent of another engine", "sending to decode agent of another engine",
		"being loaded by decode agent of another engine", "say hello first", "already wait for requests", "no transport in common",
	} {
		if !strings.Contains(told, text) {
			t.Errorf("nobody is told %q", text)
		}
	}
	for _, text := range []string{"rank not registered", "decode agent refused"} {
		if logs.FilterMessageSnippet(text).Len() == 0 {
			t.Errorf("no line says %q", text)
		}
	}
	for _, line := range logs.All() {
		text := fmt.Sprint(line.Message, line.ContextMap())
		for _, id := range []string{others[0], others[1], "secret-"} { // the rank in a place is named: its operator must find it
			if strings.Contains(text, id) {
				t.Errorf("the log says %s", text)
			}
		}
	}
}
