package node

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/internal/sleep"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/wire"
)

// finder finds prefill engines and connects to their agents, for an agent whose caches
// are registered.
type finder struct {
	cfg        *Config
	log        *zap.Logger
	ctx        context.Context // ends with the agent
	clock      core.Clock
	bus        directory
	peers      *peerTable
	layout     *kv.Layout
	self       *wire.Agent
	transports connector
	machine    *lockedMachine
	start      func(name string, f func()) // runs f on a goroutine
}

// directory is the part of core.Bus that a finder needs.
type directory interface {
	requester
	Lookup(ctx context.Context, t core.Target) (*wire.Agent, core.Via, error)
}

// connector is the part of the transports that a finder needs.
type connector interface {
	dismisser
	common(ctx context.Context, info *wire.Agent, bootstrap string) (list []commonTransport, absent map[string]error, err error)
	connect(peer core.AgentID, engine string, common []commonTransport, absent map[string]error, rep *wire.Reply) error
	settle(ctx context.Context, peer core.AgentID) error
}

// resolve answers from memory or starts one look-up for each target.
func (f *finder) resolve(r core.Resolve) {
	key := lookup{r.From, r.Part}
	known, first := f.peers.find(key, r)
	if known != nil {
		f.resolved(r, known)
	}
	if !first {
		return
	}
	f.start("lookup", func() {
		find := f.findEngine
		if r.Part {
			find = f.findRank
		}
		var found []core.FoundPart
		_, err := safe.Try("lookup", func() (err error) { // also a look-up that panics ends the loads that wait for it
			found, err = find(r.From)
			return err
		})
		if err != nil {
			f.log.Warn("prefill agent not found", zap.String("bootstrap", r.From.Bootstrap), zap.String("engine_id", r.From.EngineID), zap.Error(err))
			found = nil
		}
		for _, w := range f.peers.found(key, found) {
			if err == nil {
				f.resolved(w, found)
				continue
			}
			f.machine.tell(core.Resolved{ID: w.ID, Seq: w.Seq, Code: lookupCode(err), Reason: err.Error()})
		}
	})
}

// resolved tells the machine the result: one agent, or several to load from.
func (f *finder) resolved(r core.Resolve, found []core.FoundPart) {
	if p := &found[0]; r.Part || len(found) == 1 && p.Share.Of == 1 {
		f.machine.tell(core.Resolved{ID: r.ID, Seq: r.Seq, Peer: p.Peer, Opened: p.Opened})
		return
	}
	f.machine.tell(core.ResolvedParts{ID: r.ID, Seq: r.Seq, Found: found})
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

// resizedError says that the engine was restarted with other ranks, or with other caches in its ranks.
type resizedError struct{ reason string }

func (e *resizedError) Error() string { return e.reason }

// unansweredError says that a hello got no answer, and that another hello may get one.
type unansweredError struct{ error }

func (e *unansweredError) Unwrap() error { return e.error }

// unansweredPause is the time between two tries to connect to an agent.
const unansweredPause = 100 * time.Millisecond

// findRank finds one rank of a prefill engine.
func (f *finder) findRank(target core.Target) ([]core.FoundPart, error) {
	ctx, cancel := context.WithTimeout(f.ctx, time.Duration(f.cfg.ConnectTimeout))
	defer cancel()
	p, info, err := f.find(ctx, target, nil)
	if err != nil {
		return nil, err
	}
	if sum, held := f.peers.dealtTo(target); held && sum != sumOf(info.Shapes, true) {
		return nil, &resizedError{fmt.Sprintf("%s was restarted, and its KV caches differ from those that the load was planned for", rankText(info))}
	}
	return []core.FoundPart{{From: target, Peer: p.id, Opened: p.opened}}, nil
}

// findEngine finds the ranks of a prefill engine that this agent loads from, connects to
// them all, and deals its regions out to them. The first rank's entry says how many
// there are. The other ranks may not have joined yet.
func (f *finder) findEngine(target core.Target) ([]core.FoundPart, error) {
	ctx, cancel := context.WithTimeout(f.ctx, time.Duration(f.cfg.ConnectTimeout))
	defer cancel()
	target.TPRank, target.PPRank, target.Engine = 0, 0, kv.Ranks{}
	for {
		found, err := f.connectEngine(ctx, target)
		var resized *resizedError
		if !errors.As(err, &resized) { // a resized engine is being restarted at this moment
			return found, err
		}
		if sleep.For(ctx, unansweredPause) != nil {
			return nil, err
		}
	}
}

func (f *finder) connectEngine(ctx context.Context, target core.Target) ([]core.FoundPart, error) {
	first, via, err := f.bus.Lookup(ctx, target)
	if err != nil {
		return nil, err
	}
	refuse := func(err error) error {
		return &refusedError{fmt.Sprintf("decode engine %q refuses prefill engine %q: %v", f.cfg.EngineID, first.EngineID, err)}
	}
	target.EngineID, target.DPRank, target.Engine = first.EngineID, first.DPRank, ranksOf(first)
	meetings, err := kv.Meetings(target.Engine, f.cfg.ranks(), f.cfg.rank())
	if err != nil {
		return nil, refuse(err)
	}
	found, sources := make([]core.FoundPart, len(meetings)), make([]kv.Source, len(meetings))
	sums, errs := make([][sha256.Size]byte, len(meetings)), make([]error, len(meetings))
	var wg sync.WaitGroup
	for i, m := range meetings {
		to := target
		to.TPRank, to.PPRank = m.Rank.TP, m.Rank.PP
		var met *entry
		if m.Rank == (kv.Rank{}) {
			met = &entry{first, via}
		}
		wg.Add(1)
		safe.Go("connect", func() {
			defer wg.Done()
			_, errs[i] = safe.Try("connect", func() error {
				p, info, err := f.find(ctx, to, met)
				if err != nil {
					return err
				}
				found[i] = core.FoundPart{From: to, Share: m.Share, Peer: p.id, Opened: p.opened}
				sources[i] = kv.Source{Name: m.Rank.String(), Shapes: shapes(info)}
				sums[i] = sumOf(info.Shapes, true)
				return nil
			})
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	regions, err := kv.Cover(f.layout.Shapes(), sources)
	if err != nil {
		return nil, refuse(err)
	}
	for i := range found {
		found[i].Regions = regions[i]
	}
	f.peers.dealt(found, sums)
	return found, nil
}

// entry is an agent's entry in the registry, and how the agent is reached.
type entry struct {
	agent *wire.Agent
	via   core.Via
}

// find looks a prefill agent up, checks that it fits, says hello and connects the
// transports. If met is the agent's entry, it looks nothing up. In three cases find tries again until
// ctx ends: the agent is gone and its successor is about to take its place; the agent is on its way
// from one server of a cluster to another; the rank has not joined yet.
func (f *finder) find(ctx context.Context, target core.Target, met *entry) (*peer, *wire.Agent, error) {
	for {
		p, info, err := f.connect(ctx, target, met)
		var unanswered *unansweredError
		if !errors.As(err, &unanswered) && !(target.Engine != kv.Ranks{} && errors.Is(err, core.ErrNotRegistered)) {
			return p, info, err
		}
		met = nil
		if sleep.For(ctx, unansweredPause) != nil {
			return nil, nil, err
		}
	}
}

func (f *finder) connect(ctx context.Context, target core.Target, met *entry) (*peer, *wire.Agent, error) {
	if met == nil {
		info, via, err := f.bus.Lookup(ctx, target)
		if err != nil {
			return nil, nil, err
		}
		met = &entry{info, via}
	}
	info, via := met.agent, met.via
	if n := ranksOf(info); target.Engine != (kv.Ranks{}) && n != target.Engine {
		return nil, nil, &resizedError{fmt.Sprintf("%s was restarted in an engine of %v, but the load was planned for an engine of %v", rankText(info), n, target.Engine)}
	}
	match, err := f.peers.fit(f.self, info, false)
	if errors.Is(err, errBusy) {
		return nil, nil, &unansweredError{err}
	}
	if err != nil {
		return nil, nil, &refusedError{fmt.Sprintf("decode engine %q refuses prefill engine %q: %v", f.cfg.EngineID, info.EngineID, err)}
	}
	id := core.AgentID(info.ID)
	attempt, cancel := context.WithTimeout(ctx, f.cfg.helloBound())
	asked := f.clock.Now()
	rep, err := f.bus.Request(attempt, via, id, &wire.Request{Kind: wire.KindHello, Hello: f.hello()})
	late := attempt.Err() != nil
	cancel()
	if err != nil {
		err = fmt.Errorf("hello to prefill agent %s of %s: %w", id, rankText(info), err)
		if late || errors.Is(err, core.ErrAbsent) || via == "" && errors.Is(err, core.ErrUnreachable) {
			err = &unansweredError{err}
		}
		return nil, nil, err
	}
	switch code := core.Code(rep.Code); {
	case code == core.OK:
	case rep.Again == wire.AgainLater:
		return nil, nil, &unansweredError{fmt.Errorf("hello to prefill agent %s of %s: %s", id, rankText(info), rep.Reason)}
	case code == core.Closed:
		return nil, nil, &unansweredError{fmt.Errorf("hello to prefill agent %s of %s: %w: %s", id, rankText(info), core.ErrAbsent, rep.Reason)}
	default:
		return nil, nil, &refusedError{rep.Reason}
	}
	common, absent, err := f.transports.common(ctx, info, target.Bootstrap)
	if err != nil {
		return nil, nil, err
	}
	p := &peer{id: id, via: via, rank: rankText(info), joined: info.Joined, in: match, opened: openedAt(asked, rep.AgeMS)}
	if err := f.peers.connect(p, f.transports, func() error { return f.transports.connect(id, info.EngineID, common, absent, rep) }); err != nil {
		return nil, nil, err
	}
	f.log.Info("prefill agent found", zap.String("agent", info.ID), zap.String("engine_id", info.EngineID), zap.Ints("rank", []int{info.DPRank, info.TPRank, info.PPRank}), zap.Stringers("transports", common))
	return p, info, f.transports.settle(ctx, id)
}

// hello is what this agent says of itself. It leaves out the id: the connection tells that, and
// this agent has another id for each engine.
func (f *finder) hello() *wire.Agent {
	h := *f.self
	h.ID = ""
	return &h
}

// openedAt is an instant on this process's clock: before it an agent was certainly not open. The
// agent was asked for its age at asked, and told the age after that.
func openedAt(asked time.Time, ageMS int64) time.Time {
	const most = int64(100 * 365 * 24 * time.Hour / time.Millisecond)
	if ageMS <= 0 || ageMS > most {
		return time.Time{}
	}
	return asked.Add(-time.Duration(ageMS) * time.Millisecond)
}
