package proxy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"strings"
)

// pass lets a decode server answer a request that has nothing to prefill, or
// that the contracts do not know.
func (p *Proxy) pass(w http.ResponseWriter, r *http.Request) {
	// A path that is not clean may mean another one to the engine than to us.
	clean := path.Clean(r.URL.Path)
	if clean != r.URL.Path && clean+"/" != r.URL.Path || !strings.HasPrefix(clean, "/") {
		writeError(w, http.StatusNotFound, badRequest, "no such path: "+r.URL.Path)
		return
	}
	place, reason := p.begin()
	if place == nil {
		w.Header().Set("Retry-After", "1")
		writeError(w, http.StatusServiceUnavailable, unavailable, reason)
		return
	}
	defer place.done()
	d, ok := p.balancer.decode.pick(p.balancer.policy, nil, nil)
	if !ok {
		w.Header().Set("Retry-After", "1")
		writeError(w, http.StatusServiceUnavailable, unavailable, "not ready: "+strings.Join(p.balancer.missing(), "; "))
		return
	}
	defer d.begin(1)()
	err := p.passTo(w, r, d)
	var tooLarge *http.MaxBytesError
	var unread *bodyError
	switch {
	case err == nil:
	case errors.As(err, &tooLarge):
		writeError(w, http.StatusRequestEntityTooLarge, badRequest, fmt.Sprintf("the body is larger than %d bytes", tooLarge.Limit))
	case errors.As(err, &unread) && !p.ending(r.Context()):
		writeError(w, http.StatusBadRequest, badRequest, unread.Error())
	case errors.Is(err, errReserved):
		writeError(w, http.StatusBadRequest, badRequest, err.Error())
	case p.ending(r.Context()):
		writeError(w, http.StatusServiceUnavailable, unavailable, shuttingDown)
	default:
		writeError(w, http.StatusServiceUnavailable, unavailable, d.failed(err).Error())
	}
}

// passTo is pass to one server; an error means that nothing has been answered.
func (p *Proxy) passTo(w http.ResponseWriter, r *http.Request, d target) error {
	ctx, cancel := contextWith(r.Context(), p.ctx)
	defer cancel()
	at := d.server.path(r.URL.EscapedPath())
	if r.URL.RawQuery != "" {
		at += "?" + r.URL.RawQuery
	}
	body, err := p.passBody(w, r)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, r.Method, at, body)
	if err != nil {
		return err
	}
	req.Header = r.Header.Clone()
	for _, name := range append(r.Header["Connection"], hopByHop...) {
		req.Header.Del(name)
	}
	req.ContentLength = r.ContentLength
	resp, err := p.client.Do(req)
	if err != nil {
		return err
	}
	a := readFirst(resp)
	defer a.close()
	if len(a.first) == 0 && a.err != io.EOF {
		return fmt.Errorf("no answer after the headers: %w", a.err)
	}
	if a.relay(w) != nil {
		panic(http.ErrAbortHandler)
	}
	return nil
}

// errReserved is a request that would choose the address that D connects to.
var errReserved = errors.New("is for the router to set, and only of completions")

// bodyError is a body that the client did not send whole.
type bodyError struct{ err error }

func (e *bodyError) Error() string { return "the body cannot be read: " + e.err.Error() }

func (e *bodyError) Unwrap() error { return e.err }

// bodyReader marks the errors of a client's body, which are not the engine's.
type bodyReader struct{ io.Reader }

func (b bodyReader) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if err != nil && err != io.EOF {
		err = &bodyError{err}
	}
	return n, err
}

// passBody is the client's body, or nil if it has none. What may be JSON is read
// first, to look for parameters that only we may set.
func (p *Proxy) passBody(w http.ResponseWriter, r *http.Request) (io.Reader, error) {
	if r.ContentLength == 0 {
		return nil, nil
	}
	body := bodyReader{http.MaxBytesReader(w, r.Body, p.cfg.MaxBody)}
	if kind := r.Header.Get("Content-Type"); kind != "" && !strings.Contains(strings.ToLower(kind), "json") {
		return body, nil
	}
	text, err := io.ReadAll(body)
	if err != nil {
		return nil, err
	}
	if f, err := parseFields(text); err == nil {
		for _, name := range p.cfg.Contract.reserved() {
			if f.last(name) != nil {
				return nil, fmt.Errorf("%s %w", name, errReserved)
			}
		}
	}
	return bytes.NewReader(text), nil
}
