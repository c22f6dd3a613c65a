package proxy

import (
	"context"
	"net/http"
	"sync/atomic"
)

// place is a request's place among the requests in flight. It is free again when every part of the
// request is done.
type place struct {
	p       *Proxy
	counted *heldBody
	parts   atomic.Int32
}

// begin takes a place for a request. If there is none, it returns the reason. The request's body may be counted already.
func (p *Proxy) begin(r *http.Request, body *heldBody) (_ *place, reason string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, shuttingDown
	}
	counted, err := p.bodies.admit(r, body, len(p.places), cap(p.places))
	if err != nil {
		return nil, err.Error()
	}
	p.places <- struct{}{} // there is room: all that take one hold mu
	p.wg.Add(1)
	pl := &place{p: p, counted: counted}
	pl.parts.Store(1)
	return pl, ""
}

// add counts a further part of the request, while another part holds the place.
func (l *place) add() { l.parts.Add(1) }

func (l *place) done() {
	if l.parts.Add(-1) == 0 {
		l.counted.leave()
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
