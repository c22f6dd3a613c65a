package attack

import (
	"regexp"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/wire"
)

// anAgentsID is what the ids of agents look like.
var anAgentsID = regexp.MustCompile(`\b([A-Z2-7]{32}|U[A-Z2-7]{55}-[A-Z2-7]{7})\b`)

// guesses are what a decode agent asks that knows, or guesses, the ids of others' transfers.
func guesses(ids ...string) (list []*wire.Request) {
	load := func(id, transport string, blocks ...uint32) *wire.Request {
		l := &wire.Load{TransferID: id, Transport: transport, Grant: make([]byte, 16), LeaseMS: 30_000}
		l.Groups = []wire.Blocks{{IDs: blocks}}
		return &wire.Request{Kind: wire.KindLoad, Load: l}
	}
	for _, id := range ids {
		part := string(machine.PartID(core.TransferID(id), kv.Share{Of: 2}))
		list = append(list, load(id, "tcp", 1), load(id, "rdma", 1), load(id, "tcp", 1<<31), load(part, "tcp", 1),
			&wire.Request{Kind: wire.KindRenew, Renew: &wire.Renew{Loads: []string{id, part}, Claims: []string{id, part}}},
			&wire.Request{Kind: wire.KindFinish, Finishes: []wire.Finish{
				{TransferID: id, Code: int(core.Failed), Reason: "x"}, {TransferID: part, Code: int(core.OK)}}})
	}
	signal := &wire.Request{Kind: wire.KindSignal, Signal: &wire.Signal{Transport: "tcp", Data: []byte{1}}}
	join := &wire.Request{Kind: wire.KindJoin, Join: &wire.Join{Agent: aHello().Hello, New: true}}
	other, none := aHello(), aHello()
	other.Hello.Version++
	none.Hello.Shapes = nil
	return append(list, signal, join, other, none, &wire.Request{Kind: 99})
}

// told are the texts of an answer.
func told(rep *wire.Reply) string {
	text := rep.Reason
	for _, e := range rep.Ends {
		text += "\n" + e.Reason
	}
	return text
}

// TestWhatAnswersTell: a decode agent of the attacker's asks for transfers of others that wait, that have ended and that were
// aborted. Nothing that it is told has another agent's id, none of its words changes a transfer, and it learns of no transfer that it
// has not named.
func TestWhatAnswersTell(t *testing.T) {
	inEachDeployment(t, func(s *scenario) {
		p, d := s.start("prefill", nil), s.start("decode", nil)
		p.say("fill 170")
		if l := transfer(s, p, d, "secret-done"); l.Code != "ok" {
			s.Fatal(l)
		}
		if !loadEarly(p, d, "secret-aborted") {
			s.Fatal("prefill does not keep the load")
		}
		d.say("cancel secret-aborted")
		d.report("secret-aborted")
		p.poll("the abort", func(l said) bool { return l.Stats.OffersEarly == 0 })
		if !loadEarly(p, d, "secret-waits") {
			s.Fatal("prefill does not keep the load")
		}
		r, _ := s.met(p)
		asked := 0
		for round := range 2 {
			for _, req := range guesses("secret-done", "secret-aborted", "secret-waits") {
				rep, err := r.ask(p, req)
				if err != nil && req.Kind != wire.KindJoin && req.Kind != 99 {
					s.Fatal(err)
				}
				if asked++; err != nil {
					continue
				}
				for _, id := range anAgentsID.FindAllString(told(rep), -1) {
					if id != r.id && id != p.id {
						s.Errorf("it is told of agent %s: %q", id, told(rep))
					}
				}
				text := told(rep)
				if s.nkeys && strings.Contains(text, s.decode.public) {
					s.Errorf("it is told decode's key: %q", text)
				}
				if req.Kind != wire.KindFinish && strings.Contains(text, "secret-") && !strings.Contains(text, nameIn(req)) {
					s.Errorf("it is told of a transfer that it has not named: %q", text)
				}
			}
			if round == 0 {
				p.say("offer secret-waits 4 4")
				if l := d.report("secret-waits"); l.Code != "ok" {
					s.Errorf("the load that waited: %+v", l)
				}
			}
		}
		if bytes := d.say("bytes 20 4").Bytes; bytes["170"] != fourBlocks {
			s.Errorf("decode has %v", bytes)
		}
		got(s, "another client's request id in a refusal (at 1a5364a)",
			"0 ids of others in the answers to %d requests, and the honest load well", asked)
	})
}

// nameIn is the transfer that a request names, without its share.
func nameIn(req *wire.Request) (name string) {
	switch {
	case req.Load != nil:
		name = req.Load.TransferID
	case req.Renew != nil:
		name = req.Renew.Loads[0]
	}
	name, _, _ = strings.Cut(name, "\x00")
	return name
}
