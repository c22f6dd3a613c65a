package node

import (
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
	self, layout, transport := a.self, a.layout, a.transport
	a.mu.Unlock()
	if self == nil || !a.cfg.prefills() {
		return refuse("agent %s has no KV caches to offer", a.id)
	}
	if err := compatible(self, layout, h); err != nil {
		a.log.Warn("decode agent refused", zap.String("peer", h.ID), zap.String("engine_id", h.EngineID), zap.Error(err))
		return refuse("prefill engine %q refuses decode engine %q: %v", self.EngineID, h.EngineID, err)
	}
	tickets, err := a.peers.admit(&peer{id: from, via: via, shapes: shapes(h)}, h, transport)
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
	if a.peers.get(from) == nil || transport == nil {
		return &wire.Reply{Code: int(core.SayHello), Reason: "say hello first"}
	}
	if transport.named(l.Transport) == nil {
		return refuse("transport %q: prefill agent %s of engine %q has %s", l.Transport, a.id, a.cfg.EngineID, transport.have(nil))
	}
	rep := &wire.Reply{}
	if len(l.Regions) == 0 {
		l.Regions = nil // all
	}
	msg := core.LoadMessage{ID: core.TransferID(l.TransferID), Peer: from, Grant: mark(l.Transport, l.Grant), Regions: l.Regions, Lease: time.Duration(l.LeaseMS) * time.Millisecond}
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

// compatible says why two agents cannot exchange blocks, with both values.
func compatible(self *wire.Agent, layout *core.Layout, peer *wire.Agent) error {
	switch {
	case self.Version != peer.Version:
		return fmt.Errorf("wire version %d here, %d at the peer: run the same kvconn on both", self.Version, peer.Version)
	case self.Model != "" && peer.Model != "" && self.Model != peer.Model:
		return fmt.Errorf("model %q here, %q at the peer", self.Model, peer.Model)
	case self.DType != "" && peer.DType != "" && self.DType != peer.DType:
		return fmt.Errorf("dtype %q here, %q at the peer", self.DType, peer.DType)
	case self.BlockTokens != 0 && peer.BlockTokens != 0 && self.BlockTokens != peer.BlockTokens:
		return fmt.Errorf("blocks of %d tokens here, of %d at the peer", self.BlockTokens, peer.BlockTokens)
	}
	return layout.CheckPeer(shapes(peer))
}

func shapes(a *wire.Agent) []core.Shape {
	out := make([]core.Shape, len(a.Shapes))
	for i, s := range a.Shapes {
		out[i] = core.Shape(s)
	}
	return out
}
