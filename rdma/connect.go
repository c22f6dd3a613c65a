package rdma

import (
	"errors"
	"fmt"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
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

// connectTo makes lanes to ports of D, a round for each set of rails that have no
// port in common: plan names the rails, make opens P's ends, exchange has D open its
// ends, and probe takes into use what carries bytes. why says what was in the way of
// the lanes that could not be made; err says that D could not be asked.
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
		plan, unreachable := lk.plan(there, tried, due)
		causes = append(causes, unreachable...)
		if len(plan) == 0 {
			return allOf(causes...), nil
		}
		if round > 0 && lk.hasLanes() { // D need not wait for what may take long
			_ = lk.sayJoined(nil)
		}
		made, unmade := lk.make(there, plan)
		if err := lk.exchange(made); err != nil {
			return nil, err
		}
		lk.probe(there, made)
		causes = append(append(causes, unmade...), lk.judge(plan, made)...)
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

// far is what D has said of itself. It does not change.
type far struct {
	secret  []byte
	ports   map[int]*portInfo
	tables  map[int]*keyTable // by port, as the next
	scratch map[int]keyInfo
}

// newFar checks what D says of itself.
func newFar(rep *reply) (*far, error) {
	if len(rep.Secret) != secretSize {
		return nil, fmt.Errorf("a secret of %d bytes, want %d", len(rep.Secret), secretSize)
	}
	f := &far{secret: rep.Secret, ports: map[int]*portInfo{}, tables: map[int]*keyTable{}, scratch: map[int]keyInfo{}}
	regions := make([]memRange, len(rep.Regions))
	for i, r := range rep.Regions {
		regions[i] = memRange(r)
	}
	tables := make([]*keyTable, len(rep.Devices))
	for i, d := range rep.Devices {
		keys := make([]keyRange, len(d.Keys))
		for k, key := range d.Keys {
			keys[k] = keyRange{memRange{key.Base, key.Length}, key.Key}
		}
		if d.Scratch.Length < scratchBytes {
			return nil, fmt.Errorf("device %d of the peer has %d bytes for probes, want %d", i, d.Scratch.Length, scratchBytes)
		}
		var err error
		if tables[i], err = newKeyTable("at the peer", regions, keys); err != nil {
			return nil, err
		}
	}
	for i := range rep.Ports {
		p := &rep.Ports[i]
		if p.Device < 0 || p.Device >= len(tables) || f.ports[p.Index] != nil {
			return nil, fmt.Errorf("port %q is of device %d of %d, or listed twice", p.Name, p.Device, len(tables))
		}
		f.ports[p.Index], f.tables[p.Index], f.scratch[p.Index] = p, tables[p.Device], rep.Devices[p.Device].Scratch
	}
	if len(f.ports) == 0 {
		return nil, errors.New("no port of the peer is active")
	}
	return f, nil
}
