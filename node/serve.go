package node

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// serve answers a peer's request. It is called from the bus's goroutines.
func (a *Agent) serve(via core.Via, req *wire.Request) *wire.Reply {
	from := core.AgentID(req.From)
	if from == "" { // nobody, to the machine: a load that looks for its P has no peer either
		return refuse("request without the id of its sender")
	}
	switch req.Kind {
	case wire.KindHello:
		return a.serveHello(via, from, req.Hello)
	case wire.KindLoad:
		return a.serveLoad(from, req.Load)
	case wire.KindRenew:
		return a.serveRenew(from, req.Renew)
	case wire.KindFinish:
		a.step(func(m *core.Machine, now time.Time) {
			for _, f := range req.Finishes {
				m.FinishArrived(now, from, core.TransferID(f.TransferID), core.Code(f.Code), f.Reason)
			}
		})
		return &wire.Reply{}
	case wire.KindJoin:
		return a.serveJoin(from, req.Join)
	case wire.KindSignal:
		return a.serveSignal(from, req.Signal)
	}
	return refuse("request of unknown kind %d", req.Kind)
}

func refuse(format string, args ...any) *wire.Reply {
	return &wire.Reply{Code: int(core.Refused), Reason: fmt.Sprintf(format, args...)}
}

// serveHello checks once per peer that its blocks can be copied from ours.
func (a *Agent) serveHello(via core.Via, from core.AgentID, h *wire.Agent) *wire.Reply {
	if h.ID != string(from) {
		return refuse("hello of agent %s sent by %s", h.ID, from)
	}
	a.mu.Lock()
	self, transport := a.self, a.transport
	a.mu.Unlock()
	if self == nil || !a.cfg.prefills() {
		return refuse("agent %s has no KV caches to offer", a.id)
	}
	match, err := compatible(self, h)
	if err != nil {
		a.log.Warn("decode agent refused", zap.String("peer", h.ID), zap.String("engine_id", h.EngineID), zap.Error(err))
		return refuse("prefill engine %q refuses decode engine %q: %v", self.EngineID, h.EngineID, err)
	}
	tickets, err := a.peers.admit(&peer{id: from, via: via, out: match}, h, transport)
	if err != nil { // nothing in common, or closed meanwhile
		return refuse("agent %s: %v", a.id, err)
	}
	rep := withTickets(tickets)
	rep.AgeMS = 1 + a.clock.Now().Sub(a.opened).Milliseconds()
	return rep
}

func (a *Agent) serveLoad(from core.AgentID, l *wire.Load) *wire.Reply {
	a.mu.Lock()
	transport := a.transport // nil again after a registration that failed
	a.mu.Unlock()
	p := a.peers.get(from)
	if p == nil || p.out == nil || transport == nil {
		return &wire.Reply{Code: int(core.SayHello), Reason: "say hello first"}
	}
	if transport.named(l.Transport) == nil {
		return refuse("transport %q: prefill agent %s of engine %q has %s", l.Transport, a.id, a.cfg.EngineID, transport.have(nil))
	}
	rep := &wire.Reply{}
	if len(l.Regions) == 0 {
		l.Regions = nil // all
	}
	msg := core.LoadMessage{ID: core.TransferID(l.TransferID), Peer: from, Grant: mark(l.Transport, l.Grant), Tokens: l.Tokens, Regions: l.Regions,
		Prompt: l.Prompt, Lease: time.Duration(l.LeaseMS) * time.Millisecond, Match: p.out}
	for _, g := range l.Groups {
		msg.First = append(msg.First, g.First)
		msg.Blocks = append(msg.Blocks, g.IDs)
	}
	a.step(func(m *core.Machine, now time.Time) {
		code, reason := m.LoadArrived(now, msg)
		rep.Code, rep.Reason = int(code), reason
	})
	return rep
}

func (a *Agent) serveRenew(from core.AgentID, r *wire.Renew) *wire.Reply {
	rep := &wire.Reply{Statuses: make([]uint8, 0, len(r.Loads)+len(r.Claims))}
	claims := r.Claims
	if a.peers.get(from) == nil {
		claims = nil // its load will say hello first
	}
	a.step(func(m *core.Machine, now time.Time) {
		for i, ans := range m.RenewArrived(now, from, transferIDs(r.Loads), transferIDs(claims)) {
			rep.Statuses = append(rep.Statuses, uint8(ans.Status))
			if ans.Status == core.StatusEnded {
				rep.Ends = append(rep.Ends, wire.End{Index: uint32(i), Code: int(ans.Code), Reason: shorten(ans.Reason)})
			}
		}
	})
	for len(rep.Statuses) < len(r.Loads)+len(r.Claims) {
		rep.Statuses = append(rep.Statuses, uint8(core.StatusUnknown))
	}
	return rep
}

func transferIDs(list []string) []core.TransferID {
	out := make([]core.TransferID, len(list))
	for i, id := range list {
		out[i] = core.TransferID(id)
	}
	return out
}

// compatible matches the caches of two agents, or says why they cannot exchange
// blocks, with both values.
func compatible(p, d *wire.Agent) (*core.Match, error) {
	switch {
	case p.Version != d.Version:
		return nil, fmt.Errorf("wire version %d at the prefill engine, %d at the decode engine: run the same kvconn on both", p.Version, d.Version)
	case p.Model != "" && d.Model != "" && p.Model != d.Model:
		return nil, fmt.Errorf("model %q at the prefill engine, %q at the decode engine", p.Model, d.Model)
	case p.DType != "" && d.DType != "" && p.DType != d.DType:
		return nil, fmt.Errorf("dtype %q at the prefill engine, %q at the decode engine", p.DType, d.DType)
	}
	if err := errors.Join(ranksOf(p).Check(rankOf(p)), ranksOf(d).Check(rankOf(d))); err != nil {
		return nil, err
	}
	m, err := core.NewMatch(shapes(p), shapes(d))
	if err == nil && ranksOf(p) == core.One && ranksOf(d) == core.One {
		err = m.Whole() // else D looks whether all of its ranks together have what it needs
	}
	if p.BlockTokens != 0 && d.BlockTokens != 0 && p.BlockTokens != d.BlockTokens {
		unequal := fmt.Sprintf("blocks of %d tokens at the prefill engine, of %d at the decode engine", p.BlockTokens, d.BlockTokens)
		switch {
		case err != nil: // first what an operator has set, then what follows from it
			err = fmt.Errorf("%s: %w", unequal, err)
		case m.Opaque():
			err = fmt.Errorf("%s: register the caches with their tokens and heads, then unequal blocks fit", unequal)
		}
	}
	if err != nil {
		return nil, err
	}
	return m, nil
}

func describeShapes(d *wire.Agent, shapes []core.Shape) {
	known := false
	for _, s := range shapes {
		d.Shapes = append(d.Shapes, wire.Shape{Name: s.Name, BlockStride: s.BlockStride, BlockBytes: s.BlockBytes, NumBlocks: s.NumBlocks, Group: s.Group})
		d.Geometry = append(d.Geometry, wire.Geometry{Tokens: s.Tokens, Heads: s.Heads, FirstHead: s.FirstHead, TotalHeads: s.TotalHeads, TokenStride: s.TokenStride, HeadStride: s.HeadStride})
		known = known || s.Tokens != 0
	}
	if !known {
		d.Geometry = nil
	}
}

// shapes is the reverse; wire.Decode has seen to it that there is a geometry for
// each, or none.
func shapes(a *wire.Agent) []core.Shape {
	out := make([]core.Shape, len(a.Shapes))
	for i, s := range a.Shapes {
		out[i] = core.Shape{Name: s.Name, BlockStride: s.BlockStride, BlockBytes: s.BlockBytes, NumBlocks: s.NumBlocks, Group: s.Group}
		if i < len(a.Geometry) {
			g, o := a.Geometry[i], &out[i]
			o.Tokens, o.Heads, o.FirstHead, o.TotalHeads, o.TokenStride, o.HeadStride = g.Tokens, g.Heads, g.FirstHead, g.TotalHeads, g.TokenStride, g.HeadStride
		}
	}
	return out
}
