package proxy

import (
	"context"
	"fmt"
	"sync/atomic"
)

// place is one among the requests in flight. It is free again when every part of its
// request is done.
type place struct {
	p     *Proxy
	parts atomic.Int32
}

// begin takes a place, or gives the reason why there is none.
func (p *Proxy) begin() (_ *place, reason string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, shuttingDown
	}
	select {
	case p.places <- struct{}{}:
	default:
		return nil, fmt.Sprintf("%d requests are in flight, the limit: try again later", cap(p.places))
	}
	p.wg.Add(1)
	pl := &place{p: p}
	pl.parts.Store(1)
	return pl, ""
}

// add counts a further part of the request, while another part holds the place.
func (l *place) add() { l.parts.Add(1) }

func (l *place) done() {
	if l.parts.Add(-1) == 0 {
		<-l.p.places
		l.p.wg.Done()
	}
}

// contextWith is a context that ends with either of two.
func contextWith(a, b context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(a)
	stop := context.AfterFunc(b, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}
