package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// admit lets a decode agent connect by the transports that both agents have. If there
// is none, the error says why.
func (t *transports) admit(peer core.AgentID, h *wire.Agent) (tickets []wire.Ticket, err error) {
	var errs []error
	for _, w := range t.list {
		if !slices.ContainsFunc(h.Endpoints, func(e wire.Endpoint) bool { return e.Transport == w.Name() }) {
			continue
		}
		ticket, err := w.Admit(peer)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		tickets = append(tickets, wire.Ticket{Transport: w.Name(), Ticket: ticket})
	}
	switch {
	case len(tickets) == 0 && len(errs) > 0:
		return nil, errors.Join(errs...)
	case len(tickets) == 0:
		return nil, fmt.Errorf("no transport in common: prefill engine %q has %s, decode engine %q has %s", t.cfg.EngineID, t.have(nil), h.EngineID, t.have(h))
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pair(peer).engine = h.EngineID
	return tickets, nil
}

// ways are the transports that a prefill agent has too, with their addresses
// checked, and why it lacks the others.
func (t *transports) ways(ctx context.Context, info *wire.Agent, bootstrap string) (list []way, absent map[string]string, err error) {
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
		// Only the Signaller knows what its address means; this agent does not dial it.
		if _, signals := w.(core.Signaller); !signals {
			if endpoint, err = fullEndpoint(info, info.Endpoints[i], bootstrap); err != nil {
				return nil, nil, &refusedError{err.Error()}
			}
			if err := t.allow.checkEndpoint(ctx, endpoint); err != nil {
				return nil, nil, err
			}
		}
		list = append(list, way{via: w, endpoint: endpoint})
	}
	if len(list) == 0 {
		return nil, nil, &refusedError{fmt.Sprintf("no transport in common: decode engine %q has %s, prefill agent %s of engine %q has %s",
			t.cfg.EngineID, t.have(nil), info.ID, info.EngineID, t.have(info))}
	}
	return list, absent, nil
}

// fullEndpoint is a transport's address as it is dialled. If the address names no host, the
// host of the bootstrap address counts, since that host is known to be reachable.
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

// connect makes the ways usable with the tickets of a hello's answer. It
// returns at once.
func (t *transports) connect(peer core.AgentID, engine string, ways []way, absent map[string]string, rep *wire.Reply) error {
	var errs []error
	connected := map[string]bool{}
	t.mu.Lock()
	clear(t.pair(peer).down) // before the transports report breaks
	t.mu.Unlock()
	for _, w := range ways {
		name := w.via.Name()
		ticket := ticketOf(rep, name)
		err := error(nil)
		if len(ticket) == 0 {
			err = fmt.Errorf("prefill agent %s of engine %q gives no ticket for %s", peer, engine, name)
		} else {
			err = w.via.Connect(peer, w.endpoint, ticket)
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

// ticketOf finds a transport's ticket.
func ticketOf(rep *wire.Reply, transport string) []byte {
	for _, t := range rep.Tickets {
		if t.Transport == transport {
			return t.Ticket
		}
	}
	return nil
}

// firstWait is how long a pair that has just met waits at most for its preferred
// transport while there is another.
const firstWait = 2 * time.Second

// settle waits until a pair that has just been connected can move bytes. It waits
// once for the preferred transport, and until ctx ends for the last one.
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
			first, cancel := context.WithTimeout(ctx, min(firstWait, t.cfg.helloBound()))
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
