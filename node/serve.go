package node

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/ratelog"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/wire"
)

// server answers peers' requests. The bus calls it from several goroutines.
type server struct {
	id       core.AgentID
	cfg      *Config
	log      *zap.Logger
	age      func() time.Duration                     // for how long the agent has been open
	caches   func() (self *wire.Agent, t *transports) // nil while no KV caches are registered, and after a registration that failed
	peers    *peerTable
	machine  *lockedMachine
	signals  *signalling
	joined   *joinedRanks                          // nil where no other rank can join
	lifetime context.Context                       // ends with the agent
	queues   struct{ hellos, joins ratelog.Limit } // bound the log's lines on refused agents, which may ask as often as they like
}

func (s *server) serve(via core.Via, req *wire.Request) *wire.Reply {
	rep := s.answer(via, req)
	rep.Reason = s.forPeer(rep.Reason, req.From)
	for i := range rep.Ends {
		rep.Ends[i].Reason = s.forPeer(rep.Ends[i].Reason, req.From)
	}
	return rep
}

// anAgent is what natsbus makes agents' ids look like.
var anAgent = regexp.MustCompile(`\b([A-Z2-7]{32}|U[A-Z2-7]{55}-[A-Z2-7]{7})\b`)

// forPeer takes other agents' ids out of a text that is told to a peer.
func (s *server) forPeer(text, peer string) string {
	if text == "" {
		return "" // nearly all answers have no text
	}
	return anAgent.ReplaceAllStringFunc(text, func(id string) string {
		if id == peer || id == string(s.id) {
			return id
		}
		return "of another engine"
	})
}

func (s *server) answer(via core.Via, req *wire.Request) *wire.Reply {
	from, account := core.AgentID(req.From), core.Account(req.Account)
	if from == "" { // to the machine an empty id is no peer, as in a load that looks for its P
		return refuse("request without the id of its sender")
	}
	switch req.Kind {
	case wire.KindHello:
		return s.hello(via, from, account, req.Hello)
	case wire.KindLoad:
		return s.load(from, account, req.Load)
	case wire.KindRenew:
		return s.renew(from, account, req.Renew)
	case wire.KindFinish:
		if s.peers.get(from) == nil {
			return sayHello() // nothing of it is under way here
		}
		s.machine.finished(from, account, req.Finishes)
		return &wire.Reply{}
	case wire.KindJoin:
		return s.join(from, account, req.Join)
	case wire.KindSignal:
		_, t := s.caches()
		if t == nil || s.peers.get(from) == nil {
			return sayHello()
		}
		return s.signals.serve(t, from, req.Signal)
	}
	return refuse("request of unknown kind %d", req.Kind)
}

func sayHello() *wire.Reply {
	return &wire.Reply{Code: int(core.Failed), Again: wire.AgainAfterHello, Reason: "say hello first"}
}

// hello checks once for each peer that its blocks can be copied from ours.
func (s *server) hello(via core.Via, from core.AgentID, account core.Account, h *wire.Agent) *wire.Reply {
	if fault.On("node-from-believed") {
		from = core.AgentID(h.ID)
	}
	h.ID = string(from)
	self, t := s.caches()
	if self == nil || !s.cfg.prefills() {
		return refuse("agent %s has no KV caches to offer", s.id)
	}
	match, err := s.peers.fit(self, h, true)
	if errors.Is(err, errBusy) {
		return s.later(err)
	}
	if err != nil {
		s.queues.hellos.Do(func(note string) {
			s.log.Warn("decode agent refused"+note, zap.String("peer", h.ID), zap.String("engine_id", h.EngineID), zap.Error(err))
		})
		return refuse("prefill engine %q refuses decode engine %q: %v", self.EngineID, h.EngineID, err)
	}
	tickets, err := s.peers.admit(&peer{id: from, account: account, via: via, out: match}, t, func() ([]wire.Ticket, error) { return t.admit(from, h) })
	switch {
	case errors.Is(err, core.ErrTransportClosed): // the agent that comes in its place may take the request
		return &wire.Reply{Code: int(core.Closed), Reason: "the prefill agent is closing"}
	case errors.Is(err, errBusy):
		return s.later(err)
	case err != nil: // nothing in common
		return refuse("agent %s: %v", s.id, err)
	}
	return &wire.Reply{Tickets: tickets, AgeMS: 1 + s.age().Milliseconds()}
}

// later refuses what may be asked for again, within the client's connect_timeout_s.
func (s *server) later(why error) *wire.Reply {
	return &wire.Reply{Code: int(core.Failed), Again: wire.AgainLater, Reason: fmt.Sprintf("prefill engine %q: %v", s.cfg.EngineID, why)}
}

func (s *server) load(from core.AgentID, account core.Account, l *wire.Load) *wire.Reply {
	_, t := s.caches()
	p := s.peers.get(from)
	if p == nil || p.out == nil || t == nil {
		return sayHello()
	}
	if t.named(l.Transport) == nil {
		return refuse("a load came for transport %q, but prefill agent %s of engine %q has %s", l.Transport, s.id, s.cfg.EngineID, t.have(nil))
	}
	if len(l.Regions) == 0 {
		l.Regions = nil // all
	}
	msg := core.LoadMessage{ID: core.TransferID(l.TransferID), Peer: from, Account: account, Grant: addTransportName(l.Transport, l.Grant), Selection: kv.Selection{Tokens: l.Tokens, Regions: l.Regions}, Prompt: l.Prompt, Lease: time.Duration(l.LeaseMS) * time.Millisecond, Match: p.out.match}
	for _, g := range l.Groups {
		msg.First = append(msg.First, g.First)
		msg.Blocks = append(msg.Blocks, g.IDs)
	}
	answer, ok := s.machine.tell(msg).(core.AnswerLoad)
	if !ok { // the registration has failed since
		return sayHello()
	}
	if answer.Code == core.OK && !p.works.Load() {
		for _, ans := range s.renewed(core.RenewMessage{From: from, Loads: []core.TransferID{msg.ID}}) {
			if ans.Status != core.StatusUnknown && ans.Status != core.StatusEarly { // the engine has named it; it may have ended already
				s.peers.noteWorks(p)
			}
		}
	}
	return &wire.Reply{Code: int(answer.Code), Reason: answer.Reason}
}

// renewed returns the answers to a renewal.
func (s *server) renewed(r core.RenewMessage) []core.Answer {
	answer, _ := s.machine.tell(r).(core.AnswerRenew)
	return answer.Answers
}

func (s *server) renew(from core.AgentID, account core.Account, r *wire.Renew) *wire.Reply {
	rep := &wire.Reply{Statuses: make([]uint8, 0, len(r.Loads)+len(r.Claims))}
	// Only a peer that has said hello has transfers here. Other peers learn that this agent
	// lives.
	if p := s.peers.get(from); p != nil && p.out != nil {
		s.renewed(core.RenewMessage{From: from}) // it lives
		for part := range slices.Chunk(r.Loads, core.MaxLocked) {
			addAnswers(rep, s.peers.notes(p, s.renewed(core.RenewMessage{From: from, Loads: transferIDs(part)})))
		}
		for part := range slices.Chunk(r.Claims, core.MaxLocked) {
			addAnswers(rep, s.peers.notes(p, s.renewed(core.RenewMessage{From: from, Account: account, Claims: transferIDs(part)})))
		}
	}
	for len(rep.Statuses) < len(r.Loads)+len(r.Claims) {
		rep.Statuses = append(rep.Statuses, uint8(core.StatusUnknown))
	}
	return rep
}

// addAnswers appends the machine's answers to a renewal.
func addAnswers(rep *wire.Reply, answers []core.Answer) {
	for _, ans := range answers {
		if ans.Status == core.StatusEnded || ans.Status == core.StatusRestart {
			rep.Ends = append(rep.Ends, wire.End{Index: uint32(len(rep.Statuses)), Code: int(ans.Code), Reason: shorten(ans.Reason)})
		}
		rep.Statuses = append(rep.Statuses, uint8(ans.Status))
	}
}

// join registers another rank at this agent's server, for a while.
func (s *server) join(from core.AgentID, account core.Account, j *wire.Join) *wire.Reply {
	switch {
	case s.joined == nil:
		return refuse("agent %s of engine %q has no server that others could join", s.id, s.cfg.EngineID)
	case j.Agent.ID != string(from) && !fault.On("node-joins-others"):
		return refuse("agent %s asks to register agent %s: an agent registers only itself", from, j.Agent.ID)
	}
	ctx, cancel := context.WithTimeout(s.lifetime, time.Duration(s.cfg.ConnectTimeout))
	defer cancel()
	if j.Leave {
		s.joined.leave(ctx, j.Agent)
		return &wire.Reply{}
	}
	since, err := s.joined.join(ctx, account, j)
	if err != nil {
		s.queues.joins.Do(func(note string) {
			s.log.Warn("rank not registered"+note, zap.String("agent", j.Agent.ID), zap.String("engine_id", j.Agent.EngineID), zap.Error(err))
		})
		if s.cfg.EngineID == "" {
			return refuse("agent %s, which has the bootstrap port: %v", s.id, err)
		}
		return refuse("agent %s of engine %q: %v", s.id, s.cfg.EngineID, err)
	}
	return &wire.Reply{Since: since}
}

func transferIDs(list []string) []core.TransferID {
	out := make([]core.TransferID, len(list))
	for i, id := range list {
		out[i] = core.TransferID(id)
	}
	return out
}
