// The router as its clients see it: completions are read and routed, health and metrics answered, all else passed on.

package proxy

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"

	"github.com/kvconn/kvconn/internal/httpserve"
)

// Outcomes of a request beside HTTP statuses.
const (
	clientGone = "client_gone"
	brokenOff  = "broken_off"
)

// maxHeaderFields bounds what the header of a request under way takes: a field takes some hundred bytes beside its text,
// which may have four.
const maxHeaderFields = 200

func countFields(h http.Header) (n int) {
	for _, values := range h {
		n += len(values)
	}
	return n
}

// Handler serves completions by a prefill and a decode server: /v1/completions,
// /v1/chat/completions and, by the SGLang contract, /generate. It serves /health and
// /metrics itself, and all else by a decode server.
func (p *Proxy) Handler() http.Handler {
	completions := p.cfg.Contract.endpoints()
	metrics := promhttp.HandlerFor(p.metrics.registry, promhttp.HandlerOpts{})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		boundWrite(w) // replaces the bound that the last request left on the connection
		if n := countFields(r.Header); n > maxHeaderFields {
			w.Header().Set("Connection", "close")
			writeError(w, http.StatusRequestHeaderFieldsTooLarge, badRequest, fmt.Sprintf("the request has %d header fields: the router takes %d", n, maxHeaderFields))
			return
		}
		if r.ContentLength != 0 { // it ends with the body: net/http then reads on, without one, to see the client go
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(p.cfg.BodyTimeout))
		}
		switch at := r.URL.Path; {
		case slices.Contains(completions, at):
			if allow(w, r, http.MethodPost) {
				p.complete(w, r)
			}
		case at == "/health":
			if allow(w, r, http.MethodGet) {
				p.health(w)
			}
		case at == "/metrics":
			if allow(w, r, http.MethodGet) {
				metrics.ServeHTTP(w, r)
			}
		default:
			p.pass(w, r)
		}
	})
}

func allow(w http.ResponseWriter, r *http.Request, method string) bool {
	if r.Method == method || method == http.MethodGet && r.Method == http.MethodHead {
		return true
	}
	w.Header().Set("Allow", method)
	writeError(w, http.StatusMethodNotAllowed, badRequest, fmt.Sprintf("%s takes %s, not %s", r.URL.Path, method, r.Method))
	return false
}

// complete reads a request and sends it on its way.
func (p *Proxy) complete(w http.ResponseWriter, r *http.Request) {
	req := &request{endpoint: r.URL.Path, id: r.Header.Get("X-Request-Id"), header: r.Header, began: time.Now()}
	if req.id == "" {
		req.id = newUUID()
	}
	w.Header().Set("X-Request-Id", req.id)
	defer p.finish(req)
	if err := checkPacked(r.Header); err != nil {
		req.fail(w, http.StatusUnsupportedMediaType, badRequest, err.Error())
		return
	}
	defer req.end()
	body, ok := p.readBody(w, r, req)
	if !ok {
		return
	}
	place, reason := p.begin(r, req.held)
	if place == nil {
		w.Header().Set("Retry-After", "1")
		p.refuse(w, req, reason)
		return
	}
	defer place.done()
	req.place = place
	var err error
	if req.fields, err = parseFields(body); err != nil {
		req.fail(w, http.StatusBadRequest, badRequest, err.Error())
		return
	}
	if err = req.fields.checkXargs(p.cfg.Contract); err != nil {
		req.fail(w, http.StatusBadRequest, badRequest, err.Error())
		return
	}
	req.size = len(body)
	p.route(w, r.Context(), req)
}

// finish counts a request that has ended, and logs it.
func (p *Proxy) finish(r *request) {
	took := time.Since(r.began)
	p.metrics.requests.WithLabelValues(r.endpoint, r.outcome).Inc()
	p.metrics.seconds.WithLabelValues(r.endpoint).Observe(took.Seconds())
	if !p.cfg.AccessLog {
		return
	}
	f := []zap.Field{zap.String("endpoint", r.endpoint), zap.String("outcome", r.outcome), zap.Duration("took", took)}
	if r.last == nil {
		f = append(f, zap.String("request_id", r.id))
	} else {
		f = append(f, zap.Int("attempts", r.last.number+1))
		if took, both := r.last.handOver.both(); both {
			f = append(f, zap.Duration("hand_over", took))
		}
		f = r.last.logFields(f...)
	}
	if r.err != nil {
		f = append(f, zap.Error(r.err))
	}
	p.log.Info("request", f...)
}

func (p *Proxy) readBody(w http.ResponseWriter, r *http.Request, req *request) ([]byte, bool) {
	defer httpserve.Awaiting(r.Context())()
	var err error
	var body []byte
	if req.held, err = p.bodies.beginRequest(w, r); err == nil {
		body, err = req.held.readAll(p.bodyOf(w, r), r.ContentLength)
	}
	if err != nil {
		req.letGo()
		status, kind, reason := p.unread(w, err)
		req.fail(w, status, kind, reason)
		p.linger(w, r, err)
		return nil, false
	}
	return body, true
}

// bodyOf is a client's body within its bounds.
func (p *Proxy) bodyOf(w http.ResponseWriter, r *http.Request) io.Reader {
	r.Body = http.MaxBytesReader(w, r.Body, p.cfg.MaxBody)
	return bodyReader{r.Body}
}

// bodyReader marks the errors of a client's body, which are not an engine's.
type bodyReader struct{ io.Reader }

func (b bodyReader) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if err != nil && err != io.EOF {
		err = &bodyError{err}
	}
	return n, err
}

// bodyError is a body that the client did not send whole.
type bodyError struct{ err error }

func (e *bodyError) Error() string { return "the body cannot be read: " + e.err.Error() }

func (e *bodyError) Unwrap() error { return e.err }

// unread is the answer to a client whose body could not be read.
func (p *Proxy) unread(w http.ResponseWriter, err error) (status int, kind, reason string) {
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		_ = http.NewResponseController(w).EnableFullDuplex() // for linger
		return http.StatusRequestEntityTooLarge, badRequest, fmt.Sprintf("the body is larger than %d bytes", tooLarge.Limit)
	case errors.Is(err, errBodies):
		w.Header().Set("Retry-After", "1")
		w.Header().Set("Connection", "close")
		_ = http.NewResponseController(w).EnableFullDuplex()
		return http.StatusServiceUnavailable, unavailable, err.Error()
	case errors.Is(err, os.ErrDeadlineExceeded):
		w.Header().Set("Connection", "close")
		return http.StatusRequestTimeout, badRequest, fmt.Sprintf("the body did not arrive within %v", p.cfg.BodyTimeout)
	}
	return http.StatusBadRequest, badRequest, err.Error()
}

// linger reads on what a client sends of a body that was refused, and holds nothing of it: if the connection were closed
// meanwhile, the client might not see the answer. It ends at --max-body, or when the body's time is over.
func (p *Proxy) linger(w http.ResponseWriter, r *http.Request, err error) {
	var tooLarge *http.MaxBytesError
	if refused := errors.As(err, &tooLarge) || errors.Is(err, errBodies) && !errors.Is(err, errSlowBody); !refused || r.Header.Get("Expect") != "" {
		return
	}
	defer httpserve.Awaiting(r.Context())()
	_ = http.NewResponseController(w).Flush()
	clear(r.Header) // it counts no more
	buf := make([]byte, 8<<10)
	for err = nil; err == nil; {
		_, err = r.Body.Read(buf)
	}
}

// health is 200 while a prefill and a decode server are up; with FallbackDecode
// a decode server is enough.
func (p *Proxy) health(w http.ResponseWriter) {
	missing := p.balancer.missing()
	state, code := "ok", http.StatusOK
	switch {
	case p.draining.Load():
		state, code = "draining", http.StatusServiceUnavailable
	case !p.balancer.ready():
		state, code = "unavailable", http.StatusServiceUnavailable
	case len(missing) > 0:
		state = "degraded"
	}
	if missing == nil {
		missing = []string{}
	}
	writeJSON(w, code, map[string]any{"status": state, "missing": missing})
}
