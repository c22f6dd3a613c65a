package node

import (
	"fmt"
	"maps"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
)

// completions handles the end of each half: it completes the report for the engine,
// counts it and logs it.
type completions struct {
	cfg     *Config
	log     *zap.Logger
	via     func(core.Report) string  // which transport moved the bytes
	rank    func(core.AgentID) string // names a prefill agent's engine and rank
	metrics *metrics

	mu     sync.Mutex // taken within the lock of the machine
	totals Totals
}

// ended is called under the lock of the machine.
func (e *completions) ended(r core.Report) core.Report {
	if r.Side == core.SideLoad || r.Side == core.SideOffer {
		r.Transport = e.via(r)
		e.count(func(t *Totals) { t.add(r) })
		e.metrics.observe(r)
	}
	if r.Side != core.SideDemand {
		e.write(r)
	}
	r.Reason = e.explain(r)
	return r
}

// count changes the totals.
func (e *completions) count(f func(t *Totals)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f(&e.totals)
}

// retried counts a request that is sent again.
func (e *completions) retried() { e.count(func(t *Totals) { t.Retries++ }) }

// read returns a copy of the totals.
func (e *completions) read() Totals {
	e.mu.Lock()
	defer e.mu.Unlock()
	t := e.totals
	t.LoadsBy, t.OffersBy = maps.Clone(t.LoadsBy), maps.Clone(t.OffersBy)
	return t
}

// explain makes the reason of a failed half complete for a reader who sees only
// this text: it adds the side, the engines and ranks, the state and the time. The
// cause comes first, because the C completion cuts off the end.
func (e *completions) explain(r core.Report) string {
	if !failure(r.Code) {
		return r.Reason
	}
	where := fmt.Sprintf("engine %q dp%d tp%d pp%d", e.cfg.EngineID, e.cfg.DPRank, e.cfg.TPRank, e.cfg.PPRank)
	if r.Side == core.SideLoad || r.Side == core.SideClaim {
		from := e.rank(r.Peer)
		if from == "" {
			from = fmt.Sprintf("engine %q", r.From.EngineID)
		}
		where += fmt.Sprintf(" from %s at %s", from, r.From.Bootstrap)
	}
	return fmt.Sprintf("%s [%v of %s, %s, %d ms]", r.Reason, r.Side, where, r.State, r.Elapsed.Milliseconds())
}

// failure: the half neither ended well nor by a call of this engine.
func failure(c core.Code) bool { return c != core.OK && c != core.Cancelled && c != core.Closed }

func (e *completions) write(r core.Report) {
	level := zap.DebugLevel
	if failure(r.Code) {
		level = zap.WarnLevel
	}
	if ce := e.log.Check(level, "transfer ended"); ce != nil {
		ce.Write(zap.String("transfer_id", string(r.ID)), zap.Stringer("side", r.Side), zap.Stringer("code", r.Code), zap.String("engine_id", e.cfg.EngineID),
			zap.Ints("rank", []int{e.cfg.DPRank, e.cfg.TPRank, e.cfg.PPRank}), zap.String("state", r.State), zap.String("peer", string(r.Peer)),
			zap.String("reason", r.Reason), zap.Int64("ms", r.Elapsed.Milliseconds()), zap.Uint64("bytes", r.Stats.Bytes), zap.Duration("wait", r.Wait),
			zap.Duration("transfer", time.Duration(r.Stats.Nanos)))
	}
}

// add fills in the state of the halves, and the totals at the same instant: ends
// are counted under the lock of the machine.
func (s *Stats) add(h *lockedMachine, e *completions, registered func() *transports) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s.Totals = e.read()
	s.Outstanding, s.Unread = h.outstanding, h.reports.Unread()
	m := h.inner
	if m == nil {
		return
	}
	n, c := m.Sizes(), m.Counters()
	s.LoadsUnderWay, s.LoadsClaimed, s.LoadsWaiting = n.Loads, n.Claims, n.Waiting
	s.OffersUnderWay, s.OffersEarly = n.Offers, n.Early
	s.Offered, s.LoadsStarted, s.Claimed, s.ClaimsLost, s.ExpiredEarly, s.Partial, s.Withdrawn = c.Offered, c.Loaded, c.Claimed, c.ClaimsLost, c.ExpiredEarly, c.Partial, c.Withdrawn
	s.Retries += c.Retries
	s.OldestWait = m.OldestWait(h.clock.Now()).Seconds()
	t := registered()
	s.Transport = t.String()
	s.Transports, s.Pairs = t.stats()
}
