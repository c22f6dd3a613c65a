// The four steps that make lanes: plan, make, exchange, probe.

package rdma

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// planned is a path that is to be tried, and the result.
type planned struct {
	key    pathKey
	local  *localPort
	remote *portInfo
	route  route
	lanes  int   // that the path lacks
	works  bool  // one of its lanes has carried its probe
	failed error // why the last lane that failed has failed
}

// plan picks paths that lack lanes, the best first. No two of them have a port in
// common, and none has a port at which there are lanes of another path. Paths that
// were tried or are paused are left out. causes says why ports do not reach each other.
func (cn *conn) plan(remote *remoteInfo, tried, due map[pathKey]bool) (plan []*planned, causes []error) {
	cn.mu.Lock()
	defer cn.mu.Unlock()
	localUsed, remoteUsed, have := map[int]bool{}, map[int]bool{}, map[pathKey]int{}
	for _, l := range cn.lanes {
		localUsed[l.port.index], remoteUsed[l.remote] = true, true
		have[l.pathKey()]++
	}
	var all []*planned
	for _, p := range cn.t.ports {
		state := p.state.Load()
		if !p.usable() {
			continue
		}
		for _, q := range remote.ports {
			key := pathKey{p.index, q.Index}
			lacks := cn.t.cfg.QueuePairs - have[key]
			if tried[key] || lacks <= 0 || lacks == cn.t.cfg.QueuePairs && (localUsed[p.index] || remoteUsed[q.Index]) {
				continue
			}
			if r := cn.paths[key]; r != nil && !r.usable() && !due[key] && len(cn.lanes) > 0 {
				continue
			}
			way, err := chooseRoute(&state.address, q.address())
			if err != nil {
				if why := remote.refused[q.Index]; why != nil {
					err = fmt.Errorf("prefill agent %s may not send to port %s of the peer: %w; else %w", cn.t.id, q.Name, why, err)
				}
				tried[key] = true
				causes = append(causes, err)
				continue
			}
			all = append(all, &planned{key: key, local: p, remote: q, route: way, lanes: lacks})
		}
	}
	sortPlanned(all)
	for _, c := range all {
		if have[c.key] > 0 || !localUsed[c.key.local] && !remoteUsed[c.key.remote] {
			localUsed[c.key.local], remoteUsed[c.key.remote], tried[c.key] = true, true, true
			plan = append(plan, c)
		}
	}
	return plan, causes
}

// sortPlanned puts paths first whose ends are likely to be in one network, which is
// where the addresses have most bits in common. Among equals the order of the lists counts.
func sortPlanned(all []*planned) {
	slices.SortStableFunc(all, func(a, b *planned) int {
		return cmp.Or(
			cmp.Compare(commonBits(&b.route), commonBits(&a.route)),
			cmp.Compare(a.key.local, b.key.local), cmp.Compare(a.key.remote, b.key.remote))
	})
}

// trial is a lane that is being made.
type trial struct {
	of     *planned
	lane   *lane
	offer  laneOffer
	answer laneAnswer
	failed error
}

// make opens P's ends of the lanes that a plan lacks. unmade says why some could not
// be opened, which is no fault of their paths.
func (cn *conn) make(remote *remoteInfo, plan []*planned) (made []*trial, unmade []error) {
	t := cn.t
	bundles := map[*device]*bundle{}
	for _, c := range plan {
		b := bundles[c.local.dev]
		if b == nil {
			var err error
			if b, err = t.newBundle(c.local.dev, len(plan)*t.cfg.QueuePairs, t.cfg.SendDepth, cn.completed); err != nil {
				unmade = append(unmade, err)
				continue
			}
			bundles[c.local.dev] = b
			defer b.seal()
		}
		for range c.lanes {
			l, err := cn.newLane(b, remote, c)
			if err != nil {
				unmade = append(unmade, err)
				break
			}
			state := c.local.state.Load()
			made = append(made, &trial{of: c, lane: l, offer: laneOffer{Lane: l.id, Port: c.remote.Index, QPN: l.qp.Number(), PSN: l.psn,
				MTU: min(state.mtu, c.remote.MTU), Trial: cn.tries(remote), GRH: c.route.GRH, GID: c.route.Local.Raw, Index: c.route.Remote.Index, LID: state.address.LID}})
		}
	}
	return made, unmade
}

// exchange has D open its ends of the lanes. If D refuses a trial, the trial has failed. If D does not
// answer, exchange drops all lanes, and the error says why; this is no proof that D's ports do not work.
func (cn *conn) exchange(remote *remoteInfo, made []*trial) error {
	if len(made) == 0 {
		return nil
	}
	s := &signal{Kind: signalConnect, Ticket: cn.ticket, Secret: remote.secret}
	for _, tr := range made {
		s.Offers = append(s.Offers, tr.offer)
	}
	rep, err := cn.t.ask(cn.peer, s, 2*cn.t.cfg.ConnectTimeout/3) // D may look for neighbours that are not there, which takes a second
	switch {
	case err == nil && len(rep.Lanes) != len(made):
		err = fmt.Errorf("agent %s answers for %d lanes, it was asked for %d", cn.peer, len(rep.Lanes), len(made))
	case err == nil:
		cn.update(func(cn *conn) { cn.grantsReceived(rep) })
	case !errors.Is(err, errRefused):
		for _, tr := range made {
			tr.lane.drop(func() {})
		}
		return err
	}
	for i, tr := range made {
		switch {
		case err != nil:
			cn.failed(tr, err)
		case rep.Lanes[i].Error != "":
			cn.failed(tr, fmt.Errorf("at the peer: %s", rep.Lanes[i].Error))
		default:
			tr.answer = rep.Lanes[i]
		}
	}
	return nil
}

// probe writes at once by all lanes that have not failed, and takes each lane into use
// when its bytes have come through.
func (cn *conn) probe(remote *remoteInfo, answered []*trial) {
	t := cn.t
	for _, tr := range answered {
		if l := tr.lane; tr.failed == nil {
			err := l.ready(t.verbsRoute(l.port, tr.of.route, tr.offer.MTU, tr.answer.QPN, tr.answer.PSN, l.psn))
			if err == nil {
				err = cn.postProbe(l, remote, tr.answer.Place)
			}
			if err != nil {
				cn.failed(tr, err)
			}
		}
	}
	late := time.NewTimer(t.cfg.ConnectTimeout)
	defer late.Stop()
	var written []*trial
	for _, tr := range answered {
		if tr.failed != nil {
			continue
		}
		var err error
		select {
		case err = <-tr.lane.probe:
		case <-late.C:
			late.Reset(0)
			err = fmt.Errorf("%d bytes do not get through within %v", scratchBytes, t.cfg.ConnectTimeout)
		case <-t.ctx.Done():
			err = errClosed
		}
		if err != nil {
			cn.failed(tr, err)
			continue
		}
		if cn.tries(remote) {
			written = append(written, tr)
		} else {
			cn.update(func(cn *conn) { cn.use(tr, remote) })
		}
	}
	cn.verify(remote, written)
}

// use adds a lane that was probed, unless D has ended the connection meanwhile, or the memory
// became another, which its card may not have taken; cn.mu is held.
func (cn *conn) use(tr *trial, remote *remoteInfo) {
	l, c := tr.lane, tr.of
	if cn.remote != remote || cn.t.forgotten() != nil || !c.local.usable() {
		l.drop(func() {})
		return
	}
	cn.t.log.Info("rdma lane", zap.String("peer", string(cn.peer)), zap.Uint32("lane", l.id), zap.String("from", c.local.name), zap.String("to", c.remote.Name), zap.Stringer("route", c.route))
	cn.path(c).restored(time.Now())
	c.works, l.proven = true, true
	cn.lanes = append(cn.lanes, l)
	cn.on(eventLane)
	cn.again()
	cn.watchRest()
}

// failed drops a lane that cannot be used.
func (cn *conn) failed(tr *trial, err error) {
	c := tr.of
	tr.lane.drop(func() {})
	tr.failed = fmt.Errorf("%s to %s (%v): %w", c.local.name, c.remote.Name, c.route, err)
	c.failed = tr.failed
	cn.t.log.Info("rdma lane cannot be used", zap.String("peer", string(cn.peer)), zap.Error(tr.failed))
}

// judge pauses the paths that have no working lane, and returns why lanes failed.
func (cn *conn) judge(plan []*planned, made []*trial) (causes []error) {
	for _, tr := range made {
		if tr.failed != nil {
			causes = append(causes, tr.failed)
		}
	}
	cn.update(func(cn *conn) {
		for _, c := range plan {
			if c.failed != nil && !c.works {
				cn.path(c).fail(time.Now(), c.failed)
			}
		}
	})
	return causes
}

func (cn *conn) newLane(b *bundle, remote *remoteInfo, c *planned) (*lane, error) {
	depth := b.depth
	l, err := b.add(0, c.local, c.remote.Index, verbs.Caps{SendDepth: depth + 1, ReceiveDepth: 1, Pieces: c.local.dev.limit.maxPieces})
	if err != nil {
		return nil, err
	}
	cn.mu.Lock()
	defer cn.mu.Unlock()
	cn.lastID++
	l.id, l.conn, l.path, l.keys = cn.lastID, cn, cn.path(c), remote.tables[c.remote.Index]
	l.tried = cn.tries(remote)
	l.queue = newSendQueue[*job](depth, maxFlight, signalEvery)
	return l, nil
}

const (
	// maxFlight is the most bytes that a lane has under way: more than any path
	// holds, and so little that a write that was stopped ends soon.
	maxFlight = 16 << 20
	// signalEvery is how many writes one completion stands for.
	signalEvery = 32
)

// postProbe posts two writes to D's scratch memory: one without bytes, and one of the largest
// packet's size. So P finds a path that swallows large packets before a transfer uses it. If the lane
// is on trial, it then writes out of each area here and into each of D's areas.
func (cn *conn) postProbe(l *lane, remote *remoteInfo, place int) error {
	m, to := l.port.dev.memory.Load(), remote.scratch[l.remote]
	writes := []verbs.Write{
		{ID: probeID, Flags: verbs.Signaled},
		{ID: bigProbeID, RemoteAddr: to.Base, RemoteKey: to.Key, Pieces: 1, Flags: verbs.Signaled},
	}
	pieces := []verbs.SGE{{Addr: m.scratch.Addr, Length: scratchBytes, Key: m.scratch.LKey}}
	if cn.tries(remote) {
		areas := remote.areas[l.remote]
		if len(areas) == 0 {
			return errors.New("the peer's version does not know regions on GPUs: use the same version")
		}
		// Each area here writes a part of its own: no other area's bytes may cover it.
		parts := (max(len(m.areas), len(areas)) + len(areas) - 1) / len(areas)
		n := parts * len(areas)
		switch {
		case place < 1 || place > trialPlaces:
			return fmt.Errorf("the peer gives place %d of %d for a trial", place, trialPlaces)
		case len(writes)+n > l.b.depth:
			return fmt.Errorf("a lane of %d requests cannot try %d GPUs: raise rdma_send_depth", l.b.depth, n)
		}
		for i := range n {
			from, to := m.areas[i%len(m.areas)], areas[i%len(areas)]
			part := i / len(areas)
			at, end := part*trialBytes/parts, (part+1)*trialBytes/parts
			writes = append(writes, verbs.Write{ID: trialID, RemoteAddr: to.Base + uint64(place-1)*trialBytes + uint64(at), RemoteKey: to.Key, First: uint32(len(pieces)), Pieces: 1})
			pieces = append(pieces, verbs.SGE{Addr: from.Addr + trialStream + streamAt(l.id) + uint64(at), Length: uint32(end - at), Key: from.LKey})
		}
		writes[len(writes)-1].Flags = verbs.Signaled
	}
	_, err := l.qp.Post(writes, pieces)
	return err
}
