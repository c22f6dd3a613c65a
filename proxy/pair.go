// One attempt: P and D get the request at once or in turn, as the contract has it, and the client gets D's answer.

package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// prefillTail is how long P may go on after D's whole answer. P's own answer is due at any
// moment: to cut it off would make P abort for nothing.
const prefillTail = 10 * time.Second

// try makes an attempt and returns nil if the client has its answer, or has gone while the
// answer came.
func (p *Proxy) try(w http.ResponseWriter, client context.Context, a *attempt) *failure {
	dctx, cancelD := context.WithCancelCause(client)
	defer cancelD(nil)
	defer context.AfterFunc(p.ctx, func() { cancelD(errShutdown) })()
	if p.cfg.Contract == NIXL || a.alone() {
		return p.tryInTurn(w, dctx, a)
	}
	return p.tryAtOnce(w, dctx, cancelD, a)
}

// The first event: D's first bytes of an answer, or P's failure.
const (
	neither = iota
	decodeBegan
	prefillFailed
)

// tryAtOnce sends the request to both servers at the same time.
func (p *Proxy) tryAtOnce(w http.ResponseWriter, dctx context.Context, cancelD context.CancelCauseFunc, a *attempt) *failure {
	// P's half ends with this function, and so with the client. Only after a whole answer
	// may it outlive the function, by prefillTail.
	pctx, cancelP := context.WithCancel(p.ctx)
	letPrefillEnd := false
	defer func() {
		if !letPrefillEnd {
			cancelP()
			return
		}
		timer := time.AfterFunc(prefillTail, cancelP)
		context.AfterFunc(pctx, func() { timer.Stop() })
	}()

	var first atomic.Int32
	var failed *failure // written before first becomes prefillFailed
	a.place.add()
	a.toPrefill.send(p.cfg.Contract.prefillBody(a), a.held)
	p.wg.Go(func() {
		defer a.place.done()
		defer cancelP()
		_, f := p.prefill(pctx, a)
		if f == nil && p.cfg.Contract != SGLang && a.refusal.Load() == nil { // SGLang's prefill answers when the cache has been carried
			p.observeHandOver(a.handOver.prefilled(time.Since(a.began)))
		}
		if a.prompt != nil {
			close(a.prompt.done)
		}
		if f == nil || pctx.Err() != nil {
			return
		}
		failed = f
		if first.CompareAndSwap(neither, prefillFailed) {
			cancelD(errPrefill) // D would wait for bytes that P does not send
		} else {
			p.log.Warn("prefill failed after the decode server had begun", a.logFields(zap.Error(f))...)
		}
	})
	d, f := p.decode(dctx, a, nil)
	if !first.CompareAndSwap(neither, decodeBegan) {
		d.close()
		return failed
	}
	if f != nil {
		return a.refused(f)
	}
	p.relay(w, dctx, a, d)
	letPrefillEnd = true
	return nil
}

// tryInTurn sends the request to P, if there is one, and with P's parameters to D.
func (p *Proxy) tryInTurn(w http.ResponseWriter, ctx context.Context, a *attempt) *failure {
	var params json.RawMessage
	if !a.alone() {
		var f *failure
		a.toPrefill.send(p.cfg.Contract.prefillBody(a), a.held)
		if params, f = p.prefill(ctx, a); f != nil {
			return f
		}
		if params != nil && a.refusal.Load() == nil { // else D computes the prompt
			p.observeHandOver(a.handOver.prefilled(time.Since(a.began)))
		}
		a.held.add(int64(len(params)))
	}
	d, f := p.decode(ctx, a, params)
	if f != nil {
		return a.refused(f)
	}
	p.relay(w, ctx, a, d)
	return nil
}

// relay gives the client D's whole answer before it returns.
func (p *Proxy) relay(w http.ResponseWriter, ctx context.Context, a *attempt, d answer) {
	defer d.close()
	if a.alone() { // else P's answer says how long the prompt is, where that matters
		d.usage = &usage{events: d.streams()}
	}
	defer func() { p.decodeServed(a, d.usage) }()
	a.letGo() // D has begun, so that nobody is asked anew
	a.toPrefill.letGo()
	p.metrics.firstByte.Observe(time.Since(a.began).Seconds())
	if d.streams() && !a.alone() { // else D's first byte comes with its last token
		p.observeHandOver(a.handOver.streams(time.Since(a.began)))
	}
	a.outcome = strconv.Itoa(d.resp.StatusCode)
	d.resp.Header.Set("X-Request-Id", a.id)
	var err error
	if a.prompt != nil {
		err = d.relayMerged(w, ctx, a.prompt)
	} else {
		err = d.relay(w)
	}
	if err == nil {
		return
	}
	a.outcome = clientGone
	if ctx.Err() == nil || p.ctx.Err() != nil || p.draining.Load() { // the engine broke it off, or the router at its own end
		a.outcome, a.err = brokenOff, err
		p.log.Warn("the answer broke off", a.logFields(zap.Error(err))...)
	}
	// This closes the connection, so that the client sees that the answer is not whole.
	panic(http.ErrAbortHandler)
}

var (
	errPrefill  = errors.New("cancelled since the prefill failed")
	errShutdown = errors.New(shuttingDown)
)

const shuttingDown = "the router is shutting down"

// ending reports whether the router itself has cut the request off. If the client goes,
// its context ends too, but then nobody reads the answer.
func (p *Proxy) ending(client context.Context) bool {
	return p.ctx.Err() != nil || client.Err() != nil
}
