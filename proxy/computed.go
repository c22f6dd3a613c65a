// If a decode server computes a prompt that a prefill server was to compute, that is counted and logged, with the
// reason.

package proxy

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
)

// Why a decode server computed a prompt that a prefill server was to compute. The words are labels of a metric.
const (
	fellBack      = "fallback"
	belowLimit    = "below_threshold"
	withoutParams = "no_params"
	wasRefused    = "refused"
)

// Whether an answer said how many tokens the prompt has: another label.
const (
	tokensKnown   = "known"
	tokensUnknown = "unknown"
)

var computedReasons = map[string]string{
	fellBack:      "no prefill server could serve them",
	withoutParams: "prefill answered no kv_transfer_params",
	wasRefused:    "prefill had nothing to load for them",
}

// computed is what the router knows of a prompt that D may have computed in P's place. P's answer may come after D's.
type computed struct {
	mu      sync.Mutex
	reason  string // "": it has not
	served  bool   // D's answer is over, whole or broken off
	counted bool
}

// because notes the reason, and reports whether the prompt is to be counted now.
func (c *computed) because(reason string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reason = reason
	return c.count()
}

// end notes that D's answer is over, as because does.
func (c *computed) end() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.served = true
	return c.count()
}

// count is true once. c.mu is held.
func (c *computed) count() bool {
	ready := c.served && c.reason != "" && !c.counted
	c.counted = c.counted || ready
	return ready
}

// decodeComputes is called when the router learns that D is to compute a prompt.
func (p *Proxy) decodeComputes(a *attempt, reason string) {
	if a.computed.because(reason) {
		p.countComputed(a)
	}
}

// decodeServed is called when D's answer is over; said may be nil.
func (p *Proxy) decodeServed(a *attempt, said *usage) {
	if said != nil && said.tokens > 0 {
		a.tokens.Store(said.tokens)
	}
	if a.computed.end() {
		p.countComputed(a)
	}
}

func (p *Proxy) countComputed(a *attempt) {
	reason, tokens, known := a.computed.reason, a.tokens.Load(), tokensKnown
	if tokens == 0 {
		known = tokensUnknown
	}
	p.metrics.computed.WithLabelValues(reason, known).Inc()
	p.metrics.computedTokens.WithLabelValues(reason).Add(float64(tokens))
	if computedReasons[reason] == "" { // the operator has set it so
		return
	}
	p.writeComputed(p.unsaid.add(time.Now(), reason, tokens), a.logFields()...)
}

func (p *Proxy) writeComputed(why string, fields ...zap.Field) {
	if why != "" {
		p.log.Warn("decode servers computed prompts that prefill servers were to compute: "+why, fields...)
	}
}

// sayComputed writes the lines that become due while no further prompt comes.
func (p *Proxy) sayComputed() {
	for {
		select {
		case <-p.unsaid.waits:
		case <-p.ctx.Done(): // Close writes the rest when the last request has ended
			return
		}
		select {
		case <-time.After(p.unsaid.wait(time.Now())):
			p.writeComputed(p.unsaid.due(time.Now()))
		case <-p.ctx.Done():
			return
		}
	}
}

// computedEvery is how often the log has a line about such prompts.
const computedEvery = 30 * time.Second

// unsaid is what the log does not have yet of such prompts, by reason. The first line comes at once.
type unsaid struct {
	waits chan struct{} // has one when a prompt waits for its line
	mu    sync.Mutex
	last  time.Time // of a line
	sums  map[string]*computedSum
}

type computedSum struct{ prompts, tokens, unknown int64 }

// add notes a prompt; 0 tokens are an unknown number. It returns the line, if one is due.
func (u *unsaid) add(now time.Time, reason string, tokens int64) (line string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	sum := u.sums[reason]
	if sum == nil {
		sum = new(computedSum)
		if u.sums == nil {
			u.sums = map[string]*computedSum{}
		}
		u.sums[reason] = sum
	}
	sum.prompts++
	sum.tokens += tokens
	if tokens == 0 {
		sum.unknown++
	}
	if u.left(now) <= 0 {
		return u.take(now)
	}
	select {
	case u.waits <- struct{}{}:
	default: // it has one
	}
	return ""
}

// left is the time until a line may be written; u.mu is held.
func (u *unsaid) left(now time.Time) time.Duration {
	if u.last.IsZero() {
		return 0
	}
	return computedEvery - now.Sub(u.last)
}

func (u *unsaid) wait(now time.Time) time.Duration {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.left(now)
}

// due returns the line, if one is due.
func (u *unsaid) due(now time.Time) (line string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.left(now) > 0 { // a further prompt had it written meanwhile; who came after that one has said that he waits
		return ""
	}
	return u.take(now)
}

// rest returns the line of all that waits.
func (u *unsaid) rest() (line string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.take(time.Now())
}

// take returns the line, "" if nothing waits for one; u.mu is held.
func (u *unsaid) take(now time.Time) (line string) {
	if len(u.sums) == 0 {
		return ""
	}
	var why []string
	for _, reason := range slices.Sorted(maps.Keys(u.sums)) {
		sum := u.sums[reason]
		text := fmt.Sprintf("%s (%s, %d tokens", computedReasons[reason], prompts(sum.prompts), sum.tokens)
		if sum.unknown > 0 {
			text += fmt.Sprintf(", and those of %s whose answers do not say it", prompts(sum.unknown))
		}
		why = append(why, text+")")
	}
	u.last, u.sums = now, nil
	return strings.Join(why, "; ")
}

func prompts(n int64) string {
	if n == 1 {
		return "1 prompt"
	}
	return fmt.Sprintf("%d prompts", n)
}

// readTokens takes the number of the prompt's tokens out of P's whole answer.
func (a *attempt) readTokens(answer []byte) {
	var u usage
	u.read(answer)
	if u.tokens > 0 {
		a.tokens.Store(u.tokens)
	}
}
