// Which links a bus has: one to each address, made at the first look-up, dropped when it is unused or lost.

package natsbus

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/safe"
)

// link returns the link to a bootstrap address, and makes it if there is none.
func (b *Bus) link(ctx context.Context, addr string) (*link, error) {
	if b.ctx.Err() != nil {
		return nil, errClosed
	}
	if b.opt.ClusterURL != "" || addr == "" {
		if home := b.homeLink(); home != nil {
			return home, nil
		}
		return nil, fmt.Errorf("%w: no bootstrap address is given, and this agent has no server or cluster of its own", core.ErrUnreachable)
	}
	at, err := ParseAddress(addr)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", core.ErrUnreachable, err)
	}
	at.TLS = at.TLS || b.opt.OnlyTLS
	via := core.Via(at.String())
	var control Control
	if b.opt.Allow != nil {
		if control, err = b.opt.Allow(at.Name); err != nil {
			return nil, fmt.Errorf("bootstrap address %q: %w", addr, err)
		}
	}
	b.mu.Lock()
	e := b.links[via]
	if e == nil {
		if b.down {
			b.mu.Unlock()
			return nil, errClosed
		}
		if len(b.links) >= maxLinks {
			b.mu.Unlock()
			return nil, fmt.Errorf("%w: bootstrap address %s: this agent uses %d other bootstrap addresses, its limit", core.ErrUnreachable, via, maxLinks)
		}
		e = &entry{ready: make(chan struct{})}
		b.links[via] = e
		b.mu.Unlock()
		if !b.spawn("natsbus.connect", func() { b.connectEntry(e, via, at, control) }) {
			b.linkMade(e, via, nil, errClosed)
		}
	} else {
		b.mu.Unlock()
	}
	select {
	case <-e.ready: // as nearly always; ctx may have ended too
		return e.link, e.err
	default:
	}
	bound := time.NewTimer(b.opt.ConnectTimeout)
	defer bound.Stop()
	select {
	case <-e.ready:
		return e.link, e.err
	case <-bound.C:
		return nil, unreachable("bootstrap address "+string(via), fmt.Errorf("no connection within %v", b.opt.ConnectTimeout))
	case <-ctx.Done():
		return nil, unreachable("bootstrap address "+string(via), fmt.Errorf("still connecting: %w", ctx.Err()))
	}
}

// known returns the link of a Via that Lookup or a Handler was given.
func (b *Bus) known(via core.Via) (*link, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.down {
		return nil, errClosed
	}
	if via == "" {
		if b.home == nil {
			return nil, fmt.Errorf("%w: this agent has no server or cluster of its own", core.ErrUnreachable)
		}
		return b.home, nil
	}
	e := b.links[via]
	if e == nil || e.link == nil {
		return nil, unreachable("bootstrap address "+string(via), errors.New("not connected; look the agent up again"))
	}
	return e.link, nil
}

func (b *Bus) connectEntry(e *entry, via core.Via, at Address, control Control) {
	l, err := (*link)(nil), errors.New("a fault while connecting, see the log")
	defer func() { b.linkMade(e, via, l, err) }() // also after a panic
	l, err = b.connectPort(portLink, via, at, control)
}

func (b *Bus) connectPort(kind linkKind, via core.Via, at Address, control Control) (*link, error) {
	var secure *tls.Config
	if at.TLS {
		if secure = b.opt.TLS; secure == nil {
			secure = &tls.Config{}
		}
	}
	in := &clientHandshake{self: b.opt.Identity, secrets: secrets{b.opt.Token, b.opt.JoinToken, b.opt.Seed}, right: rightAsk, temp: b.temp}
	if kind == joinLink {
		in.right = rightJoin
	}
	return connect(&b.common, endpoint{kind, via, "bootstrap address " + at.String(), "nats://" + at.Host, dialUpgrade(at, secure, control, in), in})
}

// oldestLink is the oldest connected link to the server that a link leads to. An address may
// have several spellings; a peer that is reached over two addresses would know this agent twice.
func (b *Bus) oldestLink(l *link) *link {
	if l.handshake == nil {
		return l
	}
	server := l.handshake.server()
	for _, other := range b.allLinks() {
		if other.kind != portLink || other.handshake.server() != server || !other.made.Before(l.made) {
			continue
		}
		if _, ok := other.current(); ok {
			l = other
		}
	}
	return l
}

// linkMade ends the making of a link.
func (b *Bus) linkMade(e *entry, via core.Via, l *link, err error) {
	b.mu.Lock()
	if err == nil {
		select {
		case <-l.gone: // it ended before it was in the map
			err = unreachable(l.name, l.why())
		default:
		}
	}
	down := b.down
	if err == nil && down {
		err = errClosed
	}
	if err != nil && b.links[via] == e {
		delete(b.links, via)
	}
	if e.err = err; err == nil {
		e.link = l
	}
	b.mu.Unlock()
	close(e.ready)
	if down && l != nil {
		l.close()
	}
}

// linkReconnected is called when a link is back: what this agent holds at home is renewed at once.
func (b *Bus) linkReconnected(l *link) {
	if l.via == "" {
		b.renewNow()
	}
}

// linkUnused drops a link.
func (b *Bus) linkUnused(l *link) {
	if b.forget(l) {
		b.log.Sugar().Debugf("natsbus: dropped %s: not connected and not used for %v", l.name, b.opt.linkIdle)
		b.spawn("natsbus.drop", l.close)
	}
}

func (b *Bus) forget(l *link) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.links[l.via]
	if e == nil || e.link != l || b.down {
		return false
	}
	delete(b.links, l.via)
	return true
}

// linkLost is called when a connection has ended for good, though this agent did not
// close it. The next Lookup makes a new link; linkLost itself opens home again.
func (b *Bus) linkLost(l *link) {
	b.log.Sugar().Warnf("natsbus: the connection to %s was ended: %v", l.name, l.why())
	if l.via != "" {
		b.forget(l)
		return
	}
	b.spawn("natsbus.reopen", func() {
		for b.ctx.Err() == nil {
			home, err := b.openHome()
			if err == nil {
				b.mu.Lock()
				down := b.down
				if !down {
					b.home = home
				}
				b.mu.Unlock()
				if down {
					home.close()
				} else if _, ok := home.current(); ok {
					b.renewNow()
				}
				return
			}
			b.log.Sugar().Debugf("natsbus: %v", err)
			select {
			case <-b.ctx.Done():
			case <-time.After(reconnectWait):
			}
		}
	})
}

func (b *Bus) allLinks() []*link {
	b.mu.Lock()
	defer b.mu.Unlock()
	var links []*link
	for _, e := range b.links {
		if e.link != nil {
			links = append(links, e.link)
		}
	}
	if b.home != nil {
		links = append(links, b.home)
	}
	return links
}

// all calls f for all links at once.
func all(links []*link, f func(*link)) {
	var wg sync.WaitGroup
	for _, l := range links {
		wg.Add(1)
		safe.Go("natsbus.Close", func() {
			defer wg.Done()
			f(l)
		})
	}
	wg.Wait()
}
