package rdma

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// marksDepth is how many marks a lane takes before D has looked at them.
const marksDepth = 512

// accept makes D's ends of lanes; src.mu is held.
func (t *Transport) accept(src *source, offers []laneOffer) []laneAnswer {
	out := make([]laneAnswer, len(offers))
	bundles := map[*device]*bundle{}
	for i := range offers {
		o := &offers[i]
		if l := src.lanes[o.Lane]; l != nil && l.offer == *o { // the same signal once more
			out[i].QPN, out[i].PSN = l.qp.Number(), l.psn
			continue
		}
		l, err := t.acceptOne(src, o, bundles, len(offers))
		if err != nil {
			out[i].Error = shorten(err.Error())
			t.log.Info("rdma lane refused", zap.String("peer", string(src.peer)), zap.Uint32("lane", o.Lane), zap.Error(err))
			continue
		}
		src.lanes[l.id] = l
		out[i].QPN, out[i].PSN = l.qp.Number(), l.psn
	}
	for _, b := range bundles {
		b.seal()
	}
	return out
}

func (t *Transport) acceptOne(src *source, o *laneOffer, bundles map[*device]*bundle, lanes int) (*lane, error) {
	if src.lanes[o.Lane] != nil || src.dying[o.Lane] != nil {
		return nil, fmt.Errorf("lane %d is open already", o.Lane)
	}
	if o.Port < 0 || o.Port >= len(t.ports) {
		return nil, fmt.Errorf("port %d of %d", o.Port, len(t.ports))
	}
	p := t.ports[o.Port]
	state := p.state.Load()
	if !state.up {
		return nil, fmt.Errorf("port %s is not active", p.name)
	}
	way := portPath{GRH: o.GRH, LID: o.LID, Remote: gid{Raw: o.GID}}
	if o.GRH {
		var err error
		if way.Local, err = forceGID(state.address.GIDs, o.Index, p.name); err != nil {
			return nil, err
		}
	}
	b := bundles[p.dev]
	if b == nil {
		var err error
		if b, err = t.newBundle(p.dev, lanes, marksDepth, src.received); err != nil {
			return nil, err
		}
		bundles[p.dev] = b
	}
	l, err := b.add(o.Lane, p, -1, verbs.Caps{SendDepth: laneExtra, ReceiveDepth: b.depth, Pieces: 1})
	if err != nil {
		return nil, err
	}
	l.offer = *o
	if err := l.ready(t.verbsPath(p, way, min(o.MTU, state.mtu), o.QPN, o.PSN, l.psn)); err != nil {
		l.destroy()
		return nil, err
	}
	return l, nil
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

// portDown retires the lanes of a port, and has P told.
func (r *receiver) portDown(p *localPort, cause error) {
	r.mu.Lock()
	all := slices.Collect(maps.Values(r.sources))
	r.mu.Unlock()
	for _, src := range all {
		src.mu.Lock()
		for _, l := range src.lanes {
			if l.port == p {
				r.t.log.Warn("rdma lane broke", zap.String("peer", string(src.peer)), zap.Uint32("lane", l.id), zap.Error(cause))
				src.broken = append(src.broken, l.id)
				src.retire(l)
			}
		}
		if len(src.broken) > 0 {
			src.greet()
		}
		src.mu.Unlock()
	}
}

func (r *receiver) lanes() (n int) {
	r.mu.Lock()
	all := slices.Collect(maps.Values(r.sources))
	r.mu.Unlock()
	for _, src := range all {
		src.mu.Lock()
		n += len(src.lanes)
		src.mu.Unlock()
	}
	return n
}
