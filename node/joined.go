package node

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/bootstrap"
	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/quota"
	"github.com/kvconn/kvconn/internal/ratelog"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/wire"
)

// joinedRanks are the ranks that have joined this agent's bootstrap port. They are in the
// registry and in GET /query for as long as they renew their registration.
type joinedRanks struct {
	cfg     *Config
	log     *zap.Logger
	listing *rankListing
	host    host

	mu      sync.Mutex // held while a rank comes or goes, so that registry and table agree
	ranks   map[rankPlace]*joinedRank
	shares  *quota.Ranking[core.Account, rankPlace] // the bytes of ranks
	closed  bool
	joinLog ratelog.Limit // of lines: where all may join, an unknown agent may come and go
	dropLog ratelog.Limit
}

// host is the registry of this agent's server; natsbus.Bus.
type host interface {
	Host(ctx context.Context, a *wire.Agent, fresh bool, since int64) (int64, error)
	Unhost(ctx context.Context, a *wire.Agent) error
	Listens(ctx context.Context, id core.AgentID) bool
	TTL() time.Duration
}

// rankPlace is a place in GET /query: one agent has it.
type rankPlace struct{ dp, tp, pp int }

type joinedRank struct {
	agent *wire.Agent
	owner core.Account
	bytes int // of its entry in the registry
	entry bootstrap.Registration
	until time.Time // end of its lease
	end   *time.Timer
}

// Bounds of the entries that joined ranks have in the registry. The registry has room for 64 MiB. Beside the joined ranks' entries, this
// agent's own entry and the entry's renewal must find room in it. An engine with a thousand regions has an entry of some 60 KiB.
const (
	maxJoinedBytes    = 2 << 20
	maxAllJoinedBytes = 32 << 20
)

func newJoinedRanks(c *Config, log *zap.Logger, b *rankListing, h host) *joinedRanks {
	return &joinedRanks{cfg: c, log: log, listing: b, host: h, ranks: map[rankPlace]*joinedRank{}, shares: quota.NewRanking[core.Account](rankPlace.compare)}
}

// compare has the highest place first.
func (a rankPlace) compare(b rankPlace) int {
	return cmp.Or(cmp.Compare(b.dp, a.dp), cmp.Compare(b.tp, a.tp), cmp.Compare(b.pp, a.pp))
}

func (g *joinedRanks) join(ctx context.Context, owner core.Account, j *wire.Join) (int64, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return 0, core.ErrClosed
	}
	if err := g.admit(j.Agent); err != nil {
		return 0, err
	}
	at := placeOf(j.Agent)
	old := g.ranks[at]
	known := old != nil && old.agent.ID == j.Agent.ID
	if old != nil && !known && g.lives(ctx, old) {
		return 0, fmt.Errorf("the place of %s is taken: agent %s has it and still answers; stop that agent first, or give this rank a place of its own", rankText(j.Agent), old.agent.ID)
	}
	var route bootstrap.Rank
	if !known {
		var err error
		if route, err = g.listing.routeOf(j.Agent); err != nil {
			return 0, err
		}
	}
	if known {
		owner = old.owner
	}
	bytes, gone, err := g.room(owner, j.Agent, at)
	if err != nil {
		return 0, err
	}
	since, err := g.host.Host(ctx, j.Agent, j.New, j.Since)
	if err != nil {
		return 0, err
	}
	ttl := g.host.TTL()
	if known {
		g.shares.Add(owner, at, int64(bytes-old.bytes))
		old.bytes = bytes
		old.until = time.Now().Add(ttl)
		old.end.Reset(ttl)
		g.giveWay(ctx, gone)
		return since, nil
	}
	if old != nil { // the registry has let another agent take the rank over
		g.drop(at, old)
	}
	e := g.listing.entryOf(j.Agent)
	var instead []bootstrap.Registration
	for _, victim := range gone {
		instead = append(instead, g.ranks[victim].entry)
	}
	more, err := g.listing.table.Join(e, string(owner), instead)
	if err != nil { // a POST /register has the rank, or the table is full
		_ = g.host.Unhost(ctx, j.Agent)
		return 0, err
	}
	for _, r := range more {
		gone = append(gone, rankPlace{r.DPRank, r.TPRank, r.PPRank})
	}
	n := &joinedRank{agent: j.Agent, owner: owner, bytes: bytes, entry: e, until: time.Now().Add(ttl)}
	n.end = time.AfterFunc(ttl, func() { g.expire(at, n) })
	g.ranks[at] = n
	g.shares.Add(owner, at, int64(bytes))
	g.listing.table.Routes().Join(route)
	g.giveWay(ctx, gone)
	g.joinLog.Do(func(note string) {
		g.log.Info("rank joined"+note, zap.String("agent", j.Agent.ID), zap.String("engine_id", e.EngineID), zap.Ints("rank", []int{at.dp, at.tp, at.pp}))
	})
	return since, nil
}

// room is how many bytes a rank's entry takes, and which ranks are to give way if it comes in. These are ranks of another account that has more
// than the rank's would have. Whoever had the rank's place before takes no room. g.mu is held.
func (g *joinedRanks) room(owner core.Account, a *wire.Agent, at rankPlace) (bytes int, gone []rankPlace, err error) {
	entry, err := a.MarshalMsg(nil)
	if err != nil {
		return 0, nil, err
	}
	if len(entry) > maxJoinedBytes {
		return 0, nil, fmt.Errorf("the description of %s with its %d regions takes %d bytes, at most %d are taken of a rank that joins: register fewer regions, with more heads in each", rankText(a), len(a.Shapes), len(entry), maxJoinedBytes)
	}
	var asked []rankPlace // they do not count while others are asked
	without := func(place rankPlace) {
		if n := g.ranks[place]; n != nil {
			g.shares.Remove(n.owner, place)
			asked = append(asked, place)
		}
	}
	defer func() {
		for _, place := range asked {
			n := g.ranks[place]
			g.shares.Add(n.owner, place, int64(n.bytes))
		}
	}()
	without(at)
	sum := len(entry)
	for other, n := range g.ranks {
		if other != at {
			sum += n.bytes
		}
	}
	for sum > maxAllJoinedBytes && !fault.On("node-joined-unbounded") {
		victim, ok := g.shares.Gives(owner, at, int64(len(entry)))
		n := g.ranks[victim]
		if !ok || n.owner == owner || fault.On("node-joined-first-come") {
			return 0, nil, fmt.Errorf("the %d ranks that have joined leave no room for the %d bytes of %s: their descriptions may take %d bytes in all", len(g.ranks), len(entry), rankText(a), maxAllJoinedBytes)
		}
		gone = append(gone, victim)
		sum -= n.bytes
		without(victim)
	}
	return len(entry), gone, nil
}

// giveWay drops ranks for another that has come in. Their agents are told so when they renew. An entry that cannot be withdrawn ends with its
// lease, within TTL. g.mu is held.
func (g *joinedRanks) giveWay(ctx context.Context, gone []rankPlace) {
	for _, victim := range gone {
		n := g.ranks[victim]
		g.dropLog.Do(func(note string) {
			g.log.Warn("rank dropped: its host or key has the most ranks or the largest, and another rank needs room"+note, zap.String("agent", n.agent.ID), zap.String("engine_id", n.entry.EngineID), zap.Int("bytes", n.bytes))
		})
		g.drop(victim, n)
		if err := g.host.Unhost(ctx, n.agent); err != nil {
			g.log.Debug("registration not withdrawn", zap.String("agent", n.agent.ID), zap.Error(err))
		}
	}
}

// livesWithin bounds the question whether a rank is still connected.
const livesWithin = 500 * time.Millisecond

// lives: the agent of a rank is connected, or was a moment ago. An agent that was killed
// makes room at once. An agent whose host is gone makes room when its connection or its
// lease ends.
func (g *joinedRanks) lives(ctx context.Context, n *joinedRank) bool {
	ctx, cancel := context.WithTimeout(ctx, livesWithin)
	defer cancel()
	return g.host.Listens(ctx, core.AgentID(n.agent.ID))
}

// admit says why an agent cannot be a rank here; g.mu is held.
func (g *joinedRanks) admit(a *wire.Agent) error {
	size, dps := ranksOf(a), dpSizeOf(a)
	if a.Version != wire.Version {
		return fmt.Errorf("wire version %d here, %d at %s: run the same kvconn on both", wire.Version, a.Version, rankText(a))
	}
	if g.cfg.Role != RoleBootstrap {
		if err := g.beside(a); err != nil {
			return err
		}
	}
	if dps > maxDPSize || a.DPRank < 0 || a.DPRank >= dps {
		return fmt.Errorf("%s has dp_size %d: want a dp_size of 1 to %d, and a dp_rank below dp_size", rankText(a), dps, maxDPSize)
	}
	if err := size.Check(rankOf(a)); err != nil {
		return fmt.Errorf("%s: %w", rankText(a), err)
	}
	for at, other := range g.ranks {
		switch b := other.agent; {
		case (at.dp == a.DPRank) != (b.EngineID == a.EngineID):
			return fmt.Errorf("%s does not go with %s, which has joined: each dp rank has an engine_id of its own, and all ranks of a dp rank have the same", rankText(a), rankText(b))
		case g.cfg.Role == RoleBootstrap && dpSizeOf(b) != dps: // an agent with a rank knows its dp_size
			return fmt.Errorf("%s has dp_size %d, %s has %d", rankText(a), dps, rankText(b), dpSizeOf(b))
		case at.dp == a.DPRank && ranksOf(b) != size:
			return fmt.Errorf("%s has tp_size and pp_size for %v, %s for %v", rankText(a), size, rankText(b), ranksOf(b))
		}
	}
	return nil
}

// beside says why an agent cannot be a rank of the same prefill engine as this agent. It is called if this agent is such a rank itself.
func (g *joinedRanks) beside(a *wire.Agent) error {
	c := g.cfg
	switch {
	case c.DPSize*c.TPSize*c.PPSize == 1:
		return fmt.Errorf("this agent's engine has one rank only (its dp_size, tp_size and pp_size are 1), so %s cannot join it: set the engine's sizes on all ranks", rankText(a))
	case a.DPRank < 0 || a.DPRank >= c.DPSize:
		return fmt.Errorf("%s has a dp_rank outside of this engine, whose dp_size is %d", rankText(a), c.DPSize)
	case (a.DPRank == c.DPRank) != (a.EngineID == c.EngineID):
		return fmt.Errorf("%s does not go with dp rank %d, which is engine %q: each dp rank has an engine_id of its own, and all ranks of a dp rank have the same", rankText(a), c.DPRank, c.EngineID)
	case a.EngineID != c.EngineID:
		return nil
	case ranksOf(a) != c.ranks():
		return fmt.Errorf("%s has tp_size and pp_size for %v, this rank of the same engine has them for %v", rankText(a), ranksOf(a), c.ranks())
	case rankOf(a) == c.rank():
		return fmt.Errorf("%s has the place of this agent: give each rank a tp_rank and pp_rank of its own", rankText(a))
	}
	for key, v := range map[string][2]string{"model": {a.Model, c.Model}, "model_fingerprint": {a.Fingerprint, c.Fingerprint}, "dtype": {a.DType, c.DType}} {
		if v[0] != "" && v[1] != "" && v[0] != v[1] {
			return fmt.Errorf("%s has %s %q, this rank of the same engine has %q", rankText(a), key, v[0], v[1])
		}
	}
	return nil
}

func (g *joinedRanks) leave(ctx context.Context, a *wire.Agent) {
	g.mu.Lock()
	defer g.mu.Unlock()
	at := placeOf(a)
	if n := g.ranks[at]; n != nil && n.agent.ID == a.ID {
		g.drop(at, n)
	}
	if err := g.host.Unhost(ctx, a); err != nil {
		g.log.Debug("registration not withdrawn", zap.String("agent", a.ID), zap.Error(err))
	}
}

// expire ends the entry of a rank that has not renewed its registration in time.
func (g *joinedRanks) expire(at rankPlace, n *joinedRank) {
	defer safe.Recover("node.joined.expire")
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ranks[at] == n && !time.Now().Before(n.until) { // not renewed while expire waited for the lock
		g.log.Warn("rank is gone", zap.String("agent", n.agent.ID), zap.String("engine_id", n.entry.EngineID), zap.Ints("rank", []int{at.dp, at.tp, at.pp}))
		g.drop(at, n)
	}
}

// drop takes a rank out of GET /query and GET /route; g.mu is held.
func (g *joinedRanks) drop(at rankPlace, n *joinedRank) {
	n.end.Stop()
	g.listing.table.Unregister(n.entry)
	g.listing.table.Routes().Leave(bootstrap.Place{DP: at.dp, TP: at.tp, PP: at.pp})
	delete(g.ranks, at)
	g.shares.Remove(n.owner, at)
}

func (g *joinedRanks) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	for at, n := range g.ranks {
		g.drop(at, n)
	}
}

func placeOf(a *wire.Agent) rankPlace { return rankPlace{a.DPRank, a.TPRank, a.PPRank} }
