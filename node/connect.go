// Two agents that have met connect by every transport that both have.

package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/local"
	"github.com/kvconn/kvconn/wire"
)

// admit lets a decode agent connect by the transports that both agents have. If there
// is none, the error says why.
func (t *transports) admit(peer core.AgentID, h *wire.Agent) (tickets []wire.Ticket, err error) {
	var errs []error
	for _, w := range t.list {
		i := slices.IndexFunc(h.Endpoints, func(e wire.Endpoint) bool { return e.Transport == w.Name() })
		if i < 0 {
			continue
		}
		admit := w.Admit
		if s, ok := w.(encrypting); ok {
			seals, err := t.cfg.encrypts(h.Endpoints[i], "prefill", t.cfg.EngineID, "decode", h.EngineID)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			if seals {
				admit = s.AdmitSealed
			}
		}
		ticket, err := admit(peer)
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

// common returns the transports that this agent and a prefill agent both have, with addresses that are
// checked. absent says for each of this agent's other transports why the prefill agent lacks it.
func (t *transports) common(ctx context.Context, info *wire.Agent, bootstrap string) (list []commonTransport, absent map[string]error, err error) {
	absent = map[string]error{}
	var refused error
	for _, w := range t.list {
		i := slices.IndexFunc(info.Endpoints, func(e wire.Endpoint) bool { return e.Transport == w.Name() })
		if i < 0 {
			why := fmt.Sprintf("prefill agent %s of engine %q has none", info.ID, info.EngineID)
			for _, l := range info.Lacks {
				if l.Transport == w.Name() {
					why += ": " + shorten(l.Reason)
				}
			}
			absent[w.Name()] = core.Lacking.Mark(errors.New(why))
			if w.Name() == viaLocal && !t.sameHost(info) {
				absent[viaLocal] = fmt.Errorf("%w, or of a version that does not tell its host: %s", core.ErrElsewhere, why)
			}
			continue
		}
		endpoint := info.Endpoints[i].Address
		seals := false
		if _, ok := w.(encrypting); ok {
			if seals, refused = t.cfg.encrypts(info.Endpoints[i], "decode", t.cfg.EngineID, "prefill", info.EngineID); refused != nil {
				absent[w.Name()] = core.NotPermitted.Mark(refused)
				continue
			}
		}
		// Only a Settler itself knows what its address means. Nobody dials such an address in a network.
		if _, settles := w.(core.Settler); !settles {
			if endpoint, err = fullEndpoint(info, info.Endpoints[i], bootstrap); err != nil {
				return nil, nil, &refusedError{err.Error()}
			}
			if err := t.allow.checkEndpoint(ctx, endpoint); err != nil {
				return nil, nil, err
			}
		}
		list = append(list, commonTransport{via: w, endpoint: endpoint, encrypted: seals})
	}
	if len(list) == 0 && refused != nil {
		return nil, nil, &refusedError{refused.Error()}
	}
	if len(list) == 0 {
		return nil, nil, &refusedError{fmt.Sprintf("no transport in common: decode engine %q has %s, prefill agent %s of engine %q has %s",
			t.cfg.EngineID, t.have(nil), info.ID, info.EngineID, t.have(info))}
	}
	return list, absent, nil
}

// sameHost says whether a prefill agent claims to be on this host. The claim is not proved, so it decides one thing alone:
// whether it is a fallback to go without local if the prefill agent lacks it.
func (t *transports) sameHost(info *wire.Agent) bool {
	return info.Host != "" && info.Host == local.Host()
}

// fullEndpoint is the address at which to dial a transport. If the transport's own address names no
// host, fullEndpoint takes the host of the bootstrap address, since that host is known to be reachable.
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

// connect makes the common transports usable with the tickets of a hello's answer. It
// returns at once.
func (t *transports) connect(peer core.AgentID, engine string, common []commonTransport, absent map[string]error, rep *wire.Reply) error {
	var errs []error
	connected := map[string]bool{}
	t.mu.Lock()
	clear(t.pair(peer).down) // before Connect: from then on the transports may report new breaks
	t.mu.Unlock()
	for _, w := range common {
		name := w.via.Name()
		ticket := ticketOf(rep, name)
		err := error(nil)
		if len(ticket) == 0 && !fault.On("node-no-ticket") {
			err = core.Lacking.Mark(fmt.Errorf("prefill agent %s of engine %q gives no ticket for %s", peer, engine, name))
		} else {
			err = w.via.Connect(peer, w.endpoint, ticket)
		}
		if err != nil {
			absent[name] = err
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

// settle waits until a pair that has just been connected can move bytes. It waits
// once for the better transports, which connect at the same time, and until ctx ends for the last one.
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
			passed = append(passed, passedOver{w.Name(), p.lacks(w.Name())})
		}
	}
	t.mu.Unlock()
	first, cancel := context.WithTimeout(ctx, min(t.firstWait, t.cfg.helloBound()))
	defer cancel()
	for i, w := range list {
		err := error(nil)
		switch s, settles := w.(core.Settler); {
		case !settles:
		case i == len(list)-1:
			err = s.Usable(ctx, peer)
		case again:
			err = usableNow(w, peer)
		default:
			err = s.Usable(first, peer)
		}
		if err == nil {
			t.chosen(peer, core.SideLoad, w.Name(), passed, false)
			return nil
		}
		passed = append(passed, passedOver{w.Name(), err})
	}
	return t.noTransport(peer, passed)
}
