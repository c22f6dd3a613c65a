package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/wire"
)

// lookup is what is looked up: an engine, or a rank of it.
type lookup struct {
	target core.Target
	part   bool
}

// resolve answers from memory or starts one look-up per target.
func (t *peerTable) resolve(a *Agent, r core.Resolve) {
	key := lookup{r.From, r.Part}
	t.mu.Lock()
	found := t.known[key]
	if found != nil && !r.Fresh {
		t.mu.Unlock()
		a.resolved(r, found)
		return
	}
	first := t.looking[key] == nil
	t.looking[key] = append(t.looking[key], r)
	t.mu.Unlock()
	if !first {
		return
	}
	a.goRun("lookup", func() {
		find := a.findEngine
		if r.Part {
			find = a.findRank
		}
		found, err := find(r.From)
		if err != nil {
			a.log.Warn("prefill agent not found", zap.String("bootstrap", r.From.Bootstrap), zap.String("engine_id", r.From.EngineID), zap.Error(err))
		}
		t.mu.Lock()
		if err == nil {
			t.remember(key, found)
		}
		waiting := t.looking[key]
		delete(t.looking, key)
		t.mu.Unlock()
		for _, w := range waiting {
			if err == nil {
				a.resolved(w, found)
				continue
			}
			a.step(func(m *core.Machine, now time.Time) {
				m.Resolved(now, w.ID, w.Seq, "", time.Time{}, lookupCode(err), err.Error())
			})
		}
	})
}

// remember keeps what was found, unless it is out of date already; t.mu is held.
func (t *peerTable) remember(key lookup, found []core.FoundPart) {
	if len(t.known) >= 4*maxPeers { // many spellings; what is in use is found again
		clear(t.known)
	}
	if !slices.ContainsFunc(found, func(f core.FoundPart) bool { return t.byID[f.Peer] == nil }) {
		t.known[key] = found
	}
}

// resolved tells the machine what was found: an agent, or several to load from.
func (a *Agent) resolved(r core.Resolve, found []core.FoundPart) {
	a.step(func(m *core.Machine, now time.Time) {
		if f := &found[0]; r.Part || len(found) == 1 && f.Share.Of == 1 {
			m.Resolved(now, r.ID, r.Seq, f.Peer, f.Opened, core.OK, "")
			return
		}
		m.ResolvedParts(now, r.ID, r.Seq, found)
	})
}

func lookupCode(err error) core.Code {
	var refused *refusedError
	var resized *resizedError
	switch {
	case errors.As(err, &resized):
		return core.PeerLost
	case errors.As(err, &refused):
		return core.Refused
	}
	return core.Unreachable
}

// resizedError: the engine was restarted with other ranks, or other caches in them.
type resizedError struct{ reason string }

func (e *resizedError) Error() string { return e.reason }

// refusedError: the peer was found and refused us, or we it.
type refusedError struct{ reason string }

func (e *refusedError) Error() string { return e.reason }

// unansweredError: a hello got no answer, and another may get one.
type unansweredError struct{ error }

func (e *unansweredError) Unwrap() error { return e.error }

// helloShare is the part of the bound of a look-up that one hello may take: the
// server that carried it may have died.
const helloShare = 3

// unansweredPause is between two tries to meet an agent.
const unansweredPause = 100 * time.Millisecond

// findRank finds a rank of an engine that was found before, or that the engine above
// has named.
func (a *Agent) findRank(target core.Target) ([]core.FoundPart, error) {
	ctx, cancel := context.WithTimeout(a.ctx, time.Duration(a.cfg.ConnectTimeout))
	defer cancel()
	p, info, err := a.find(ctx, target, nil)
	if err != nil {
		return nil, err
	}
	a.peers.mu.Lock()
	held := a.peers.held[target]
	a.peers.mu.Unlock()
	if held != nil && !slices.EqualFunc(held, shapes(info), sameRegion) {
		return nil, &resizedError{fmt.Sprintf("%s was restarted with other KV caches than the load was for", rankText(info))}
	}
	return []core.FoundPart{{From: target, Peer: p.id, Opened: p.opened}}, nil
}

// sameRegion: how many blocks there are is no matter.
func sameRegion(x, y core.Shape) bool {
	x.NumBlocks, x.BlockStride = y.NumBlocks, y.BlockStride
	return x == y
}

// findEngine finds the ranks of a prefill engine that this agent loads from, meets
// them all, and deals its regions out to them. The first one's entry says how many
// there are; the others may still be on their way.
func (a *Agent) findEngine(target core.Target) ([]core.FoundPart, error) {
	ctx, cancel := context.WithTimeout(a.ctx, time.Duration(a.cfg.ConnectTimeout))
	defer cancel()
	target.TPRank, target.PPRank, target.Engine = 0, 0, core.Ranks{}
	for {
		found, err := a.meetEngine(ctx, target)
		var resized *resizedError
		if !errors.As(err, &resized) { // else it is being restarted at this moment
			return found, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(unansweredPause):
		}
	}
}

func (a *Agent) meetEngine(ctx context.Context, target core.Target) ([]core.FoundPart, error) {
	first, via, err := a.bus.Lookup(ctx, target)
	if err != nil {
		return nil, err
	}
	refuse := func(err error) error {
		return &refusedError{fmt.Sprintf("decode engine %q refuses prefill engine %q: %v", a.cfg.EngineID, first.EngineID, err)}
	}
	target.EngineID, target.DPRank, target.Engine = first.EngineID, first.DPRank, ranksOf(first)
	meetings, err := core.Meetings(target.Engine, a.cfg.ranks(), a.cfg.rank())
	if err != nil {
		return nil, refuse(err)
	}
	found, sources := make([]core.FoundPart, len(meetings)), make([]core.Source, len(meetings))
	errs := make([]error, len(meetings))
	var wg sync.WaitGroup
	for i, m := range meetings {
		to := target
		to.TPRank, to.PPRank = m.Rank.TP, m.Rank.PP
		var met *entry
		if m.Rank == (core.Rank{}) {
			met = &entry{first, via}
		}
		wg.Add(1)
		safe.Go("meet", func() {
			defer wg.Done()
			p, info, err := a.find(ctx, to, met)
			if errs[i] = err; err != nil {
				return
			}
			found[i] = core.FoundPart{From: to, Share: m.Share, Peer: p.id, Opened: p.opened}
			sources[i] = core.Source{Name: m.Rank.String(), Shapes: shapes(info)}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	regions, err := core.Cover(a.layout.Shapes(), sources)
	if err != nil {
		return nil, refuse(err)
	}
	t := a.peers
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.held) >= 4*maxPeers {
		clear(t.held)
	}
	for i := range found {
		found[i].Regions = regions[i]
		t.held[found[i].From] = sources[i].Shapes
		t.remember(lookup{found[i].From, true}, found[i:i+1])
	}
	return found, nil
}

// entry is what the registry holds of an agent, and the way to it.
type entry struct {
	agent *wire.Agent
	via   core.Via
}

// find looks a prefill agent up, unless it was just found, checks that it fits, says
// hello and opens the way to it. Within the bound an entry of an agent that is gone
// is waited out, since the restarted one is about to take its place, and so is one
// that is on its way from a server of a cluster to another, or a rank that has not
// joined its engine's first one yet.
func (a *Agent) find(ctx context.Context, target core.Target, met *entry) (*peer, *wire.Agent, error) {
	for {
		p, info, err := a.meet(ctx, target, met)
		var unanswered *unansweredError
		if !errors.As(err, &unanswered) && !(target.Engine != core.Ranks{} && errors.Is(err, core.ErrNotRegistered)) {
			return p, info, err
		}
		met = nil
		select {
		case <-ctx.Done():
			return nil, nil, err
		case <-time.After(unansweredPause):
		}
	}
}

func (a *Agent) meet(ctx context.Context, target core.Target, met *entry) (*peer, *wire.Agent, error) {
	if met == nil {
		info, via, err := a.bus.Lookup(ctx, target)
		if err != nil {
			return nil, nil, err
		}
		met = &entry{info, via}
	}
	info, via := met.agent, met.via
	if n := ranksOf(info); target.Engine != (core.Ranks{}) && n != target.Engine {
		return nil, nil, &resizedError{fmt.Sprintf("%s is now of an engine of %v, which was restarted; the load was for one of %v", rankText(info), n, target.Engine)}
	}
	match, err := compatible(info, a.self)
	if err != nil {
		return nil, nil, &refusedError{fmt.Sprintf("decode engine %q refuses prefill engine %q: %v", a.cfg.EngineID, info.EngineID, err)}
	}
	id := core.AgentID(info.ID)
	attempt, cancel := context.WithTimeout(ctx, time.Duration(a.cfg.ConnectTimeout)/helloShare)
	asked := a.clock.Now()
	rep, err := a.bus.Request(attempt, via, id, &wire.Request{Kind: wire.KindHello, From: string(a.id), Hello: a.self})
	late := attempt.Err() != nil
	cancel()
	if err != nil {
		err = fmt.Errorf("hello to prefill agent %s of %s: %w", id, rankText(info), err)
		if late || errors.Is(err, core.ErrAbsent) || via == "" && errors.Is(err, core.ErrUnreachable) {
			err = &unansweredError{err}
		}
		return nil, nil, err
	}
	if rep.Code != 0 {
		return nil, nil, &refusedError{rep.Reason}
	}
	roads, absent, err := a.transport.roads(ctx, info, target.Bootstrap)
	if err != nil {
		return nil, nil, err
	}
	p := &peer{id: id, via: via, rank: rankText(info), joined: info.Joined, in: match, opened: openedAt(asked, rep.AgeMS)}
	if err := a.peers.connect(p, a.transport, func() error { return a.transport.connect(id, info.EngineID, roads, absent, rep) }); err != nil {
		return nil, nil, err
	}
	a.log.Info("prefill agent found", zap.String("agent", info.ID), zap.String("engine_id", info.EngineID), zap.Ints("rank", []int{info.DPRank, info.TPRank, info.PPRank}), zap.Stringers("roads", roads))
	return p, info, a.transport.settle(ctx, id)
}
