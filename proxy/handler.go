package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"
)

// Bounds of the client's side and of small questions to a server.
const (
	bodyTimeout   = time.Minute
	modelsTimeout = 10 * time.Second
)

// Handler serves /v1/completions, /v1/chat/completions, /v1/models and /health.
func (p *Proxy) Handler() http.Handler {
	mux := http.NewServeMux()
	for _, endpoint := range []string{"/v1/completions", "/v1/chat/completions"} {
		mux.Handle(endpoint, only(http.MethodPost, func(w http.ResponseWriter, r *http.Request) {
			p.complete(w, r, endpoint)
		}))
	}
	mux.Handle("/v1/models", only(http.MethodGet, p.models))
	mux.Handle("/health", only(http.MethodGet, p.health))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, http.StatusNotFound, badRequest, "no such path: "+r.URL.Path)
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		boundWrite(w) // of what is left from the connection's last request
		mux.ServeHTTP(w, r)
	})
}

func only(method string, h http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != method && (method != http.MethodGet || r.Method != http.MethodHead) {
			w.Header().Set("Allow", method)
			writeError(w, http.StatusMethodNotAllowed, badRequest, fmt.Sprintf("%s takes %s, not %s", r.URL.Path, method, r.Method))
			return
		}
		h(w, r)
	})
}

// complete reads a request and sends it on its way.
func (p *Proxy) complete(w http.ResponseWriter, r *http.Request, endpoint string) {
	done, reason := p.begin()
	if done == nil {
		w.Header().Set("Retry-After", "1")
		writeError(w, http.StatusServiceUnavailable, unavailable, reason)
		return
	}
	req, ok := p.read(w, r, endpoint)
	if !ok {
		done()
		return
	}
	p.serve(w, r.Context(), req, done)
}

// read makes both halves of a request, or answers why it cannot.
func (p *Proxy) read(w http.ResponseWriter, r *http.Request, endpoint string) (*request, bool) {
	f, ok := p.readBody(w, r)
	if !ok {
		return nil, false
	}
	// After the body, which may take its time: an engine id can become stale.
	rank, decode, ok := p.balancer.pick()
	if ok && p.askAgain(r.Context(), rank.server) {
		rank, decode, ok = p.balancer.pick()
	}
	if !ok {
		p.notReady(w)
		return nil, false
	}
	req := &request{
		endpoint:   endpoint,
		id:         r.Header.Get("X-Request-Id"),
		transferID: "xfer-" + newUUID(), // never from the client's id, which may come twice
		header:     r.Header,
		rank:       rank,
		decode:     decode,
	}
	if req.id == "" {
		req.id = newUUID()
	}
	var errP, errD error
	req.prefillBody, errP = prefillBody(f, req.transferID)
	req.decodeBody, errD = decodeBody(f, rank, req.transferID)
	if err := errors.Join(errP, errD); err != nil {
		writeError(w, http.StatusInternalServerError, upstream, "the request cannot be written again: "+err.Error())
		return nil, false
	}
	return req, true
}

func (p *Proxy) readBody(w http.ResponseWriter, r *http.Request) (fields, bool) {
	c := http.NewResponseController(w)
	_ = c.SetReadDeadline(time.Now().Add(bodyTimeout))
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, p.cfg.MaxBody))
	// net/http now reads on to see the client go; that read must not time out.
	_ = c.SetReadDeadline(time.Time{})
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		writeError(w, http.StatusRequestEntityTooLarge, badRequest, fmt.Sprintf("the body is larger than %d bytes", tooLarge.Limit))
		return nil, false
	case errors.Is(err, os.ErrDeadlineExceeded):
		w.Header().Set("Connection", "close")
		writeError(w, http.StatusRequestTimeout, badRequest, fmt.Sprintf("the body did not arrive within %v", bodyTimeout))
		return nil, false
	case err != nil:
		writeError(w, http.StatusBadRequest, badRequest, "the body cannot be read: "+err.Error())
		return nil, false
	}
	f, err := parseFields(body)
	if err != nil {
		writeError(w, http.StatusBadRequest, badRequest, err.Error())
		return nil, false
	}
	return f, true
}

// models asks a decode server, for those answer the clients.
func (p *Proxy) models(w http.ResponseWriter, r *http.Request) {
	s, ok := p.balancer.pickDecode()
	if !ok {
		p.notReady(w)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), modelsTimeout)
	defer cancel()
	defer context.AfterFunc(p.ctx, cancel)()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.path("/v1/models"), nil)
	if err == nil {
		if v, ok := r.Header["Authorization"]; ok {
			req.Header["Authorization"] = v
		}
		var resp *http.Response
		if resp, err = p.client.Do(req); err == nil {
			defer resp.Body.Close()
			if readFirst(resp).relay(w) != nil {
				panic(http.ErrAbortHandler)
			}
			return
		}
	}
	if p.ending(r.Context()) {
		writeError(w, http.StatusServiceUnavailable, unavailable, shuttingDown)
		return
	}
	writeError(w, http.StatusBadGateway, upstream, fmt.Sprintf("decode server %s: %v", s.url, err))
}

func (p *Proxy) notReady(w http.ResponseWriter) {
	w.Header().Set("Retry-After", "1")
	writeError(w, http.StatusServiceUnavailable, unavailable, "not ready: "+strings.Join(p.balancer.missing(), "; "))
}

// health is 200 once every server has been up.
func (p *Proxy) health(w http.ResponseWriter, _ *http.Request) {
	if missing := p.balancer.missing(); len(missing) > 0 {
		writeJSON(w, http.StatusServiceUnavailable, map[string]any{"status": "starting", "missing": missing})
		return
	}
	writeJSON(w, http.StatusOK, map[string]any{"status": "ok"})
}
