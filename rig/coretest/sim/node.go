package sim

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvconn/kvconn/core"
)

// node is what package node does around a machine: one goroutine performs the actions of core.OfMemory in
// order, another one the rest (run.go), a table holds the peers (peers.go), a queue for each peer holds what is
// to be said to it (peerqueue.go, messages.go), and serve.go answers requests.
type node struct {
	memory     todo // actions of core.OfMemory
	control    todo // the others
	peers      map[core.AgentID]*peer
	byTarget   map[core.Target]core.AgentID
	byEngine   map[core.Target][]core.FoundPart
	looking    map[core.Target][]core.Resolve
	peerQueues map[core.AgentID]*peerQueue
	outbox     map[core.AgentID][]core.Action    // something is under way to each that is there
	probing    map[core.AgentID]bool             // it is being asked whether it lives
	asked      map[core.TransferID]uint64        // seq of the newest load
	anew       map[string]bool                   // P's words upon which a load began anew
	loaded     map[core.TransferID]bool          // of which a load has come
	resuming   bool                              // the machine is to be told Resume
	early      map[core.TransferID]time.Duration // when a claim or load came that no engine has named
	reaped     time.Duration                     // the newest of them that ended since no engine came
	heard      map[core.AgentID]time.Duration    // when a D has renewed or loaded last, by this process's clock
}

type peer struct {
	gone   bool
	opened time.Duration // by the clock of the agent that remembers it
	heard  time.Duration // when it answered a load last
	mute   time.Duration // until then its loads are not tried
}

type peerQueue struct {
	queue   []func(done func())
	running int
}

func (n *node) init() {
	n.peers = map[core.AgentID]*peer{}
	n.byTarget = map[core.Target]core.AgentID{}
	n.byEngine = map[core.Target][]core.FoundPart{}
	n.early = map[core.TransferID]time.Duration{}
	n.heard = map[core.AgentID]time.Duration{}
	n.looking = map[core.Target][]core.Resolve{}
	n.peerQueues = map[core.AgentID]*peerQueue{}
	n.outbox = map[core.AgentID][]core.Action{}
	n.probing = map[core.AgentID]bool{}
	n.asked = map[core.TransferID]uint64{}
	n.anew = map[string]bool{}
	n.loaded = map[core.TransferID]bool{}
}

func (a *agent) perform(act core.Action) {
	switch v := act.(type) {
	case core.Resolve:
		a.resolve(v)
	case core.Expect:
		grant, err := a.expect(v)
		a.event(core.Expecting{ID: v.ID, Grant: []byte(grant), Err: err},
			"expecting %s grant=%s%s", v.ID, grant, failure(err))
	case core.SendLoad:
		a.do(v.Peer, func(done func()) { a.sendLoad(v, done) })
	case core.SendRenew:
		a.sendRenew(v)
	case core.SendProbe:
		a.sendProbe(v)
	case core.SendFinish:
		a.post(v.Peer, v)
	case core.SendRestart:
		a.post(v.Peer, v)
	case core.Forget:
		if p := a.peers[v.Peer]; p != nil && v.Gone {
			p.gone = true
		}
		a.unmap(v.Peer)
	case core.Revoke:
		a.fence(v.ID, func() {
			a.ledger.disarmed(v.ID)
			a.event(core.Revoked(v), "revoked %s", v.ID)
		})
	case core.Write:
		owner := a.owners[0]
		a.owners = a.owners[1:]
		if a.peers[v.Peer] == nil {
			a.written(v.ID, fmt.Errorf("decode agent %s is not known any more", v.Peer))
			return
		}
		a.write(v, owner)
	case core.Await:
		a.await(v)
	case core.StopWrite:
		a.stopWrite(v.ID)
	case core.Yield:
		a.after(a.resumeAfter(), func() {
			a.resuming = false
			a.event(core.Resume{}, "resume")
		})
	default:
		a.w.fault("", "%s: unknown action %T", a.id, act)
	}
}

// resumeAfter is mostly nothing, sometimes so long that ticks and messages come before, and that the process is stopped meanwhile.
func (a *agent) resumeAfter() time.Duration {
	if a.w.yielding.IntN(3) > 0 {
		return 0
	}
	return time.Duration(a.w.yielding.Int64N(int64(3 * core.TickInterval)))
}

// do runs the calls that wait for a peer, each peer apart and a bounded number at a time.
func (a *agent) do(to core.AgentID, f func(done func())) {
	l := a.peerQueues[to]
	if l == nil {
		l = &peerQueue{}
		a.peerQueues[to] = l
	}
	l.queue = append(l.queue, f)
	if l.running < a.w.plan.perPeer {
		l.running++
		a.next(to, l)
	}
}

func (a *agent) next(to core.AgentID, l *peerQueue) {
	if len(l.queue) == 0 {
		if l.running--; l.running == 0 {
			delete(a.peerQueues, to)
		}
		return
	}
	f := l.queue[0]
	l.queue = l.queue[1:]
	f(func() { a.next(to, l) })
}

func (a *agent) unmap(id core.AgentID) {
	for t, p := range a.byTarget {
		if p == id {
			delete(a.byTarget, t)
		}
	}
	maps.DeleteFunc(a.byEngine, func(_ core.Target, found []core.FoundPart) bool {
		return slices.ContainsFunc(found, func(f core.FoundPart) bool { return f.Peer == id })
	})
}

// request asks an agent that is in the table.
func (a *agent) request(to core.AgentID, bound time.Duration, serve func(p *agent) func(), answer func(absent bool, err error)) {
	if a.peers[to] == nil {
		a.after(0, func() { answer(false, errUnknown) })
		return
	}
	a.ask(to, bound, serve, answer)
}

// insist asks until there is an answer, for a little less than PeerTimeout.
func (a *agent) insist(to core.AgentID, serve func(p *agent) func(), answer func(absent bool, err error)) {
	w := a.w
	bound := w.plan.opt.PeerTimeout
	end := w.now + bound - 2*core.TickInterval
	var try func()
	try = func() {
		a.request(to, min(bound/3, end-w.now), serve, func(absent bool, err error) {
			if err == nil || absent || end-w.now < core.TickInterval {
				answer(absent, err)
				return
			}
			w.faults["retry"]++
			a.after(core.TickInterval/2, try)
		})
	}
	try()
}

func (a *agent) sendLoad(v core.SendLoad, done func()) {
	answered := func(answer core.LoadAnswer, code core.Code, why string) {
		a.checkStale(v.ID, v.Seq, func() {
			a.event(core.LoadAnswered{ID: v.ID, Seq: v.Seq, Answer: answer, Code: code, Reason: why},
				"answered %s seq=%d answer=%v code=%v%s", v.ID, v.Seq, answer, code, optional("why", why))
		})
		done()
	}
	if p := a.peers[v.Peer]; p == nil || p.gone {
		answered(core.LoadAbsent, core.PeerLost, fmt.Sprintf("prefill agent %s is gone", v.Peer))
		return
	}
	if a.w.chance(a.w.plan.killed) {
		a.w.byID[v.Peer].killedWhenAsked()
	}
	p, began := a.peers[v.Peer], a.w.now
	if began < p.mute {
		answered(core.LoadRefused, core.PeerLost, fmt.Sprintf("prefill agent %s does not answer other loads", v.Peer))
		return
	}
	var answer core.LoadAnswer
	var code core.Code
	var why string
	a.insist(v.Peer, func(p *agent) func() {
		ans, c, reason := p.loadArrived(a.id, v)
		return func() { answer, code, why = ans, c, reason }
	}, func(absent bool, err error) {
		if err != nil {
			if pause := a.w.plan.opt.PeerTimeout / 3; p.heard < began || a.w.now-p.heard >= pause {
				p.mute = a.w.now + pause
			}
			answer = core.LoadRefused
			if absent {
				answer = core.LoadAbsent
			}
			answered(answer, core.PeerLost, fmt.Sprintf("prefill agent %s does not answer: %v", v.Peer, err))
			return
		}
		p.heard, p.mute = a.w.now, 0
		if answer == core.LoadAccepted {
			a.promised(v.ID, v.Peer)
		}
		if code == core.Closed {
			answer = core.LoadAbsent
		}
		answered(answer, code, why)
	})
}

// killedWhenAsked: P dies before or after it answers, and another is up soon.
func (p *agent) killedWhenAsked() {
	w, h := p.w, p.host
	w.after(w.delay(), func() {
		if h.agent != p || h.stopped || p.closing {
			return
		}
		w.faults["killed-when-asked"]++
		h.crash()
		w.acted(w.now + time.Second)
		w.after(50*time.Millisecond+w.upTo(500*time.Millisecond), func() {
			if h.agent == nil {
				h.open()
				w.note("%s is there", h.agent.id)
			}
		})
	})
}

func (a *agent) loadArrived(from core.AgentID, v core.SendLoad) (answer core.LoadAnswer, code core.Code, why string) {
	if a.peers[from] == nil {
		return core.LoadSayHello, core.OK, "say hello first"
	}
	a.heard[from] = a.now()
	lm := core.LoadMessage{ID: v.ID, Peer: from, Account: core.Account(from), Grant: v.Grant, Selection: v.Selection, Prompt: v.Prompt, Lease: v.Lease,
		Match: a.w.match(a.host, a.w.byID[from].host)}
	got := a.tell(lm, nil, "loaded %s peer=%s grant=%s%s first=[%s]%s%s%s%s lease=%v", v.ID, from, v.Grant, a.w.byID[from].host.said(), list(v.First), groups(v.Blocks),
		optional("tokens", list(v.Tokens)), optional("of", list(v.Regions)), prompt(v.Prompt), v.Lease)
	said := got.(core.AnswerLoad)
	if said.Code != core.OK {
		answer = core.LoadRefused
	}
	return answer, said.Code, said.Reason
}

var statusNames = [...]string{"unknown", "early", "prefill", "offered", "sending", "sent", "ended", "restart"}

func (a *agent) sendRenew(v core.SendRenew) {
	var answers []core.Answer
	a.request(v.Peer, a.w.plan.opt.PeerTimeout/3, func(p *agent) func() {
		got := p.renewArrived(a.id, v)
		return func() { answers = got }
	}, func(absent bool, err error) {
		if err != nil && a.w.chance(a.w.plan.hang) {
			a.w.faults["hang"]++
			a.after(a.w.upTo(4*time.Second), func() { a.renewed(v, nil, absent, err) })
			return
		}
		a.renewed(v, answers, absent, err)
	})
}

func (a *agent) renewed(v core.SendRenew, answers []core.Answer, absent bool, err error) {
	done := a.checkAnew(v, answers)
	for i, ans := range answers {
		if k := i - len(v.Loads); k >= 0 {
			switch ans.Status {
			case core.StatusUnknown:
			case core.StatusSent, core.StatusEnded:
				a.released[v.Claims[k]] = true
			default:
				a.claims[v.Claims[k]] = v.Peer
			}
		}
	}
	for part, some := range v.Parts(answers) {
		a.renewedPart(core.RenewReplied{Renewal: part, Answers: some, Absent: absent, Err: err})
	}
	done()
	for i, id := range v.Claims {
		if at := len(v.Loads) + i; err == nil && at < len(answers) && (answers[at].Status == core.StatusEnded || answers[at].Status == core.StatusSent) {
			a.checkHeard(id, v.Peer)
		}
	}
}

func (a *agent) renewedPart(e core.RenewReplied) {
	var says, ends []string
	for i, ans := range e.Answers {
		says = append(says, statusNames[ans.Status])
		if ans.Status >= core.StatusEnded {
			ends = append(ends, fmt.Sprintf("%d %v %s", i, ans.Code, ans.Reason))
		}
	}
	more := ""
	if e.Renewal.More {
		more = "yes"
	}
	a.event(e, "renewed peer=%s%s%s%s%s%s%s%s", e.Renewal.Peer, optional("ids", list(e.Renewal.Loads)), optional("claims", list(e.Renewal.Claims)),
		optional("says", list(says)), optional("ends", strings.Join(ends, " | ")), optional("more", more), absence(e.Absent), failure(e.Err))
}

func (a *agent) renewArrived(from core.AgentID, v core.SendRenew) []core.Answer {
	claims := v.Claims
	if a.peers[from] == nil {
		claims = nil // its load will say hello first
	}
	a.heard[from] = a.now()
	got := a.tell(core.RenewMessage{From: from, Account: core.Account(from), Loads: v.Loads, Claims: claims}, nil, "renew peer=%s%s%s", from, optional("ids", list(v.Loads)), optional("claims", list(claims)))
	out := got.(core.AnswerRenew).Answers
	for len(out) < len(v.Loads)+len(v.Claims) {
		out = append(out, core.Answer{Status: core.StatusUnknown})
	}
	return out
}

// sendProbe is a renewal of nothing.
func (a *agent) sendProbe(v core.SendProbe) {
	a.w.faults["probe"]++
	a.probing[v.Peer] = true
	a.request(v.Peer, a.w.plan.opt.PeerTimeout/10, func(p *agent) func() {
		p.renewArrived(a.id, core.SendRenew{})
		return func() {}
	}, func(_ bool, err error) {
		delete(a.probing, v.Peer)
		absent, away := errors.Is(err, errAbsent), ""
		if absent && a.w.plan.cluster {
			away = " away=yes"
		}
		a.event(core.ProbeReplied{Peer: v.Peer, Absent: absent, Away: away != "", Err: err},
			"probed peer=%s%s%s%s", v.Peer, absence(absent), away, failure(err))
	})
}

// post brings the news of transfers' ends to a peer, in batches.
func (a *agent) post(to core.AgentID, news core.Action) {
	list, working := a.outbox[to]
	a.outbox[to] = append(list, news)
	if !working {
		a.after(a.w.delay()/8, func() { a.postNext(to) })
	}
}

func (a *agent) postNext(to core.AgentID) {
	part := a.outbox[to]
	if len(part) == 0 {
		delete(a.outbox, to)
		return
	}
	a.outbox[to] = nil
	if a.w.chance(a.w.plan.mute) { // every try is lost
		a.w.faults["finish-lost"]++
		a.after(a.w.plan.opt.PeerTimeout, func() { a.postNext(to) })
		return
	}
	a.insist(to, func(p *agent) func() {
		for _, news := range part {
			switch v := news.(type) {
			case core.SendRestart:
				done := p.checkAnew(core.SendRenew{Loads: []core.TransferID{v.ID}}, []core.Answer{{Status: core.StatusRestart, Reason: v.Digest}})
				p.event(core.RestartMessage{From: a.id, ID: v.ID, Digest: v.Digest},
					"restart %s peer=%s digest=%s", v.ID, a.id, v.Digest)
				done()
			case core.SendFinish:
				p.event(core.FinishMessage{From: a.id, Account: core.Account(a.id), ID: v.ID, Code: v.Code, Reason: v.Reason},
					"finish %s peer=%s code=%v%s", v.ID, a.id, v.Code, optional("why", v.Reason))
				if v.Code != core.OK && p.claims[v.ID] == a.id {
					p.released[v.ID] = true
					p.checkHeard(v.ID, a.id)
				}
			}
		}
		return func() {}
	}, func(bool, error) { a.postNext(to) })
}
