package rdma

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// How P makes lanes.

var errNoPath = errors.New("no port here reaches a port there")

// connect asks D for its ports, and makes lanes for pairs of ports that have none,
// until each port has some or no pair is left to try.
func (lk *link) connect() error {
	lk.mu.Lock()
	due := lk.due()
	lk.mu.Unlock()
	rep, err := lk.t.ask(lk.peer, &signal{Kind: signalPorts, Ticket: lk.ticket}, lk.t.cfg.ConnectTimeout/3)
	if err != nil {
		return err
	}
	lk.mu.Lock()
	lk.tasks &^= makeLanes
	lk.mu.Unlock()
	there, why := newFar(rep)
	if why == nil {
		if why, err = lk.connectTo(there, due); err != nil {
			lk.mu.Lock()
			defer lk.mu.Unlock()
			lk.tasks |= makeLanes // still
			return err
		}
	}
	return lk.sayJoined(why)
}

// sayJoined tells D which lanes there are. An error says why there are none.
func (lk *link) sayJoined(why error) error {
	s := &signal{Kind: signalJoined, Ticket: lk.ticket}
	lk.mu.Lock()
	s.Last = lk.lastID
	for _, l := range lk.lanes {
		s.Lanes = append(s.Lanes, l.id)
	}
	lk.mu.Unlock()
	if len(s.Lanes) == 0 {
		for _, p := range lk.t.ports {
			if !p.usable() {
				why = allOf(why, fmt.Errorf("port %s is down", p.name))
			}
		}
		if why == nil {
			why = errors.New("all that were made broke at once")
		}
		why = fmt.Errorf("%w: %w", errNoPath, why)
		s.Reason = shorten(why.Error())
	} else {
		why = nil
	}
	if _, err := lk.t.ask(lk.peer, s, lk.t.cfg.ConnectTimeout/3); err != nil && why == nil {
		lk.t.log.Debug("rdma: a peer does not hear which lanes it has; it will ask", zap.String("peer", string(lk.peer)), zap.Error(err))
	}
	return why
}

// connectTo makes lanes to ports of D. why says what was in the way of those that
// could not be made; err, that D could not be asked.
func (lk *link) connectTo(there *far, due map[railKey]bool) (why, err error) {
	lk.update(func(lk *link) {
		if lk.there != nil && string(lk.there.secret) != string(there.secret) {
			lk.lose(fmt.Errorf("rdma: decode agent %s has opened anew: %w", lk.peer, core.ErrConnectionLost))
		}
		if lk.there == nil {
			lk.grants = grants{dead: map[uint64]bool{}}
		}
		if lk.on(eventPorts) != stateEnded {
			lk.there = there
		}
	})
	tried := map[railKey]bool{}
	var causes []error
	for round := 0; ; round++ {
		pairs := lk.candidates(there, tried, due, &causes)
		if len(pairs) == 0 {
			return allOf(causes...), nil
		}
		if round > 0 && lk.hasLanes() { // D need not wait for what may take long
			_ = lk.sayJoined(nil)
		}
		if err := lk.join(there, pairs, &causes); err != nil {
			return nil, err
		}
		if lk.t.ctx.Err() != nil {
			return nil, errClosed
		}
	}
}

func (lk *link) hasLanes() bool {
	lk.mu.Lock()
	defer lk.mu.Unlock()
	return len(lk.lanes) > 0
}

// pairOfPorts is a rail to be tried.
type pairOfPorts struct {
	key   railKey
	local *localPort
	far   *portInfo
	path  portPath
	lanes int // that it lacks
}

// candidates are pairs of ports that lack lanes and whose ports have none to others,
// at most one for each port, the best first: of what has not been tried, nor is paused.
func (lk *link) candidates(there *far, tried, due map[railKey]bool, causes *[]error) (out []pairOfPorts) {
	lk.mu.Lock()
	defer lk.mu.Unlock()
	localUsed, farUsed, have := map[int]bool{}, map[int]bool{}, map[railKey]int{}
	for _, l := range lk.lanes {
		localUsed[l.port.index], farUsed[l.remote] = true, true
		have[l.railKey()]++
	}
	var all []pairOfPorts
	for _, p := range lk.t.ports {
		state := p.state.Load()
		if !p.usable() {
			continue
		}
		for _, q := range there.ports {
			key := railKey{p.index, q.Index}
			lacks := lk.t.cfg.QueuePairs - have[key]
			if tried[key] || lacks <= 0 || lacks == lk.t.cfg.QueuePairs && (localUsed[p.index] || farUsed[q.Index]) {
				continue
			}
			if r := lk.rails[key]; r != nil && !r.usable() && !due[key] && len(lk.lanes) > 0 {
				continue
			}
			way, err := choosePath(&state.address, q.address())
			if err != nil {
				tried[key] = true
				*causes = append(*causes, err)
				continue
			}
			all = append(all, pairOfPorts{key, p, q, way, lacks})
		}
	}
	sortPairs(all)
	for _, c := range all {
		if have[c.key] > 0 || !localUsed[c.key.local] && !farUsed[c.key.remote] {
			localUsed[c.key.local], farUsed[c.key.remote], tried[c.key] = true, true, true
			out = append(out, c)
		}
	}
	return out
}

// sortPairs puts first what is likely to be one network: addresses that have most
// in common, then the order of the lists.
func sortPairs(all []pairOfPorts) {
	slices.SortStableFunc(all, func(a, b pairOfPorts) int {
		return cmp.Or(
			cmp.Compare(commonBits(&b.path), commonBits(&a.path)),
			cmp.Compare(a.key.local, b.key.local), cmp.Compare(a.key.remote, b.key.remote))
	})
}

// join makes lanes for pairs of ports and sees whether bytes get through. What
// does is used at once; of what does not causes has the reason. An error says that
// D could not be asked.
func (lk *link) join(there *far, pairs []pairOfPorts, causes *[]error) error {
	t := lk.t
	s := &signal{Kind: signalJoin, Ticket: lk.ticket}
	var lanes []*lane
	ways := map[*lane]pairOfPorts{}
	refused, worked := map[railKey]error{}, map[railKey]bool{}
	bundles := map[*device]*bundle{}
	for _, c := range pairs {
		b := bundles[c.local.dev]
		if b == nil {
			var err error
			if b, err = t.newBundle(c.local.dev, len(pairs)*t.cfg.QueuePairs, t.cfg.SendDepth, lk.completed); err != nil {
				*causes = append(*causes, err)
				continue
			}
			bundles[c.local.dev] = b
			defer b.seal()
		}
		for range c.lanes {
			l, err := lk.newLane(b, there, c)
			if err != nil {
				*causes = append(*causes, err)
				break
			}
			lanes, ways[l] = append(lanes, l), c
			s.Join = append(s.Join, laneOffer{Lane: l.id, Port: c.far.Index, QPN: l.qp.Number(), PSN: l.psn, MTU: min(c.local.state.Load().mtu, c.far.MTU),
				GRH: c.path.GRH, GID: c.path.Local.Raw, Index: c.path.Remote.Index, LID: c.local.state.Load().address.LID})
		}
	}
	if len(lanes) == 0 {
		return nil
	}
	failed := func(l *lane, err error) {
		l.drop(func() {})
		c := ways[l]
		err = fmt.Errorf("%s to %s (%v): %w", c.local.name, c.far.Name, c.path, err)
		*causes = append(*causes, err)
		t.log.Info("rdma lane cannot be used", zap.String("peer", string(lk.peer)), zap.Error(err))
		refused[c.key] = err
	}
	defer func() { // a rail is paused when none of its lanes works
		lk.update(func(lk *link) {
			for _, c := range pairs {
				if err := refused[c.key]; err != nil && !worked[c.key] {
					lk.rail(c).fail(time.Now(), err)
				}
			}
		})
	}()
	rep, err := t.ask(lk.peer, s, 2*t.cfg.ConnectTimeout/3) // D may look for neighbours that are not there, which takes a second
	if err != nil && !errors.Is(err, errRefused) {          // which says nothing of the ports
		for _, l := range lanes {
			l.drop(func() {})
		}
		return err
	}
	if err == nil && len(rep.Lanes) != len(lanes) {
		err = fmt.Errorf("agent %s answers for %d lanes, it was asked for %d", lk.peer, len(rep.Lanes), len(lanes))
	}
	if err != nil {
		for _, l := range lanes {
			failed(l, err)
		}
		return nil
	}
	lk.update(func(lk *link) { lk.told(rep) })
	probing := lanes[:0:0]
	for i, l := range lanes {
		a, o := &rep.Lanes[i], &s.Join[i]
		var err error
		if a.Error != "" {
			err = fmt.Errorf("at the peer: %s", a.Error)
		} else if err = l.ready(t.verbsPath(l.port, ways[l].path, o.MTU, a.QPN, a.PSN, l.psn)); err == nil {
			err = l.postProbe(there.scratch[l.remote])
		}
		if err != nil {
			failed(l, err)
			continue
		}
		probing = append(probing, l)
	}
	late := time.NewTimer(t.cfg.ConnectTimeout)
	defer late.Stop()
	for _, l := range probing {
		var err error
		select {
		case err = <-l.probe:
		case <-late.C:
			late.Reset(0)
			err = fmt.Errorf("%d bytes do not get through within %v", scratchBytes, t.cfg.ConnectTimeout)
		case <-t.ctx.Done():
			err = errClosed
		}
		if err != nil {
			failed(l, err)
			continue
		}
		c := ways[l]
		lk.update(func(lk *link) {
			if lk.there != there { // D has ended the connection
				l.drop(func() {})
				return
			}
			t.log.Info("rdma lane", zap.String("peer", string(lk.peer)), zap.Uint32("lane", l.id), zap.String("from", c.local.name), zap.String("to", c.far.Name), zap.Stringer("path", c.path))
			lk.rail(c).restored(time.Now())
			worked[c.key], l.proven = true, true
			lk.lanes = append(lk.lanes, l)
			lk.on(eventLane)
			lk.again()
			lk.watchRest()
		})
	}
	return nil
}

func (lk *link) newLane(b *bundle, there *far, c pairOfPorts) (*lane, error) {
	depth := b.depth
	l, err := b.add(0, c.local, c.far.Index, verbs.Caps{SendDepth: depth + 1, ReceiveDepth: 1, Pieces: c.local.dev.limit.maxPieces})
	if err != nil {
		return nil, err
	}
	lk.mu.Lock()
	defer lk.mu.Unlock()
	lk.lastID++
	l.id, l.link, l.rail, l.keys = lk.lastID, lk, lk.rail(c), there.tables[c.far.Index]
	l.queue = newSendQueue[*job](depth, maxFlight, signalEvery)
	return l, nil
}

const (
	// maxFlight is the most bytes that a lane has under way: more than any path
	// holds, little enough that a write that is stopped ends soon.
	maxFlight = 16 << 20
	// signalEvery is how many writes one completion stands for.
	signalEvery = 32
)

// postProbe writes nothing, and then as much as the largest packet, to memory that is
// nobody's: what swallows large packets must be found before a transfer's bytes are.
func (l *lane) postProbe(to keyInfo) error {
	from := l.port.dev.memory.Load().scratch
	_, err := l.qp.Post([]verbs.Write{
		{ID: probeID, Flags: verbs.Signaled},
		{ID: bigProbeID, RemoteAddr: to.Base, RemoteKey: to.Key, Pieces: 1, Flags: verbs.Signaled},
	}, []verbs.SGE{{Addr: from.Addr, Length: scratchBytes, Key: from.LKey}})
	return err
}
