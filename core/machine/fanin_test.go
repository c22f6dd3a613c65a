package machine_test

import (
	"errors"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/kv"
)

// TestPeerGoneWhileAClaimIsDivided: a claim is found to have a part at each of two agents. The first part asks its agent at once, and that
// finds that the agent has been silent for too long. So the claim is lost, with both parts: none is left that no call reaches, and the other
// agent is told.
func TestPeerGoneWhileAClaimIsDivided(t *testing.T) {
	l, err := kv.NewLayout([]kv.Region{{Name: "k", Base: 1 << 20, BlockStride: 64, BlockBytes: 64, NumBlocks: 16}, {Name: "v", Base: 1 << 21, BlockStride: 64, BlockBytes: 64, NumBlocks: 16}})
	if err != nil {
		t.Fatal(err)
	}
	m := &machine.Told{Machine: machine.New(l, core.Options{ReportClaims: true})}
	now, from := time.Unix(0, 0), core.Target{EngineID: "e", DPRank: -1}
	answer := func(act core.Action) { // nobody hears a renewal
		switch v := act.(type) {
		case core.Resolve:
			peer := map[core.TransferID]core.AgentID{"kept": "silent", "divided": "previous"}[v.ID]
			if !v.Fresh {
				m.Tell(now, core.Resolved{ID: v.ID, Seq: v.Seq, Peer: peer})
			}
		case core.SendRenew:
			m.Tell(now, core.RenewReplied{Renewal: v, Absent: v.Peer == "previous", Err: errors.New("no answer")})
		}
	}
	answerAll := func() (seq uint64) {
		for acts := m.Actions(); len(acts) > 0; acts = m.Actions() {
			for _, act := range acts {
				if v, is := act.(core.Resolve); is && v.Fresh && v.ID == "divided" {
					seq = v.Seq
				}
				answer(act)
			}
		}
		return seq
	}
	m.Tell(now, core.ClaimRequest{ID: "kept", From: from})
	answerAll()
	patience := core.Defaults.PeerTimeout - 2*core.TickInterval
	for now.Add(core.TickInterval).Sub(time.Unix(0, 0)) < patience {
		now = now.Add(core.TickInterval)
		m.Tell(now, core.Tick{})
		answerAll()
	}
	m.Tell(now, core.ClaimRequest{ID: "divided", From: from})
	seq := answerAll() // its agent is gone: another one is looked up
	if seq == 0 || m.StateOf(core.SideLoad, "kept") != "asked" {
		t.Fatalf("the claim is %s, the other one %s: the test is of nothing", m.StateOf(core.SideLoad, "divided"), m.StateOf(core.SideLoad, "kept"))
	}
	now = now.Add(core.TickInterval)
	m.Tell(now, core.ResolvedParts{ID: "divided", Seq: seq, Found: []core.FoundPart{
		{From: from, Share: kv.Share{K: 0, Of: 1, Source: 0}, Regions: []uint32{0}, Peer: "silent"},
		{From: from, Share: kv.Share{K: 0, Of: 1, Source: 1}, Regions: []uint32{1}, Peer: "lives"},
	}})
	reported, told := false, false
	for _, act := range m.Actions() {
		switch v := act.(type) {
		case core.Report:
			reported = reported || v.ID == "divided" && v.Side == core.SideClaim && v.Code == core.PeerLost
		case core.SendFinish:
			told = told || v.Peer == "lives"
		}
	}
	if n := m.Sizes(); n.Claims != 1 || n.FanIns != 0 || !reported || !told {
		t.Errorf("left: %+v; the engine was told: %v, the other agent: %v", n, reported, told)
	}
	m.Tell(now, core.Close{})
	if m.Busy() {
		t.Errorf("after Close: %+v", m.Sizes())
	}
}
