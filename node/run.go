package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// run performs the machine's actions in their order, and keeps its time while
// it waits for something.
func (a *Agent) run() {
	var stopTicker func()
	defer func() {
		if stopTicker != nil {
			stopTicker()
		}
	}()
	for {
		select {
		case <-a.ctx.Done():
			return
		case <-a.wake:
		}
		a.mu.Lock()
		list := a.queue
		a.queue, a.performing = nil, true
		busy := a.machine != nil && a.machine.Busy()
		a.mu.Unlock()
		for _, act := range list {
			a.perform(act)
		}
		a.mu.Lock()
		a.performing = false
		a.mu.Unlock()
		switch {
		case busy && stopTicker == nil:
			stopTicker = a.clock.NewTicker(core.TickInterval, func(time.Time) {
				a.step(func(m *core.Machine, now time.Time) { m.Tick(now) })
				a.signal()
			})
		case !busy && stopTicker != nil:
			stopTicker()
			stopTicker = nil
		}
	}
}

// perform does one action. What waits for the network goes to a lane of its
// peer, so that a slow one does not hold up the others.
func (a *Agent) perform(act core.Action) {
	switch v := act.(type) {
	case core.Resolve:
		a.peers.resolve(a, v)
	case core.Expect:
		grant, err := a.expect(v)
		a.step(func(m *core.Machine, now time.Time) { m.Expecting(now, v.ID, grant, err) })
	case core.SendLoad:
		a.lanes.do(v.Peer, func() { a.sendLoad(v) })
	case core.SendRenew:
		// Not behind loads that wait for an answer: this is how D learns that none
		// will come. The machine has one under way for each peer.
		a.goRun("renew", func() { a.sendRenew(v) })
	case core.SendProbe:
		a.goRun("probe", func() { a.sendProbe(v) })
	case core.SendFinish:
		a.outbox.add(v)
	case core.Forget:
		if v.Gone {
			a.peers.lose(v.Peer)
		} else {
			a.peers.suspect(v.Peer)
		}
	case core.Revoke:
		a.revokes.add(v.ID) // it may wait for the peer's word
	case core.Write:
		a.write(v)
	case core.StopWrite:
		a.transport.Stop(v.ID)
	default:
		a.log.Error("unknown action", zap.String("type", fmt.Sprintf("%T", act)))
	}
}

func (a *Agent) expect(v core.Expect) (grant []byte, err error) {
	p := a.peers.get(v.Peer)
	if p == nil || p.in == nil {
		return nil, fmt.Errorf("prefill agent %s is not known any more", v.Peer)
	}
	segments, err := p.in.Segments(v.Regions, v.Blocks, v.First, v.Tokens)
	if err != nil {
		return nil, fmt.Errorf("the load from prefill agent %s cannot be planned: %w", v.Peer, err)
	}
	return a.transport.Expect(v.ID, v.Peer, segments)
}

// request asks a peer that was resolved or has said hello.
func (a *Agent) request(to core.AgentID, bound time.Duration, req *wire.Request) (*wire.Reply, error) {
	ctx, cancel := context.WithTimeout(a.ctx, bound)
	defer cancel()
	return a.ask(ctx, to, req)
}

func (a *Agent) ask(ctx context.Context, to core.AgentID, req *wire.Request) (*wire.Reply, error) {
	p := a.peers.get(to)
	if p == nil {
		return nil, fmt.Errorf("agent %s is not known any more", to)
	}
	req.From = string(a.id)
	rep, err := a.bus.Request(ctx, p.via, to, req)
	if p.joined && errors.Is(err, core.ErrAbsent) && !errors.Is(err, core.ErrAway) {
		err = fmt.Errorf("%w: %w", core.ErrAway, err) // its link to that server may be on its way back, or the server itself
	}
	return rep, err
}

func (a *Agent) sendLoad(v core.SendLoad) {
	groups := make([]wire.Blocks, len(v.Blocks))
	for g := range groups {
		groups[g] = wire.Blocks{First: v.First[g], IDs: v.Blocks[g]}
	}
	if a.peers.lost(v.Peer) {
		// It was found gone while this stood in the lane: no need to find out again.
		a.step(func(m *core.Machine, now time.Time) {
			m.LoadReplied(now, v.ID, v.Seq, true, core.PeerLost, fmt.Sprintf("prefill agent %s is gone", v.Peer))
		})
		return
	}
	began := time.Now()
	if a.peers.deaf(v.Peer, began) {
		a.step(func(m *core.Machine, now time.Time) {
			m.LoadReplied(now, v.ID, v.Seq, false, core.PeerLost, fmt.Sprintf("prefill agent %s does not answer other loads", v.Peer))
		})
		return
	}
	transport, grant := unmark(v.Grant)
	rep, err := a.insist(v.Peer, &wire.Request{Kind: wire.KindLoad, Load: &wire.Load{
		TransferID: string(v.ID), Transport: transport, Grant: grant, Groups: groups, Tokens: v.Tokens, Regions: v.Regions, Prompt: v.Prompt, LeaseMS: v.Lease.Milliseconds(),
	}})
	code, reason, absent := core.OK, "", false
	switch {
	case errors.Is(err, core.ErrTooLarge):
		code, reason = core.Refused, fmt.Sprintf("the load cannot be sent to prefill agent %s: %v", v.Peer, err)
	case err != nil:
		if absent = gone(err); !absent {
			a.peers.suspect(v.Peer) // its connections may stand, though its host is gone
		}
		code, reason = core.PeerLost, fmt.Sprintf("prefill agent %s does not answer: %v", v.Peer, err)
		a.peers.silent(v.Peer, began, time.Duration(a.cfg.PeerTimeout)/3)
	case rep.Code != 0:
		code, reason = core.Code(rep.Code), rep.Reason
		absent = code == core.Closed // another may take its place
	}
	if err == nil {
		a.peers.answered(v.Peer)
	}
	a.step(func(m *core.Machine, now time.Time) { m.LoadReplied(now, v.ID, v.Seq, absent, code, reason) })
}

// maxRenew bounds the transfers that one renewal names, so that it fits into
// any server's messages.
const maxRenew = 1024

func (a *Agent) sendRenew(v core.SendRenew) {
	answers := make([]core.Answer, 0, len(v.Loads)+len(v.Claims))
	var err error
	for _, claims := range []bool{false, true} {
		ids := v.Loads
		if claims {
			ids = v.Claims
		}
		for part := range slices.Chunk(ids, maxRenew) {
			if err == nil {
				var list []core.Answer
				list, err = a.renew(v.Peer, part, claims)
				answers = append(answers, list...)
			}
		}
	}
	absent := gone(err)
	a.step(func(m *core.Machine, now time.Time) { m.RenewReplied(now, v, answers, absent, err) })
}

// renew asks for a part of the claims, or of the loads.
func (a *Agent) renew(peer core.AgentID, part []core.TransferID, claims bool) ([]core.Answer, error) {
	ids := make([]string, len(part))
	for i, id := range part {
		ids[i] = string(id)
	}
	req := &wire.Renew{Loads: ids}
	if claims {
		req = &wire.Renew{Claims: ids}
	}
	rep, err := a.request(peer, time.Duration(a.cfg.PeerTimeout)/3, &wire.Request{Kind: wire.KindRenew, Renew: req})
	if err == nil && rep.Code != 0 {
		err = errors.New(rep.Reason)
	}
	if err == nil && len(rep.Statuses) != len(ids) {
		err = fmt.Errorf("prefill agent %s answers for %d transfers, it was asked for %d", peer, len(rep.Statuses), len(ids))
	}
	if err != nil {
		return nil, err
	}
	answers := make([]core.Answer, len(ids))
	for i, s := range rep.Statuses {
		answers[i].Status = core.Status(s)
	}
	for _, e := range rep.Ends {
		answers[e.Index].Code, answers[e.Index].Reason = core.Code(e.Code), e.Reason
	}
	return answers, nil
}

// sendProbe asks a decode agent whether it lives.
func (a *Agent) sendProbe(v core.SendProbe) {
	// Not for long: what is sent while D's link breaks is lost, and it is asked again.
	rep, err := a.request(v.Peer, time.Duration(a.cfg.PeerTimeout)/10, &wire.Request{Kind: wire.KindRenew, Renew: &wire.Renew{}})
	if err == nil && rep.Code != 0 {
		err = errors.New(rep.Reason)
	}
	// Its links broke too, so that it is away at best: the machine gives it time.
	absent, away := errors.Is(err, core.ErrAbsent), errors.Is(err, core.ErrAway)
	a.step(func(m *core.Machine, now time.Time) { m.ProbeReplied(now, v.Peer, absent, away, err) })
}

// gone says whether an error proves that the agent is not there any more.
// Otherwise a connection may have broken, or a message got lost.
func gone(err error) bool { return errors.Is(err, core.ErrAbsent) && !errors.Is(err, core.ErrAway) }

// insist asks until there is an answer, for a little less than PeerTimeout:
// messages get lost, and links come back. What it asks may arrive twice.
func (a *Agent) insist(to core.AgentID, req *wire.Request) (rep *wire.Reply, err error) {
	bound := time.Duration(a.cfg.PeerTimeout)
	p := a.peers.get(to)
	here := p != nil && p.via == "" // its link leads here, and may be on its way back
	end := time.Now().Add(bound - 2*core.TickInterval)
	for {
		asked, most := time.Now(), min(bound/3, time.Until(end))
		rep, err = a.request(to, most, req)
		if late := time.Since(asked) - most; late > core.TickInterval*10 {
			end = end.Add(late) // this process did not run
		}
		if err == nil || gone(err) && !here || errors.Is(err, core.ErrTooLarge) || a.ctx.Err() != nil || time.Until(end) < core.TickInterval {
			return rep, err
		}
		a.count(func(t *Totals) { t.Retries++ })
		select {
		case <-a.ctx.Done():
		case <-time.After(core.TickInterval / 2): // a link that is down says so at once
		}
	}
}
