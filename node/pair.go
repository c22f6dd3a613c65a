package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// pair is what the transports remember of one peer; guarded by their lock.
type pair struct {
	engine    string
	connected map[string]bool      // D: by these it has been told to connect
	absent    map[string]string    // D: why not by the others
	down      map[string]bool      // D: those whose connections broke since
	settled   bool                 // D has waited once for the preferred one
	now       map[core.Side]string // by which the last transfer went, from and to the peer
	why       string               // D: and not by the preferred one
	used      time.Time
	transfers map[string]uint64 // that ended well, by transport
	fallbacks map[string]uint64 // that the preferred one did not take, by reason
}

// passedOver is a transport that a transfer did not take.
type passedOver struct {
	name string
	why  error
}

func (o passedOver) String() string { return o.name + ": " + o.why.Error() }

// road is how one transport of a prefill agent is reached.
type road struct {
	via      core.Transport
	endpoint string
}

func (r road) String() string { return r.via.Name() + " " + r.endpoint }

// pair returns a peer's, made if there is none; t.mu is held.
func (t *transports) pair(peer core.AgentID) *pair {
	p := t.pairs[peer]
	if p == nil {
		p = &pair{now: map[core.Side]string{}, transfers: map[string]uint64{}, fallbacks: map[string]uint64{}, down: map[string]bool{}}
		t.pairs[peer] = p
	}
	return p
}

// roads are those transports that a prefill agent has too, with their addresses
// checked, and why there is none of the others.
func (t *transports) roads(ctx context.Context, info *wire.Agent, bootstrap string) (list []road, absent map[string]string, err error) {
	absent = map[string]string{}
	for _, w := range t.list {
		i := slices.IndexFunc(info.Endpoints, func(e wire.Endpoint) bool { return e.Transport == w.Name() })
		if i < 0 {
			absent[w.Name()] = fmt.Sprintf("prefill agent %s of engine %q has none", info.ID, info.EngineID)
			for _, l := range info.Lacks {
				if l.Transport == w.Name() {
					absent[w.Name()] += ": " + shorten(l.Reason)
				}
			}
			continue
		}
		endpoint := info.Endpoints[i].Address
		// What a Signaller's address means is its own: this agent does not dial it.
		if _, signals := w.(core.Signaller); !signals {
			if endpoint, err = fullEndpoint(info, info.Endpoints[i], bootstrap); err != nil {
				return nil, nil, &refusedError{err.Error()}
			}
			if err := t.a.allow.checkEndpoint(ctx, endpoint); err != nil {
				return nil, nil, err
			}
		}
		list = append(list, road{via: w, endpoint: endpoint})
	}
	if len(list) == 0 {
		return nil, nil, &refusedError{fmt.Sprintf("no transport in common: decode engine %q has %s, prefill agent %s of engine %q has %s",
			t.a.cfg.EngineID, t.have(nil), info.ID, info.EngineID, t.have(info))}
	}
	return list, absent, nil
}

// connect makes the roads usable with the tickets of a hello's answer. It
// returns at once.
func (t *transports) connect(peer core.AgentID, engine string, roads []road, absent map[string]string, rep *wire.Reply) error {
	var errs []error
	connected := map[string]bool{}
	t.mu.Lock()
	clear(t.pair(peer).down) // before their news come
	t.mu.Unlock()
	for _, r := range roads {
		name := r.via.Name()
		ticket := ticketOf(rep, name)
		err := error(nil)
		if len(ticket) == 0 {
			err = fmt.Errorf("prefill agent %s of engine %q gives no ticket for %s", peer, engine, name)
		} else {
			err = r.via.Connect(peer, r.endpoint, ticket)
		}
		if err != nil {
			absent[name] = err.Error()
			errs = append(errs, err)
			continue
		}
		connected[name] = true
	}
	t.mu.Lock()
	p := t.pair(peer)
	p.engine, p.connected, p.absent = engine, connected, absent
	t.mu.Unlock()
	if len(connected) == 0 {
		return errors.Join(errs...)
	}
	return nil
}

// ticketOf finds a transport's ticket. That of tcp has a field of its own, since
// before there were others.
func ticketOf(rep *wire.Reply, transport string) []byte {
	if transport == viaTCP {
		return rep.Ticket
	}
	for _, t := range rep.Tickets {
		if t.Transport == transport {
			return t.Ticket
		}
	}
	return nil
}

// withTickets is a hello's answer.
func withTickets(tickets []wire.Ticket) *wire.Reply {
	rep := &wire.Reply{}
	for _, t := range tickets {
		if t.Transport == viaTCP {
			rep.Ticket = t.Ticket
			continue
		}
		rep.Tickets = append(rep.Tickets, t)
	}
	return rep
}

// firstWait is how long a pair that has just met waits at most for its preferred
// transport while there is another.
const firstWait = 2 * time.Second

// settle decides how a pair goes on that has just been connected: for the
// preferred transport it waits once, where there is no other as long as ctx lets it.
func (t *transports) settle(ctx context.Context, peer core.AgentID) error {
	t.mu.Lock()
	p := t.pair(peer)
	again := p.settled
	p.settled = true
	var list []core.Transport
	var passed []passedOver
	for _, w := range t.list {
		if p.connected[w.Name()] {
			list = append(list, w)
		} else {
			passed = append(passed, passedOver{w.Name(), errors.New(p.absent[w.Name()])})
		}
	}
	t.mu.Unlock()
	for i, w := range list {
		err := error(nil)
		switch s, signals := w.(core.Signaller); {
		case !signals:
		case i == len(list)-1:
			err = s.Usable(ctx, peer)
		case again:
			err = usableNow(w, peer)
		default:
			first, cancel := context.WithTimeout(ctx, min(firstWait, time.Duration(t.a.cfg.ConnectTimeout)/helloShare))
			err = s.Usable(first, peer)
			cancel()
		}
		if err == nil {
			t.chosen(peer, core.SideLoad, w.Name(), passed, false)
			return nil
		}
		passed = append(passed, passedOver{w.Name(), err})
	}
	return t.noWay(peer, passed)
}

// noWay names both sides: each may have to be looked at.
func (t *transports) noWay(peer core.AgentID, passed []passedOver) error {
	t.mu.Lock()
	engine := ""
	if p := t.pairs[peer]; p != nil {
		engine = p.engine
	}
	t.mu.Unlock()
	return fmt.Errorf("bytes cannot go from prefill agent %s of engine %q to decode agent %s of engine %q: %s (transport is %q here)",
		peer, engine, t.a.id, t.a.cfg.EngineID, joined(passed), t.a.cfg.Transport)
}

func joined(passed []passedOver) string {
	list := make([]string, len(passed))
	for i, o := range passed {
		list[i] = o.String()
	}
	return strings.Join(list, "; ")
}

// chosen notes by which transport a pair goes, and logs it when that is new. D
// counts what a transfer has passed over.
func (t *transports) chosen(peer core.AgentID, side core.Side, name string, passed []passedOver, counted bool) {
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
				s.Fallbacks = map[string]uint64{}
			}
			count(s.Fallbacks, o.why.Error())
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
	t.lines.Do(func(note string) {
		t.a.log.Info(text+note, zap.String("peer", string(peer)), zap.String("engine_id", engine), zap.Stringer("side", side), zap.String("transport", name))
	})
}

func (t *transports) rank(name string) int { return slices.Index(t.names(), name) }

// maxReasons bounds the reasons that are counted apart: some hold numbers.
const maxReasons = 16

const otherReasons = "other reasons"

func count(by map[string]uint64, why string) {
	why = shorten(why)
	if _, known := by[why]; !known && len(by) >= maxReasons {
		why = otherReasons
	}
	by[why]++
}

// TransportStats are what one transport of an agent has done since it was
// registered.
type TransportStats struct {
	Available    bool              `json:"available"`
	Reason       string            `json:"reason,omitempty"` // why it is not
	Loads        uint64            `json:"loads"`            // ended well
	Offers       uint64            `json:"offers"`           // ended well
	LoadsFailed  uint64            `json:"loads_failed"`     // after they had begun to wait for it
	OffersFailed uint64            `json:"offers_failed"`
	BytesIn      uint64            `json:"bytes_in"`
	BytesOut     uint64            `json:"bytes_out"`
	Fallbacks    map[string]uint64 `json:"fallbacks,omitempty"` // loads that another took in its place, by reason
	Counters     map[string]uint64 `json:"counters,omitempty"`  // of the transport itself: rdma.Transport.Counters
}

// counting is a transport with counters of its own.
type counting interface{ Counters() map[string]uint64 }

func (s *TransportStats) add(r core.Report) {
	ok := r.Code == core.OK
	switch {
	case r.Side == core.SideLoad && ok:
		s.Loads++
		s.BytesIn += r.Stats.Bytes
	case r.Side == core.SideLoad:
		s.LoadsFailed++
	case ok:
		s.Offers++
		s.BytesOut += r.Stats.Bytes
	default:
		s.OffersFailed++
	}
}

// PairStats are what an agent has done with one peer.
type PairStats struct {
	Agent     string            `json:"agent"`
	EngineID  string            `json:"engine_id"`
	Transport string            `json:"transport"`           // by which new transfers go
	Reason    string            `json:"reason,omitempty"`    // why not by a better one
	Transfers map[string]uint64 `json:"transfers"`           // that ended well, by transport
	Fallbacks map[string]uint64 `json:"fallbacks,omitempty"` // loads that did not take the best one, by reason
}

// maxPairStats bounds the statistics' length: the pairs used last are told.
const maxPairStats = 64

// stats returns copies.
func (t *transports) stats() (by map[string]TransportStats, pairs []PairStats) {
	own := map[string]map[string]uint64{}
	for _, w := range t.list {
		if c, ok := w.(counting); ok {
			own[w.Name()] = c.Counters()
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	by = map[string]TransportStats{}
	for name, s := range t.moved {
		c := *s
		c.Fallbacks = maps.Clone(s.Fallbacks)
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
