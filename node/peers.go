package node

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// maxPeers bounds what is remembered of peers; the one that was not used for
// longest is forgotten first, and says hello again if it comes back.
const maxPeers = 4096

// peer is what one agent remembers of another.
type peer struct {
	id     core.AgentID
	via    core.Via
	in     *core.Match   // of its caches with ours, for loads from it; nil: we have not looked it up
	out    *core.Match   // of ours with its, for loads of ours; nil: it has not said hello
	opened time.Time     // it was not open before this; zero: unknown
	gone   bool          // nobody listens there, or nobody answers; guarded by the table
	heard  time.Time     // when it answered a load last
	mute   time.Time     // until then its loads are not tried: it has left others without an answer
	place  *list.Element // in the table's order
}

// peerTable holds the peers by id, and which of them a target was found to be.
type peerTable struct {
	mu       sync.Mutex
	byID     map[core.AgentID]*peer
	order    *list.List // of *peer, the one used last at the end
	byTarget map[core.Target]core.AgentID
	looking  map[core.Target][]core.Resolve // a look-up is under way for these

	// meeting is held while a peer is added and who makes room for it is
	// dismissed, so that a peer of the table is one that the transport admits.
	meeting sync.Mutex
}

func newPeerTable() *peerTable {
	return &peerTable{byID: map[core.AgentID]*peer{}, order: list.New(), byTarget: map[core.Target]core.AgentID{}, looking: map[core.Target][]core.Resolve{}}
}

func (t *peerTable) get(id core.AgentID) *peer {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.byID[id]
	if p != nil {
		t.order.MoveToBack(p.place)
	}
	return p
}

// add remembers a peer, and dismisses the one that makes room for it; t.meeting
// is held.
func (t *peerTable) add(p *peer, transport *transports) {
	var oldest core.AgentID
	t.mu.Lock()
	if old := t.byID[p.id]; old != nil {
		if p.in == nil { // an agent's caches do not change
			p.in = old.in
		}
		if p.out == nil {
			p.out = old.out
		}
		t.order.Remove(old.place)
	} else if t.order.Len() >= maxPeers {
		first := t.order.Front().Value.(*peer)
		oldest = first.id
		t.drop(first)
	}
	p.place = t.order.PushBack(p)
	t.byID[p.id] = p // met anew: not gone, whatever was
	t.mu.Unlock()
	if oldest != "" {
		transport.Dismiss(oldest) // it may call the sink
	}
}

// admit lets a peer that has said hello connect, and remembers it.
func (t *peerTable) admit(p *peer, h *wire.Agent, transport *transports) (tickets []wire.Ticket, err error) {
	t.meeting.Lock()
	defer t.meeting.Unlock()
	if tickets, err = transport.admit(p.id, h); err == nil {
		t.add(p, transport)
	}
	return tickets, err
}

// connect remembers a peer that has answered a hello, and then makes the ways to
// it usable: their signals are taken from those only who are remembered.
func (t *peerTable) connect(p *peer, transport *transports, connect func() error) error {
	t.meeting.Lock()
	defer t.meeting.Unlock()
	t.add(p, transport)
	return connect()
}

// drop removes a peer; t.mu is held.
func (t *peerTable) drop(p *peer) {
	delete(t.byID, p.id)
	t.order.Remove(p.place)
	t.unmap(p.id)
}

// lose marks a peer that was found gone, and makes the next load look the target
// up again. It stays known: transfers that are under way with it, if it lives
// after all, must still be renewed and ended.
func (t *peerTable) lose(id core.AgentID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.byID[id]; p != nil {
		p.gone = true
	}
	t.unmap(id)
}

func (t *peerTable) lost(id core.AgentID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.byID[id]
	return p == nil || p.gone
}

// answered notes that a peer lives.
func (t *peerTable) answered(id core.AgentID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.byID[id]; p != nil {
		p.heard, p.mute = time.Now(), time.Time{}
	}
}

// silent notes that a peer has left a load without an answer that began then: the
// loads that stand behind it shall not find out one after the other.
func (t *peerTable) silent(id core.AgentID, began time.Time, pause time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.byID[id]; p != nil && p.heard.Before(began) {
		p.mute = time.Now().Add(pause)
	}
}

func (t *peerTable) deaf(id core.AgentID, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.byID[id]
	return p != nil && now.Before(p.mute)
}

// suspect makes the next load look the target up again: its agent may have been
// replaced.
func (t *peerTable) suspect(id core.AgentID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.unmap(id)
}

// unmap drops the targets that were found to be a peer; t.mu is held.
func (t *peerTable) unmap(id core.AgentID) {
	for target, p := range t.byTarget {
		if p == id {
			delete(t.byTarget, target)
		}
	}
}

// resolve answers from memory or starts one look-up per target.
func (t *peerTable) resolve(a *Agent, r core.Resolve) {
	t.mu.Lock()
	id, known := t.byTarget[r.From]
	if known && !r.Fresh {
		opened := t.byID[id].opened
		t.mu.Unlock()
		a.step(func(m *core.Machine, now time.Time) { m.Resolved(now, r.ID, r.Seq, id, opened, core.OK, "") })
		return
	}
	first := t.looking[r.From] == nil
	t.looking[r.From] = append(t.looking[r.From], r)
	t.mu.Unlock()
	if !first {
		return
	}
	a.goRun("lookup", func() {
		p, err := a.find(r.From)
		code, reason := core.OK, ""
		if err != nil {
			p = &peer{}
			code, reason = lookupCode(err), err.Error()
			a.log.Warn("prefill agent not found", zap.String("bootstrap", r.From.Bootstrap), zap.String("engine_id", r.From.EngineID), zap.Error(err))
		}
		t.mu.Lock()
		if err == nil {
			if len(t.byTarget) >= 4*maxPeers { // many spellings; what is in use is found again
				clear(t.byTarget)
			}
			t.byTarget[r.From] = p.id
		}
		waiting := t.looking[r.From]
		delete(t.looking, r.From)
		t.mu.Unlock()
		for _, w := range waiting {
			a.step(func(m *core.Machine, now time.Time) { m.Resolved(now, w.ID, w.Seq, p.id, p.opened, code, reason) })
		}
	})
}

func lookupCode(err error) core.Code {
	var r *refusedError
	if errors.As(err, &r) {
		return core.Refused
	}
	return core.Unreachable
}

// refusedError: the peer was found and refused us, or we it.
type refusedError struct{ reason string }

func (e *refusedError) Error() string { return e.reason }

// unansweredError: a hello got no answer, and another may get one.
type unansweredError struct{ error }

func (e *unansweredError) Unwrap() error { return e.error }

// helloShare is the part of the bound of a look-up that one hello may take: the
// server that carried it may have died.
const helloShare = 3

// find looks a prefill agent up, checks that it fits, says hello and opens the
// way to it. Within the bound an entry of an agent that is gone is waited out,
// since the restarted one is about to take its place, and so is one that is on
// its way from a server of a cluster to another.
func (a *Agent) find(target core.Target) (*peer, error) {
	ctx, cancel := context.WithTimeout(a.ctx, time.Duration(a.cfg.ConnectTimeout))
	defer cancel()
	for {
		p, err := a.meet(ctx, target)
		var unanswered *unansweredError
		if !errors.As(err, &unanswered) {
			return p, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (a *Agent) meet(ctx context.Context, target core.Target) (*peer, error) {
	info, via, err := a.bus.Lookup(ctx, target)
	if err != nil {
		return nil, err
	}
	match, err := compatible(info, a.self)
	if err != nil {
		return nil, &refusedError{fmt.Sprintf("decode engine %q refuses prefill engine %q: %v", a.cfg.EngineID, info.EngineID, err)}
	}
	id := core.AgentID(info.ID)
	attempt, cancel := context.WithTimeout(ctx, time.Duration(a.cfg.ConnectTimeout)/helloShare)
	asked := a.clock.Now()
	rep, err := a.bus.Request(attempt, via, id, &wire.Request{Kind: wire.KindHello, From: string(a.id), Hello: a.self})
	late := attempt.Err() != nil
	cancel()
	if err != nil {
		err = fmt.Errorf("hello to prefill agent %s of engine %q: %w", id, info.EngineID, err)
		if late || errors.Is(err, core.ErrAbsent) || via == "" && errors.Is(err, core.ErrUnreachable) {
			err = &unansweredError{err}
		}
		return nil, err
	}
	if rep.Code != 0 {
		return nil, &refusedError{rep.Reason}
	}
	roads, absent, err := a.transport.roads(ctx, info, target.Bootstrap)
	if err != nil {
		return nil, err
	}
	p := &peer{id: id, via: via, in: match, opened: openedAt(asked, rep.AgeMS)}
	if err := a.peers.connect(p, a.transport, func() error { return a.transport.connect(id, info.EngineID, roads, absent, rep) }); err != nil {
		return nil, err
	}
	a.log.Info("prefill agent found", zap.String("agent", info.ID), zap.String("engine_id", info.EngineID), zap.Stringers("roads", roads))
	return p, a.transport.settle(ctx, id)
}

// openedAt is an instant, on this process's clock, before which an agent was not
// open: it said how old it was after it was asked.
func openedAt(asked time.Time, ageMS int64) time.Time {
	const most = int64(100 * 365 * 24 * time.Hour / time.Millisecond)
	if ageMS <= 0 || ageMS > most {
		return time.Time{}
	}
	return asked.Add(-time.Duration(ageMS) * time.Millisecond)
}

// fullEndpoint is a transport's address as it is dialled; without a host it is at
// the host where the registry was found, which is known to be reachable.
func fullEndpoint(info *wire.Agent, e wire.Endpoint, bootstrap string) (string, error) {
	host, port, err := net.SplitHostPort(e.Address)
	if err != nil {
		return "", fmt.Errorf("prefill agent %s has a malformed %s endpoint %q: %w", info.ID, e.Transport, e.Address, err)
	}
	if host == "" {
		u, err := url.Parse(bootstrap)
		if err != nil || u.Hostname() == "" {
			return "", fmt.Errorf("prefill agent %s names no host for %s and there is no bootstrap address: set advertise_host on the prefill engine", info.ID, e.Transport)
		}
		host = u.Hostname()
	}
	return net.JoinHostPort(host, port), nil
}
