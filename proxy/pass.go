package proxy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"strings"
)

// pass lets a decode server answer a request that has nothing to prefill, or that no
// contract knows.
func (p *Proxy) pass(w http.ResponseWriter, r *http.Request) {
	// A path that is not clean may mean another path to the engine than to us.
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
	var unread *bodyError
	ended := r.Context().Err() != nil
	if ended && !errors.As(err, &unread) { // if a body does not come, the context ends too, but its client still listens
		unread = &bodyError{os.ErrDeadlineExceeded}
	}
	switch {
	case err == nil:
	case errors.Is(err, errReserved), errors.Is(err, errNotJSON):
		writeError(w, http.StatusBadRequest, badRequest, err.Error())
	case p.ctx.Err() != nil || ended && p.draining.Load():
		writeError(w, http.StatusServiceUnavailable, unavailable, shuttingDown)
	case ended || errors.As(err, &unread):
		status, reason := p.unread(w, unread)
		writeError(w, status, badRequest, reason)
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
	held := p.bodies.begin()
	defer held.end()
	body, err := p.passBody(w, r, held)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, r.Method, at, body)
	if err != nil {
		return err
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
	if err != nil {
		return err
	}
	a := readFirst(resp)
	defer a.close()
	if a.err != nil && a.err != io.EOF {
		return a.brokeOff()
	}
	if a.relay(w) != nil {
		panic(http.ErrAbortHandler)
	}
	return nil
}

// errReserved is a request that would choose the address that D connects to.
var errReserved = errors.New("is for the router to set, and only of completions")

// mayBeJSON: some engine may take a text for JSON, whatever type it is said to have. JSON
// comes in other encodings too, and Python reads some that Go does not.
func mayBeJSON(text []byte) bool {
	text = bytes.TrimLeft(text, " \t\r\n")
	if len(text) == 0 {
		return false
	}
	return text[0] == '{' || text[0] == '[' || text[0] >= 0x80 || bytes.IndexByte(text[:min(len(text), 4)], 0) >= 0
}

// passBody is the client's body, or nil if it has none. If an engine may take it for JSON,
// it is first searched, at every depth, for parameters that only we may set.
func (p *Proxy) passBody(w http.ResponseWriter, r *http.Request, held *heldBody) (io.Reader, error) {
	if r.ContentLength == 0 {
		return nil, nil
	}
	body := p.bodyOf(w, r)
	kind := strings.ToLower(r.Header.Get("Content-Type"))
	if strings.HasPrefix(kind, "multipart/") || kind == "application/octet-stream" {
		return body, nil
	}
	text, err := io.ReadAll(held.count(body))
	if err != nil {
		return nil, err
	}
	if kind != "" && !strings.Contains(kind, "json") && !mayBeJSON(text) {
		return bytes.NewReader(text), nil
	}
	name, err := memberAmong(text, p.cfg.Contract.reserved())
	switch {
	case err != nil && len(text) > 0: // engines take some text for JSON that is not JSON
		return nil, fmt.Errorf("%w; if it is something else, its Content-Type must say so", err)
	case name != "":
		return nil, fmt.Errorf("%s %w", name, errReserved)
	}
	return bytes.NewReader(text), nil
}
