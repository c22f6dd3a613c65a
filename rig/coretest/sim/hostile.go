package sim

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/kv"
)

// hostile is a peer that every agent has let in: it has an identity of its own, has said
// hello to all, and knows the ids of all transfers. It says of others' transfers what it
// likes, in others' names too. None of it may move a machine that knows whose the transfer
// is.
//
// What holds it off is package natsbus, whose rules are here as far as they decide: a
// message is from whom its connection has proved, a proof is good on one connection, a
// ticket is of one D, and nobody may answer for another.
type hostile struct {
	w      *world
	id     core.AgentID
	named  int     // transfers of its own
	proofs []proof // that decode agents gave to its host, to which a client had sent them
}

// proof is a decode agent's, over the connection to one server.
type proof struct{ of, to core.AgentID }

// attacks is how often it strikes in a run.
const attacks = 60

func (w *world) admitHostile() {
	h := &hostile{w: w, id: "evil"}
	for range attacks {
		w.after(time.Duration(h.w.hostility.Int64N(int64(2*act))), h.strike)
	}
	if w.plan.hoards {
		w.after(time.Duration(w.hostility.Int64N(int64(act))), h.hoard)
	}
}

// hoard has an engine offer what the hostile peer has asked for, by a client of its own. The peer never loads it.
func (h *hostile) hoard() {
	w := h.w
	p := w.hosts[0] // a prefill rank
	p.run(func(a *agent) {
		dl := &deal{id: "hoard", ps: []*host{p}}
		w.deals[dl.id] = dl
		a.wait(&want{id: dl.id, n: w.plan.blocks, until: w.now + time.Second, none: func() {}, got: func(blocks []kv.BlockID) error {
			err := a.offer(dl.id, blocks)
			if err == nil {
				w.faults["hostile-hoard"]++
				h.keep(a, dl.id)
			}
			return err
		}})
	})
}

// keep renews a claim until P has ended the transfer.
func (h *hostile) keep(a *agent, id core.TransferID) {
	answer := a.tell(core.RenewMessage{From: h.id, Account: core.Account(h.id), Claims: []core.TransferID{id}}, nil, "renew peer=%s claims=[%s]", h.id, id)
	if answer.(core.AnswerRenew).Answers[0].Status == core.StatusOffered {
		a.after(h.w.plan.opt.Lease/3, func() { h.keep(a, id) })
	}
}

// strike attacks one agent, about one transfer of the agent's.
func (h *hostile) strike() {
	w := h.w
	a := w.hosts[h.w.hostility.IntN(len(w.hosts))].agent
	if a == nil {
		return
	}
	what := h.w.hostility.IntN(7)
	a.run(func() {
		if what == 6 && a.host.prefill && !a.closing && !a.shut {
			h.crowd(a)
			return
		}
		halves := a.known()
		if len(halves) == 0 || a.closing || a.shut {
			return
		}
		x := halves[h.w.hostility.IntN(len(halves))]
		switch {
		case what == 0:
			h.steal(a)
		case what == 1 && !a.host.prefill:
			h.answer(a, x)
		case what == 2 && a.host.prefill:
			h.relay(a, x)
		default:
			h.say(a, x, fault.Pick("from-believed", h.id, x.peer))
		}
	})
}

// knownHalf is a half of which an agent knows the other side.
type knownHalf struct {
	side core.Side
	id   core.TransferID
	peer core.AgentID
}

// known lists them, in one order.
func (a *agent) known() (list []knownHalf) {
	ids := map[core.TransferID]bool{}
	for _, d := range a.w.all {
		for of := range d.towards {
			ids[of.id] = true
		}
		for id := range d.claims {
			ids[id] = true
		}
	}
	for _, id := range slices.SortedFunc(maps.Keys(ids), compare) {
		for _, side := range []core.Side{core.SideLoad, core.SideOffer} {
			if peer := a.m.PeerOf(side, id); peer != "" {
				list = append(list, knownHalf{side, id, peer})
			}
		}
	}
	return list
}

// say sends one message about another's transfer.
func (h *hostile) say(a *agent, x knownHalf, from core.AgentID) {
	w := h.w
	w.faults["hostile-message"]++
	defer h.unmoved(a, x, "a message of "+string(h.id))()
	switch h.w.hostility.IntN(4) {
	case 0:
		code := []core.Code{core.OK, core.Cancelled, core.Failed}[h.w.hostility.IntN(3)]
		a.event(core.FinishMessage{From: from, Account: core.Account(from), ID: x.id, Code: code, Reason: "evil"},
			"finish %s peer=%s code=%v why=[evil]", x.id, from, code)
	case 1:
		a.event(core.RestartMessage{From: from, ID: x.id, Digest: "evil"}, "restart %s peer=%s digest=evil", x.id, from)
	case 2:
		loads, claims := []core.TransferID{x.id}, []core.TransferID{x.id}
		if !a.host.prefill {
			claims = nil // package node answers for those of agents only that have said hello to a prefill engine
		}
		answer := a.tell(core.RenewMessage{From: from, Account: core.Account(from), Loads: loads, Claims: claims}, nil, "renew peer=%s%s%s", from, optional("ids", list(loads)), optional("claims", list(claims)))
		for _, ans := range answer.(core.AnswerRenew).Answers {
			if x.side == core.SideOffer && ans.Status != core.StatusUnknown {
				w.fault(x.id, "%s: %s is told that %q, which is kept for %s, is %s", a.id, h.id, x.id, x.peer, statusNames[ans.Status])
			}
		}
	default:
		if !a.host.prefill {
			return
		}
		block := []kv.BlockID{0}
		a.tell(core.LoadMessage{ID: x.id, Peer: from, Account: core.Account(from), Grant: []byte("evil"), Selection: kv.Selection{First: []uint32{0}, Blocks: [][]kv.BlockID{block}}, Lease: w.plan.opt.Lease}, func(answer core.Action) {
			if answer.(core.AnswerLoad).Code == core.OK {
				w.fault(x.id, "%s: %s may load %q, which is kept for %s", a.id, h.id, x.id, x.peer)
			}
		}, "loaded %s peer=%s grant=evil first=[0] blocks=[0] lease=%v", x.id, from, w.plan.opt.Lease)
	}
}

// crowd claims transfers that nobody knows, more than there is room for, and tells of the
// ends of others: under one name, or each under a name of its own.
func (h *hostile) crowd(a *agent) {
	w := h.w
	w.faults["hostile-crowd"]++
	alone := w.hostility.IntN(2) == 0
	all := make([]core.TransferID, 3*w.plan.opt.MaxTransfers)
	for i := range all {
		h.named++
		all[i] = core.TransferID(fmt.Sprint("evil", h.named))
	}
	claims, ends := all[w.plan.opt.MaxTransfers:], all[:w.plan.opt.MaxTransfers]
	name := func(id core.TransferID) core.AgentID {
		if alone {
			return h.id
		}
		return core.AgentID(id)
	}
	per := 1
	if alone {
		per = len(claims)
	}
	for some := range slices.Chunk(claims, per) {
		from := name(some[0])
		a.tell(core.RenewMessage{From: from, Account: core.Account(h.id), Claims: some}, nil, "renew peer=%s account=%s claims=[%s]", from, h.id, list(some))
	}
	for _, id := range ends {
		a.event(core.FinishMessage{From: name(id), Account: core.Account(h.id), ID: id, Code: core.Failed, Reason: "evil"},
			"finish %s peer=%s account=%s code=%v why=[evil]", id, name(id), h.id, core.Failed)
	}
}

// relay shows P the proof that a decode agent gave to the hostile host, and goes on in that
// agent's name.
func (h *hostile) relay(a *agent, x knownHalf) {
	if x.side != core.SideOffer {
		return
	}
	h.w.faults["hostile-relay"]++
	h.proofs = append(h.proofs, proof{of: x.peer, to: h.id}) // a client has sent that agent here
	shown := h.proofs[len(h.proofs)-1]
	if shown.to == a.id || fault.On("proof-not-bound") {
		h.say(a, x, shown.of)
	}
}

// answer tells D in P's place how a load stands, at the subject where D awaits P's answer.
func (h *hostile) answer(a *agent, x knownHalf) {
	h.w.faults["hostile-answer"]++
	if x.side != core.SideLoad || !fault.On("reply-subject-free") {
		return
	}
	defer h.unmoved(a, x, "an answer of "+string(h.id))()
	seq := a.asked[x.id]
	a.event(core.LoadAnswered{ID: x.id, Seq: seq, Answer: core.LoadRefused, Code: core.Failed, Reason: "evil"},
		"answered %s seq=%d answer=refused code=failed why=[evil]", x.id, seq)
}

// steal opens a stream to P with the ticket that the hostile peer's own hello was given.
func (h *hostile) steal(a *agent) {
	h.w.faults["hostile-stream"]++
	mine := a.ticketFor(h.id)
	for _, d := range slices.Sorted(maps.Keys(a.tickets)) {
		if a.tickets[d] == mine {
			h.w.fault("", "%s: a stream of %s is taken for one of %s, whose bytes it gets", a.id, h.id, d)
		}
	}
}

// unmoved returns a check that a machine is as it was.
func (h *hostile) unmoved(a *agent, x knownHalf, what string) func() {
	stand := func() string {
		sizes := a.m.Sizes()
		sizes.Ended = 0
		return fmt.Sprintf("%+v, %d actions, %d reports, %q %s with %s", sizes, a.queued(), a.reported,
			x.id, a.m.StateOf(x.side, x.id), a.m.PeerOf(x.side, x.id))
	}
	before := stand()
	return func() {
		if after := stand(); after != before {
			h.w.fault(x.id, "%s: %s about %q moved the machine: it had %s, and has %s", a.id, what, x.id, before, after)
		}
	}
}
