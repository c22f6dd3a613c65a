package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"strings"
	"unicode"
)

// pass lets a decode server answer a request that has nothing to prefill, or that no
// contract knows.
func (p *Proxy) pass(w http.ResponseWriter, r *http.Request) {
	// A path that is not clean may mean another path to the engine than to us.
	clean := path.Clean(r.URL.Path)
	// Starlette's routes, for one, do not see a newline at the end.
	if clean != r.URL.Path && clean+"/" != r.URL.Path || !strings.HasPrefix(clean, "/") || strings.ContainsFunc(clean, unicode.IsControl) {
		writeError(w, http.StatusNotFound, badRequest, fmt.Sprintf("no such path: %q", r.URL.Path))
		return
	}
	var body passed
	defer body.begin.end()
	err := body.read(p, w, r)
	if err == nil {
		err = p.passOn(w, r, &body)
	}
	var unread *bodyError
	ended := r.Context().Err() != nil
	if ended && !errors.As(err, &unread) { // if a body does not come, the context ends too, but its client still listens
		unread = &bodyError{os.ErrDeadlineExceeded}
	}
	switch {
	case err == nil:
	case errors.Is(err, errReserved), errors.Is(err, errNotJSON):
		writeError(w, http.StatusBadRequest, badRequest, err.Error())
	case errors.Is(err, errCompressed):
		writeError(w, http.StatusUnsupportedMediaType, badRequest, err.Error())
	case errors.Is(err, errUploads):
		w.Header().Set("Retry-After", "1")
		writeError(w, http.StatusServiceUnavailable, unavailable, err.Error())
	case p.ctx.Err() != nil || ended && p.draining.Load():
		writeError(w, http.StatusServiceUnavailable, unavailable, shuttingDown)
	case ended || errors.As(err, &unread):
		status, kind, reason := p.unread(w, unread)
		writeError(w, status, kind, reason)
		p.linger(w, r, unread)
	case errors.Is(err, errBusy):
		w.Header().Set("Retry-After", "1")
		fallthrough
	default:
		writeError(w, http.StatusServiceUnavailable, unavailable, err.Error())
	}
}

// errBusy is a request that the router has no place or server for.
var errBusy = errors.New("not ready")

// passOn takes a place and a server, when all of the body is there that must be.
func (p *Proxy) passOn(w http.ResponseWriter, r *http.Request, body *passed) error {
	place, reason := p.begin(r, body.begin.held)
	if place == nil {
		return fmt.Errorf("%w: %s", errBusy, reason)
	}
	defer place.done()
	d, ok := p.balancer.decode.pick(p.balancer.policy, nil, nil)
	if !ok {
		return fmt.Errorf("%w: %s", errBusy, strings.Join(p.balancer.missing(), "; "))
	}
	defer d.begin(1)()
	return p.passTo(w, r, d, body)
}

// passTo is pass to one server; an error means that nothing has been answered.
func (p *Proxy) passTo(w http.ResponseWriter, r *http.Request, d target, body *passed) error {
	ctx, cancel := contextWith(r.Context(), p.ctx)
	defer cancel()
	ctx, cut := context.WithCancelCause(ctx)
	defer cut(nil)
	at := d.server.path(r.URL.EscapedPath())
	if r.URL.RawQuery != "" {
		at += "?" + r.URL.RawQuery
	}
	req, err := http.NewRequestWithContext(ctx, r.Method, at, nil)
	if err != nil {
		return err
	}
	body.begin.sendIn(req)
	if body.rest != nil {
		up := p.uploads.begin(r.Context(), io.MultiReader(req.Body, body.rest), func() {
			cut(errUploads)
			cutBody(w) // net/http waits for whoever reads the body
		})
		defer up.end()
		req.Body, req.GetBody = up, nil
	}
	req.Header = make(http.Header, len(r.Header))
	passHeader(req.Header, r.Header)
	for name := range req.Header { // these headers would tell SGLang's engines where to fetch from
		if strings.HasPrefix(name, "X-Override-") {
			delete(req.Header, name)
		}
	}
	req.ContentLength = r.ContentLength
	resp, err := p.client.Do(req)
	body.begin.letGo()
	if err != nil {
		if cause := context.Cause(ctx); errors.Is(cause, errUploads) {
			return cause
		}
		if r.Context().Err() != nil {
			return err
		}
		return d.failed(err)
	}
	a := readFirst(resp)
	defer a.close()
	if a.err != nil && a.err != io.EOF {
		return d.failed(a.brokeOff())
	}
	if a.relay(w) != nil {
		panic(http.ErrAbortHandler)
	}
	return nil
}
