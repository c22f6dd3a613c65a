package node

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvconn/kvconn/bootstrap"
	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// fakeHost registers whatever it is given.
type fakeHost struct{ fails bool }

func (*fakeHost) Listens(context.Context, core.AgentID) bool { return false }

func (h *fakeHost) Host(_ context.Context, _ *wire.Agent, _ bool, since int64) (int64, error) {
	if h.fails {
		return 0, errors.New("the newer agent has taken it over")
	}
	return since, nil
}
func (*fakeHost) Unhost(context.Context, *wire.Agent) error { return nil }
func (*fakeHost) TTL() time.Duration                        { return time.Hour }

// joinSeed is a seed of FuzzJoin: who sends each of three messages, and the messages.
type joinSeed struct {
	senders  string
	messages [3][]byte
}

func joinSeeds(t testing.TB) []joinSeed {
	join := func(id, engine string, dp, tp, pp int, change func(*wire.Join)) []byte {
		j := &wire.Join{Agent: &wire.Agent{Version: wire.Version, ID: id, EngineID: engine, DPRank: dp, TPRank: tp, PPRank: pp, TPSize: 2, PPSize: 2, DPSize: 4, Joined: true}, New: true}
		if change != nil {
			change(j)
		}
		b, err := (&wire.Request{Kind: wire.KindJoin, Join: j}).MarshalMsg(nil)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	leave := func(j *wire.Join) { j.Leave = true }
	return []joinSeed{
		{"aba", [3][]byte{join("a", "e", 1, 1, 0, nil), join("b", "e", 1, 1, 0, nil), join("a", "e", 1, 1, 0, leave)}},
		{"abc", [3][]byte{join("a", "x", 0, 0, 0, nil), join("b", "y", 0, 1, 0, nil), join("c", "x", 0, 1, 1, leave)}},
		{"aba", [3][]byte{join("a", "x", 3, 0, 0, nil), join("b", "x", 2, 1, 0, nil), join("a", "x", 3, 0, 0, leave)}},
		{"ab", [3][]byte{join("a", "e", 1, 0, 0, nil), join("b", "e", 0, 1, 0, nil), join("", "e", 1, 1, 0, nil)}},
		{"abb", [3][]byte{join("a", "x", 3, 0, 0, nil), join("a", "x", 3, 0, 0, nil), join("a", "x", 3, 0, 0, leave)}}, // in another's name
		{"aaa", [3][]byte{join("a", "e\n", 2, 1, 0, nil), join("a", "x", -1, 1<<40, -1, nil), join("a", "x", 4, 1, 1, func(j *wire.Join) { j.Agent.TPSize = 1 << 40 })}},
	}
}

// FuzzJoin gives a first rank three joins of unknown peers, each of whom its connection has
// proved: the answer to GET /query then contradicts neither this agent nor itself, a refused
// join has left nothing, and no agent registers another.
func FuzzJoin(f *testing.F) {
	for _, seed := range joinSeeds(f) {
		f.Add(seed.senders, seed.messages[0], seed.messages[1], seed.messages[2])
	}
	f.Fuzz(func(t *testing.T, senders string, first, second, third []byte) {
		joinMessages(t, senders, [3][]byte{first, second, third}, func(*wire.Request, *wire.Reply) {})
	})
}

// TestSeedsOfFuzzJoin: the seeds' messages reach the handler. Joins and leaves are accepted
// among them; nobody's is, and none in another's name.
func TestSeedsOfFuzzJoin(t *testing.T) {
	joined, left := 0, 0
	for _, seed := range joinSeeds(t) {
		joinMessages(t, seed.senders, seed.messages, func(req *wire.Request, rep *wire.Reply) {
			switch own := req.From != "" && req.From == req.Join.Agent.ID; {
			case rep.Code == 0 && !own:
				t.Errorf("%q registers %q", req.From, req.Join.Agent.ID)
			case rep.Code == 0 && req.Join.Leave:
				left++
			case rep.Code == 0:
				joined++
			}
		})
	}
	if joined == 0 || left == 0 {
		t.Errorf("%d joins and %d leaves are accepted", joined, left)
	}
}

// joinMessages tells served of each join that can be read, and of its answer.
func joinMessages(t *testing.T, senders string, messages [3][]byte, served func(*wire.Request, *wire.Reply)) {
	a, _ := agentWithoutBus(t)
	a.cfg.EngineID, a.cfg.DPSize, a.cfg.DPRank, a.cfg.TPSize, a.cfg.PPSize = "e", 4, 1, 2, 2
	shows := &rankListing{&bootstrap.Table{}, func() string { return "http://127.0.0.1:1" }}
	g := newJoinedRanks(&a.cfg, a.log, shows, &fakeHost{fails: len(messages[0])%7 == 3})
	a.server.joined = g
	defer g.close()
	for i, b := range messages {
		req := new(wire.Request)
		if wire.Decode(b, req) != nil || req.Kind != wire.KindJoin {
			continue
		}
		req.From = senderOf(senders, i)
		before := len(g.ranks)
		rep := a.server.serve("via", req)
		if rep.Code != 0 && len(g.ranks) != before {
			t.Errorf("%+v is refused (%s), and %d ranks are there, not %d", req.Join.Agent, rep.Reason, len(g.ranks), before)
		}
		served(req, rep)
	}
	for at, n := range g.ranks {
		if at != placeOf(n.agent) || n.agent.ID == "" {
			t.Errorf("%+v has the place %+v", n.agent, at)
		}
	}
	shown, engines := 0, map[string]int{"e": 1}
	for dp, e := range shows.table.Query() {
		if other, twice := engines[e.EngineID]; twice && other != dp || dp < 0 || dp >= 4 || (dp == 1) != (e.EngineID == "e") {
			t.Errorf("dp rank %d is engine %q", dp, e.EngineID)
		}
		engines[e.EngineID] = dp
		for tp, pps := range e.WorkerAddr {
			for pp := range pps {
				if shown++; g.ranks[rankPlace{dp, tp, pp}] == nil || dp == 1 && (tp > 1 || pp > 1 || tp+pp == 0) {
					t.Errorf("dp %d tp %d pp %d is shown", dp, tp, pp)
				}
			}
		}
	}
	if shown != len(g.ranks) {
		t.Errorf("%d ranks are shown of %d", shown, len(g.ranks))
	}
}
