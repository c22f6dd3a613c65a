// D makes its ends of the lanes that P offers, and tells P when a port of D's goes down or comes back.

package rdma

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	defect "github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// marksDepth is how many marks a lane takes before D has looked at them.
const marksDepth = 512

// accepted is D's result for one offer of a lane: the lane, or why there is none.
type accepted struct {
	lane *lane
	err  error
}

// accept makes D's ends of the lanes that are not known yet, at all ports at the same
// time.
func (t *Transport) accept(src *source, offers []laneOffer, known []bool) []accepted {
	out := make([]accepted, len(offers))
	byPort := map[int][]int{}
	for i := range offers {
		switch n := offers[i].Port; {
		case known[i]:
		case n < 0 || n >= len(t.ports):
			out[i].err = fmt.Errorf("the peer asks for port %d, but this agent has %d ports", n, len(t.ports))
		default:
			if out[i].err = t.admits(t.ports[n], &offers[i]); out[i].err == nil {
				byPort[n] = append(byPort[n], i)
			}
		}
	}
	var wg sync.WaitGroup
	for n, list := range byPort {
		wg.Go(func() { t.acceptAt(src, t.ports[n], offers, list, out) })
	}
	wg.Wait()
	return out
}

// admits says whether a lane's end at a port may send to the end that P offers, which may be
// anywhere: acknowledgements and pings go there.
func (t *Transport) admits(p *localPort, o *laneOffer) error {
	if p.state.Load().address.Link != verbs.LinkEthernet {
		return nil
	}
	if !o.GRH {
		return fmt.Errorf("port %s is a RoCE port, and the peer names no GID", p.name)
	}
	if err := t.cfg.guard(&gid{Raw: o.GID}); err != nil && !defect.On("rdma-unguarded-offer") {
		return fmt.Errorf("decode agent %s may not send to the peer's port: %w", t.id, err)
	}
	return nil
}

// acceptAt makes this side's ends of lanes at one port. If one fails, it makes no further ends.
func (t *Transport) acceptAt(src *source, p *localPort, offers []laneOffer, list []int, out []accepted) {
	b, err := t.newBundle(p.dev, len(list), marksDepth, src.received)
	if err == nil {
		defer b.seal()
	}
	for _, i := range list {
		if err == nil {
			out[i].lane, err = t.acceptOne(b, p, &offers[i])
		}
		out[i].err = err
	}
}

func (t *Transport) acceptOne(b *bundle, p *localPort, o *laneOffer) (*lane, error) {
	state := p.state.Load()
	if !p.usable() {
		return nil, fmt.Errorf("port %s is not active", p.name)
	}
	way := route{GRH: o.GRH, LID: o.LID, Remote: gid{Raw: o.GID}}
	if o.GRH {
		var err error
		if way.Local, err = forceGID(state.address.GIDs, o.Index, p.name); err != nil {
			return nil, err
		}
	}
	l, err := b.add(o.Lane, p, -1, verbs.Caps{SendDepth: laneExtra, ReceiveDepth: b.depth, Pieces: 1})
	if err != nil {
		return nil, err
	}
	l.offer = *o
	if o.Trial {
		if l.place, err = t.memory.places.take(); err != nil {
			l.drop(func() {})
			return nil, err
		}
	}
	if err := l.ready(t.verbsRoute(p, way, min(o.MTU, state.mtu), o.QPN, o.PSN, l.psn)); err != nil {
		l.drop(func() {})
		return nil, err
	}
	return l, nil
}

// portDown retires the lanes of a port, and has P told.
func (r *receiver) portDown(p *localPort, cause error) {
	for _, src := range r.all() {
		src.mu.Lock()
		for _, l := range src.lanes {
			if l.port == p {
				r.t.log.Warn("rdma lane broke", zap.String("peer", string(src.peer)), zap.Uint32("lane", l.id), zap.Error(cause))
				src.broken = append(src.broken, l.id)
				src.retire(l)
			}
		}
		if len(src.broken) > 0 {
			src.requestConnect()
		}
		src.mu.Unlock()
	}
}

// portUp tells each P that a port has become active, if P has lanes at other ports, or has
// reached no port. Any other P learns of the port when it connects.
func (r *receiver) portUp(p *localPort) {
	for _, src := range r.all() {
		src.mu.Lock()
		if len(src.lanes) > 0 || src.cause != nil {
			if !slices.Contains(src.up, p.index) {
				src.up = append(src.up, p.index)
			}
			src.requestAt, src.backoff = time.Time{}, 0
			src.requestConnect()
		}
		src.mu.Unlock()
	}
}

func (r *receiver) all() []*source {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Values(r.sources))
}

func (r *receiver) lanes() (n int) {
	for _, src := range r.all() {
		src.mu.Lock()
		n += len(src.lanes)
		src.mu.Unlock()
	}
	return n
}
