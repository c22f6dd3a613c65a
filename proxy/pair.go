package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"go.uber.org/zap"
)

// prefillTail is how long P may go on after D has answered all: P's own answer
// is due at any moment, and cutting it off would make P abort for nothing.
const prefillTail = 10 * time.Second

// request is one completion on its way to a prefill and a decode server.
type request struct {
	endpoint    string
	id          string
	transferID  string
	header      http.Header // the client's
	rank        prefillRank
	decode      *server
	prefillBody []byte
	decodeBody  []byte
}

// serve sends the request to both servers at once and answers what D answers.
// The caller holds a place among the requests in flight, which done gives back
// when both halves have ended.
func (p *Proxy) serve(w http.ResponseWriter, client context.Context, r *request, done func()) {
	dctx, cancelD := context.WithCancel(client)
	defer cancelD()
	stopD := context.AfterFunc(p.ctx, cancelD)
	defer stopD()

	// P's half ends with this function, and so with the client, whose leaving
	// ends D's half; only after a whole answer it may outlive it by prefillTail.
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

	prefilled := make(chan error, 1)
	p.wg.Go(func() {
		defer done()
		defer cancelP()
		err := p.prefill(pctx, r)
		if err != nil && pctx.Err() == nil {
			p.log.Warn("prefill failed", r.fields(r.rank.server, err)...)
		}
		prefilled <- err
	})
	decoded := make(chan decodeResult, 1)
	go func() { decoded <- p.decode(dctx, r) }()

	var d decodeResult
	select {
	case d = <-decoded:
	case err := <-prefilled:
		if err == nil {
			d = <-decoded
			break
		}
		// D would wait for ever for what P does not send, unless it needed
		// nothing of P and answers already.
		select {
		case d = <-decoded:
		default:
			cancelD()
			d = <-decoded
			d.close()
			d = decodeResult{err: errCancelled}
		}
		if d.err != nil || d.resp.StatusCode >= 400 {
			d.close()
			p.failPrefill(w, client, r, err)
			return
		}
	}
	defer d.close()
	if d.err != nil {
		cancelP()
		if p.ending(client) {
			writeError(w, http.StatusServiceUnavailable, unavailable, shuttingDown)
			return
		}
		p.log.Warn("decode failed", r.fields(r.decode, d.err)...)
		writeError(w, http.StatusBadGateway, upstream, fmt.Sprintf("decode server %s: %v", r.decode.url, d.err))
		return
	}
	if d.resp.StatusCode >= 400 {
		cancelP() // nobody will fetch what it computes
	}
	if d.resp.Header.Get("X-Request-Id") == "" {
		w.Header().Set("X-Request-Id", r.id)
	}
	if err := d.relay(w); err != nil {
		cancelD()
		if client.Err() == nil {
			p.log.Warn("decode answer broke off", r.fields(r.decode, err)...)
		}
		// Closes the connection, so that the client sees that this is not all.
		panic(http.ErrAbortHandler)
	}
	letPrefillEnd = d.resp.StatusCode < 400
}

var errCancelled = errors.New("cancelled since the prefill failed")

// failPrefill answers for a P that failed: its own answer if the request was
// at fault, for the client can mend that, and else a 502.
func (p *Proxy) failPrefill(w http.ResponseWriter, client context.Context, r *request, err error) {
	w.Header().Set("X-Request-Id", r.id)
	var answered *statusError
	switch {
	case errors.As(err, &answered) && answered.clientsFault():
		writeBody(w, answered.status, answered.contentType, answered.body)
	case p.ending(client):
		writeError(w, http.StatusServiceUnavailable, unavailable, shuttingDown)
	default:
		writeError(w, http.StatusBadGateway, upstream, fmt.Sprintf("prefill server %s: %v", r.rank.server.url, err))
	}
}

const shuttingDown = "the router is shutting down"

// ending reports whether the router has itself cut the request off. A client's
// context ends too when the client goes, but then nobody reads the answer.
func (p *Proxy) ending(client context.Context) bool {
	return p.ctx.Err() != nil || client.Err() != nil
}

// decodeResult is D's answer once it has begun, or why there is none.
type decodeResult struct {
	answer
	err error
}

func (d decodeResult) close() {
	if d.resp != nil {
		_ = d.resp.Body.Close()
	}
}

// decode sends the request to D and waits until D begins to answer.
func (p *Proxy) decode(ctx context.Context, r *request) decodeResult {
	req, err := p.newRequest(ctx, r, r.decode, r.decodeBody)
	if err != nil {
		return decodeResult{err: err}
	}
	resp, err := p.client.Do(req)
	if err != nil {
		if ctx.Err() == nil {
			p.noteDown(r.decode, err)
		}
		return decodeResult{err: err}
	}
	a := readFirst(resp)
	if len(a.first) == 0 && a.err != nil && a.err != io.EOF {
		return decodeResult{answer: a, err: fmt.Errorf("no answer after the headers: %w", a.err)}
	}
	return decodeResult{answer: a}
}

func (r *request) fields(s *server, err error) []zap.Field {
	return []zap.Field{zap.String("url", s.url), zap.String("request_id", r.id),
		zap.String("transfer_id", r.transferID), zap.Error(err)}
}
