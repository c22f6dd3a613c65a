package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/devices"
	"github.com/kvconn/kvconn/internal/ratelog"
	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/wire"
)

// transports are an agent's transports, the preferred one first, used together like
// one core.Transport. D picks a transport for each transfer. A grant begins with the
// transport's name, by which P's Write picks the same.
//
// Its lock is taken within that of the machine, and never held while a transport is
// called.
type transports struct {
	id      core.AgentID
	cfg     *Config
	log     *zap.Logger
	allow   *allowList // addresses that this agent may dial
	machine core.Sink  // takes the outcomes
	suspect func(core.AgentID)

	firstWait time.Duration
	further   time.Duration // see Close

	list          []core.Transport
	lacks         []wire.Lack      // transports that are not available here
	devices       *devices.Devices // on which some of the memory lies; nil: none
	held          ownMemory
	closing       atomic.Bool               // no transfer begins any more
	changed       atomic.Bool               // some device memory is not what was registered any more; see renew
	taking        sync.Locker               // the agent's lock: held while the agent takes new memory in place of what was registered
	memoryChanged map[core.TransferID]error // writes that were stopped because their memory has changed; guarded by mu

	mu           sync.Mutex
	pairs        map[core.AgentID]*pair // as many as the peer table has, at most
	active       map[half]transportOf   // transfers that have got a transport, until their reports
	failedWrites map[half]transportOf   // offers whose writes ended with an error, until their reports, maxFailedWrites at most
	moved        map[string]*TransportStats
	logLimit     ratelog.Limit
}

// half names one side of a transfer: an agent may be both.
type half struct {
	id   core.TransferID
	side core.Side
}

type transportOf struct {
	peer core.AgentID
	via  core.Transport
}

// newTransports makes the transports of an agent. sink takes the outcomes. suspect is
// called for each peer to which no transport is left.
func newTransports(id core.AgentID, c *Config, log *zap.Logger, allow *allowList, sink core.Sink, suspect func(core.AgentID)) *transports {
	return &transports{id: id, cfg: c, log: log, allow: allow, machine: sink, suspect: suspect, firstWait: firstWait, further: further, taking: new(sync.Mutex),
		pairs: map[core.AgentID]*pair{}, active: map[half]transportOf{}, failedWrites: map[half]transportOf{}, memoryChanged: map[core.TransferID]error{}, moved: map[string]*TransportStats{}}
}

// add adds a transport, and lack notes why this agent lacks one. Both are called before t is in use.
func (t *transports) add(w core.Transport) {
	t.list = append(t.list, w)
	t.moved[w.Name()] = &TransportStats{Available: true}
}

func (t *transports) lack(name string, err error) {
	reason := shorten(err.Error())
	t.lacks = append(t.lacks, wire.Lack{Transport: name, Reason: reason})
	t.moved[name] = &TransportStats{Reason: reason}
}

// named returns nil for a transport that this agent lacks.
func (t *transports) named(name string) core.Transport {
	for _, w := range t.list {
		if w.Name() == name {
			return w
		}
	}
	return nil
}

func (t *transports) names() (list []string) {
	for _, w := range t.list {
		list = append(list, w.Name())
	}
	return list
}

// String names them as in errors and statistics: "rdma,tcp".
func (t *transports) String() string { return strings.Join(t.names(), ",") }

func (t *transports) endpoints() (list []wire.Endpoint) {
	for _, w := range t.list {
		e := wire.Endpoint{Transport: w.Name(), Address: w.Endpoint()}
		if _, ok := w.(encrypting); ok {
			e.Encrypt = t.cfg.encryptWord()
		}
		list = append(list, e)
	}
	return list
}

// have lists an agent's transports, and why it lacks others. If h is nil, the agent is this
// one.
func (t *transports) have(h *wire.Agent) string {
	if h == nil {
		h = &wire.Agent{Endpoints: t.endpoints(), Lacks: t.lacks}
	}
	var names []string
	for _, e := range h.Endpoints {
		names = append(names, fmt.Sprintf("%.16q", e.Transport))
	}
	if len(names) == 0 {
		names = []string{"none"}
	}
	text := strings.Join(names, ", ")
	for _, l := range h.Lacks {
		text += fmt.Sprintf(" (no %.16s: %s)", l.Transport, shorten(l.Reason))
	}
	return text
}

// Dismiss forgets a peer. Sinks may be called before it returns.
func (t *transports) Dismiss(peer core.AgentID) {
	t.mu.Lock()
	delete(t.pairs, peer)
	t.mu.Unlock()
	for _, w := range t.list {
		w.Dismiss(peer)
	}
}

// firstWait is how long a pair that has just met waits at most for a better transport, if
// another one can be used already.
const firstWait = 2 * time.Second

// further is how long Close waits beyond close_timeout_s: for transports that wait for a peer or for the kernel, and for goroutines.
// It is longer than rdma's own wait, so that Close does not give rdma up during that wait.
const further = rdma.ToldBound + 2*time.Second

// errPending is the reason to pass a transport over that is not set up yet, since the transfer does not wait for that.
var errPending = core.Setup.Mark(errors.New("its setup with that peer has not ended"))

var expired = func() context.Context {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errPending)
	return ctx
}()

// usable says why a transport cannot take new transfers of a peer now.
func (t *transports) usable(w core.Transport, peer core.AgentID) error {
	t.mu.Lock()
	p, why := t.pairs[peer], errNotConnected
	if p != nil && !p.connected[w.Name()] {
		why = p.lacks(w.Name())
	}
	ok := p != nil && p.connected[w.Name()]
	t.mu.Unlock()
	if !ok {
		return why
	}
	return usableNow(w, peer)
}

func usableNow(w core.Transport, peer core.AgentID) error {
	s, ok := w.(core.Settler)
	if !ok {
		return nil
	}
	err := s.Usable(expired, peer)
	if errors.Is(err, context.Canceled) {
		err = errPending
	}
	return err
}

// connectionLost notes that the connection to a peer by one transport broke. all says that no other transport is
// left: then the peer may have been replaced.
func (t *transports) connectionLost(peer core.AgentID, name string) (all bool) {
	t.mu.Lock()
	p := t.pairs[peer]
	if p == nil {
		t.mu.Unlock()
		return true
	}
	p.down[name] = true
	var others []core.Transport
	for _, w := range t.list {
		_, asked := w.(core.Settler)
		if w.Name() != name && p.connected[w.Name()] && (asked || !p.down[w.Name()]) {
			others = append(others, w)
		}
	}
	t.mu.Unlock()
	return !slices.ContainsFunc(others, func(w core.Transport) bool {
		err := usableNow(w, peer)
		return err == nil || errors.Is(err, errPending) // if a pending setup fails, the transport tells that by itself
	})
}

// pair returns a peer's record, and makes it if there is none; t.mu is held.
func (t *transports) pair(peer core.AgentID) *pair {
	p := t.pairs[peer]
	if p == nil {
		p = &pair{now: map[core.Side]string{}, transfers: map[string]uint64{}, fallbacks: map[string]uint64{}, down: map[string]bool{}}
		t.pairs[peer] = p
	}
	return p
}

// noTransport names both sides, since the cause may be on either.
func (t *transports) noTransport(peer core.AgentID, passed []passedOver) error {
	t.mu.Lock()
	engine := ""
	if p := t.pairs[peer]; p != nil {
		engine = p.engine
	}
	t.mu.Unlock()
	return fmt.Errorf("bytes cannot go from prefill agent %s of engine %q to decode agent %s of engine %q: %s (transport is %q here)",
		peer, engine, t.id, t.cfg.EngineID, joined(passed), t.cfg.Transport)
}

// chosen notes the transport of a pair's transfer, and logs a change. If counted is
// true it counts the transports that the transfer has passed over.
func (t *transports) chosen(peer core.AgentID, side core.Side, name string, passed []passedOver, counted bool) {
	passed = slices.DeleteFunc(slices.Clone(passed), passedOver.silent)
	why := joined(passed)
	t.mu.Lock()
	p := t.pairs[peer]
	if p == nil { // dismissed meanwhile
		t.mu.Unlock()
		return
	}
	if counted && len(passed) > 0 {
		count(p.fallbacks, why)
		for _, o := range passed {
			s := t.moved[o.name]
			if s.Fallbacks == nil {
				s.Fallbacks, s.FallbacksBy = map[string]uint64{}, map[core.Why]uint64{}
			}
			count(s.Fallbacks, o.why.Error())
			s.FallbacksBy[core.WhyOf(o.why)]++
		}
	}
	before, engine := p.now[side], p.engine
	p.now[side], p.used = name, time.Now()
	if side == core.SideLoad {
		p.why = why
	}
	t.mu.Unlock()
	if before == name {
		return
	}
	text := "pair goes over " + name
	switch {
	case before != "" && t.rank(name) < t.rank(before):
		text = "pair is back on " + name
	case before != "":
		text = "pair goes on over " + name
	}
	if why != "" {
		text += ": " + why
	}
	t.logLimit.Do(func(note string) {
		fields := []zap.Field{zap.String("peer", string(peer)), zap.String("engine_id", engine), zap.Stringer("side", side), zap.String("transport", name)}
		if how := t.how(name, peer); how != "" {
			fields = append(fields, zap.String("how", how))
		}
		t.log.Info(text+note, fields...)
	})
}

// how says by which mechanism of a transport bytes go with a peer; "" if there is only one.
func (t *transports) how(name string, peer core.AgentID) string {
	if w, ok := t.named(name).(explaining); ok {
		return w.How(peer)
	}
	return ""
}

func (t *transports) rank(name string) int { return slices.Index(t.names(), name) }

// maxPairStats bounds the statistics to the pairs used last.
const maxPairStats = 64

// stats returns copies.
func (t *transports) stats() (by map[string]TransportStats, pairs []PairStats) {
	own, lacking := map[string]map[string]uint64{}, map[string]error{}
	for _, w := range t.list {
		if c, ok := w.(counting); ok {
			own[w.Name()] = c.Counters()
		}
		if r, ok := w.(registering); ok {
			if why, _ := r.Lacks(); why != nil {
				lacking[w.Name()] = why
			}
		}
	}
	by, pairs = t.counted(own, lacking)
	for i := range pairs {
		pairs[i].How = t.how(pairs[i].Transport, core.AgentID(pairs[i].Agent))
	}
	return by, pairs
}

// counted returns the statistics that t itself counts, with what its transports have said.
func (t *transports) counted(own map[string]map[string]uint64, lacking map[string]error) (by map[string]TransportStats, pairs []PairStats) {
	t.mu.Lock()
	defer t.mu.Unlock()
	by = map[string]TransportStats{}
	for name, s := range t.moved {
		c := *s
		c.Fallbacks, c.FallbacksBy = maps.Clone(s.Fallbacks), maps.Clone(s.FallbacksBy)
		by[name] = c
	}
	for name, why := range lacking {
		c := by[name]
		c.Available, c.Reason = false, shorten(why.Error())
		by[name] = c
	}
	for name, counters := range own {
		c := by[name]
		c.Counters = counters
		by[name] = c
	}
	ids := slices.SortedFunc(maps.Keys(t.pairs), func(a, b core.AgentID) int { return t.pairs[b].used.Compare(t.pairs[a].used) })
	for _, id := range ids[:min(len(ids), maxPairStats)] {
		p := t.pairs[id]
		now := p.now[core.SideLoad]
		if now == "" {
			now = p.now[core.SideOffer]
		}
		pairs = append(pairs, PairStats{Agent: string(id), EngineID: p.engine, Transport: now, Reason: p.why,
			Transfers: maps.Clone(p.transfers), Fallbacks: maps.Clone(p.fallbacks)})
	}
	return by, pairs
}
