// A request is tried at pairs of servers, until one has begun to answer or the retries are spent.

package proxy

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// request is a client's completion request.
type request struct {
	endpoint string
	id       string      // the client's X-Request-Id, or one of ours
	header   http.Header // the client's
	held     *heldBody   // the body that fields lie in; nil when it is not sent again
	fields   fields
	size     int // of the body
	began    time.Time
	place    *place
	tokens   atomic.Int64 // of the prompt, as an engine's answer says; 0 if none has

	// For the log and the metrics, when the request has ended.
	last    *attempt
	outcome string
	err     error

	mu      sync.Mutex
	answers []*heldBody // the engines' answers that are counted until the request ends
	ended   bool
}

// letGo forgets the body. It is called when the body is sent to no further engine.
func (r *request) letGo() {
	if r.held != nil {
		r.held.end(0)
		r.held, r.fields = nil, nil
	}
}

// keep has an answer counted until the request ends. P's answer may come after that end.
func (r *request) keep(answer *heldBody) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return
	}
	answer.keep(0)
	r.answers = append(r.answers, answer)
}

// end is called when the client has its answer.
func (r *request) end() {
	r.letGo()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, one := range r.answers {
		one.end(0)
	}
	r.answers, r.ended = nil, true
}

// attempt is a request on its way to a prefill and a decode server. A second
// attempt has another transfer id: the first may still be under way somewhere.
type attempt struct {
	*request
	number          int // from 0
	transferID      string
	prefill, decode target
	// What each of them is sent.
	toPrefill, toDecode sent
	short               bool    // only D gets the request, since it is so small
	prompt              *prompt // P's answer, if D's lacks something of it
	refusal             atomic.Pointer[string]
	handOver            handOver
	computed            computed
}

// refused returns the failure to tell the client. If P said that there is nothing to load, and D
// failed because of that, it is P's failure in place of D's. The router asks D although P has
// said so, since D may be set to compute the prompt itself.
func (a *attempt) refused(f *failure) *failure {
	reason := a.refusal.Load()
	if reason == nil || f.answer == nil || f.answer.status != http.StatusInternalServerError {
		return f
	}
	by := a.prefill.failed(errors.New(*reason))
	by.answer = &engineAnswer{status: http.StatusInternalServerError}
	return by
}

// alone reports whether D gets the request alone, and computes the prompt itself.
func (a *attempt) alone() bool { return a.prefill.server == nil }

// engineRequestID is the engines' name for the request. vLLM allows one request of a name
// at a time.
func (a *attempt) engineRequestID() string {
	if a.number == 0 {
		return a.id
	}
	return a.id + "-retry" + strconv.Itoa(a.number)
}

// history keeps what the former attempts have shown.
type history struct {
	pairs   [][2]target
	refused []func(target) bool
}

func (h *history) refuse(t target) bool {
	return slices.ContainsFunc(h.refused, func(f func(target) bool) bool { return f(t) })
}

func (h *history) triedPair(p, d target) bool {
	return slices.ContainsFunc(h.pairs, func(pair [2]target) bool { return pair[0].same(p) && pair[1].same(d) })
}

// avoid names the targets that an attempt has failed with. Which of the two was at fault
// is not always known.
func (h *history) avoid(t target) bool {
	return slices.ContainsFunc(h.pairs, func(pair [2]target) bool { return pair[0].same(t) || pair[1].same(t) })
}

// add notes a failed attempt.
func (h *history) add(a *attempt, f *failure) {
	h.pairs = append(h.pairs, [2]target{a.prefill, a.decode})
	if f.at == nil {
		return
	}
	at := *f.at
	if f.answer == nil { // the server cannot be reached, and so none of its ranks
		h.refused = append(h.refused, func(t target) bool { return t.server == at.server })
		return
	}
	h.refused = append(h.refused, at.same)
}

// route makes attempts until one has begun to answer the client, or until the last one's
// failure is the answer. With FallbackDecode D gets the request alone if no P is up, and
// once if the retries are spent.
func (p *Proxy) route(w http.ResponseWriter, client context.Context, r *request) {
	var h history
	var last *failure
	fallback := false
	for n := 0; ; n++ {
		a := &attempt{request: r, number: n, transferID: p.cfg.Contract.newTransferID()} // not from the client's id, which may come twice
		ok := n == 0 && p.chooseShort(a) || !fallback && p.choose(client, a, &h)
		if p.cfg.FallbackDecode && !a.short && (!ok || !p.balancer.prefill.anyUp()) {
			ok, fallback = p.chooseAlone(a, &h, last), true
		}
		if !ok {
			if last == nil {
				w.Header().Set("Retry-After", "1")
				p.refuse(w, r, "not ready: "+strings.Join(p.balancer.missing(), "; "))
				return
			}
			p.answerFailure(w, client, r, last)
			return
		}
		if r.last = a; p.cfg.Contract == SGLang {
			a.settleRoom()
		}
		if p.cfg.Contract.wantsPrompt(r) {
			a.prompt = &prompt{done: make(chan struct{}), of: &p.bodies}
		}
		if last = p.try(w, client, a); last == nil {
			return
		}
		spent := n >= p.cfg.Retries && !a.short // a pair has its attempt in any case
		if spent && (fallback || !p.cfg.FallbackDecode) || !last.mayRetry() || p.ending(client) {
			p.answerFailure(w, client, r, last)
			return
		}
		fallback = fallback || spent
		h.add(a, last)
		p.metrics.retries.WithLabelValues(last.role).Inc()
		p.log.Warn("trying another engine", a.logFields(zap.String("failed", last.role), zap.Error(last))...)
	}
}

// choose says where an attempt goes, and reports whether there is such a pair.
func (p *Proxy) choose(client context.Context, a *attempt, h *history) bool {
	pick := func() (ok bool) {
		a.prefill, a.decode = target{}, target{}
		if a.prefill, ok = p.balancer.prefill.pick(p.balancer.policy, h.refuse, h.avoid); !ok {
			return false
		}
		a.decode, ok = p.balancer.decode.pick(p.balancer.policy, h.refuse, h.avoid)
		return ok && !h.triedPair(a.prefill, a.decode)
	}
	// A restarted engine has another id than the remembered one, and may have another role. So a server that counts as down is
	// asked before it is used, and P also before it is given up. What is chosen then may be down too.
	var asked []*server
	for {
		ok := pick()
		again := false
		for _, s := range []*server{a.prefill.server, a.decode.server} {
			if s == nil || again || slices.Contains(asked, s) || !s.doubtful(!ok && a.number > 0) {
				continue
			}
			asked = append(asked, s)
			again = p.askAgain(client, s)
		}
		if !again {
			return ok
		}
	}
}

// doubtful reports whether a server may be another one than the router knows, or have another role: it counts as down, or its id may be
// out of date and is tried in vain.
func (s *server) doubtful(inVain bool) bool {
	_, up, _, _ := s.state()
	return s.role == prefillRole && (!up || inVain) || s.roleProbe != nil && !up
}

// chooseShort says which D gets the first attempt of a small request, without a P. The next attempts go to pairs.
func (p *Proxy) chooseShort(a *attempt) bool {
	if int64(a.size) >= p.cfg.DecodeBelow {
		return false
	}
	var h history
	if a.decode, a.short = p.balancer.decode.pick(p.balancer.policy, h.refuse, h.avoid); a.short {
		p.metrics.short.Inc()
		p.decodeComputes(a, belowLimit)
	}
	return a.short
}

// chooseAlone says which D gets an attempt without a P. last is the reason; it is nil if
// no P could be tried.
func (p *Proxy) chooseAlone(a *attempt, h *history, last *failure) (ok bool) {
	a.prefill = target{}
	a.decode, ok = p.balancer.decode.pick(p.balancer.policy, h.refuse, h.avoid)
	if !ok || h.triedPair(a.prefill, a.decode) {
		return false
	}
	why := strings.Join(p.balancer.missing(), "; ")
	if last != nil {
		why = last.Error()
	}
	p.metrics.fallbacks.Inc()
	p.decodeComputes(a, fellBack)
	p.lines.alone.Do(func(note string) {
		p.log.Warn("a decode server computes the prompt itself"+note, a.logFields(zap.String("reason", why))...)
	})
	return true
}

func (a *attempt) logFields(more ...zap.Field) []zap.Field {
	f := []zap.Field{zap.String("request_id", a.id)}
	if !a.alone() {
		f = append(f, zap.String("transfer_id", a.transferID), zap.String("prefill", a.prefill.server.url), zap.Int("prefill_dp_rank", max(a.prefill.dp, 0)))
	}
	return append(append(f, zap.String("decode", a.decode.server.url)), more...)
}
