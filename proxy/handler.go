package proxy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"
)

// bodyTimeout bounds how long a client may take for its body.
const bodyTimeout = time.Minute

// Outcomes of a request beside HTTP statuses.
const (
	clientGone = "client_gone"
	brokenOff  = "broken_off"
)

// Handler serves completions, which are /v1/completions, /v1/chat/completions
// and by the SGLang contract /generate, by a prefill and a decode server, /health and /metrics itself, and all else by a decode server.
func (p *Proxy) Handler() http.Handler {
	completions := p.cfg.Contract.endpoints()
	metrics := promhttp.HandlerFor(p.metrics.registry, promhttp.HandlerOpts{})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		boundWrite(w) // of what is left from the connection's last request
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
	place, reason := p.begin()
	if place == nil {
		w.Header().Set("Retry-After", "1")
		p.refuse(w, req, reason)
		return
	}
	defer place.done()
	req.place = place
	body, ok := p.readBody(w, r, req)
	if !ok {
		return
	}
	var err error
	if req.fields, err = parseFields(body); err != nil {
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
		f = r.last.logFields(append(f, zap.Int("attempts", r.last.number+1))...)
	}
	if r.err != nil {
		f = append(f, zap.Error(r.err))
	}
	p.log.Info("request", f...)
}

func (p *Proxy) readBody(w http.ResponseWriter, r *http.Request, req *request) ([]byte, bool) {
	c := http.NewResponseController(w)
	_ = c.SetReadDeadline(time.Now().Add(bodyTimeout))
	var body bytes.Buffer
	body.Grow(int(min(max(r.ContentLength, 0), 1<<20)) + bytes.MinRead)
	_, err := body.ReadFrom(http.MaxBytesReader(w, r.Body, p.cfg.MaxBody))
	// net/http now reads on to see the client go; that read must not time out.
	_ = c.SetReadDeadline(time.Time{})
	var tooLarge *http.MaxBytesError
	switch {
	case err == nil:
		return body.Bytes(), true
	case errors.As(err, &tooLarge):
		req.fail(w, http.StatusRequestEntityTooLarge, badRequest, fmt.Sprintf("the body is larger than %d bytes", tooLarge.Limit))
	case errors.Is(err, os.ErrDeadlineExceeded):
		w.Header().Set("Connection", "close")
		req.fail(w, http.StatusRequestTimeout, badRequest, fmt.Sprintf("the body did not arrive within %v", bodyTimeout))
	default:
		req.fail(w, http.StatusBadRequest, badRequest, "the body cannot be read: "+err.Error())
	}
	return nil, false
}

// health is 200 while a prefill and a decode server are up.
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
	switch {
	case err == nil:
	case errors.As(err, &tooLarge):
		writeError(w, http.StatusRequestEntityTooLarge, badRequest, fmt.Sprintf("the body is larger than %d bytes", tooLarge.Limit))
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

// passBody is the client's body, or nil if it has none. What may be JSON is read
// first, to look for parameters that only we may set.
func (p *Proxy) passBody(w http.ResponseWriter, r *http.Request) (io.Reader, error) {
	if r.ContentLength == 0 {
		return nil, nil
	}
	body := http.MaxBytesReader(w, r.Body, p.cfg.MaxBody)
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
