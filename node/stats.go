package node

import (
	"fmt"
	"maps"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
)

// Totals count what an agent has done since Open.
type Totals struct {
	Loads        uint64            `json:"loads"`  // ended well
	Offers       uint64            `json:"offers"` // ended well: sent, or released by a decode engine that needed nothing
	LoadsFailed  uint64            `json:"loads_failed"`
	OffersFailed uint64            `json:"offers_failed"`
	LoadsBy      map[string]uint64 `json:"loads_failed_by"`  // code's name -> number
	OffersBy     map[string]uint64 `json:"offers_failed_by"` // "expired" among them
	BytesIn      uint64            `json:"bytes_in"`
	BytesOut     uint64            `json:"bytes_out"`
	BytesGrown   uint64            `json:"bytes_grown"` // given to the transport while the engine still computed; of bytes_out, unless it was stopped
	Retries      uint64            `json:"retries"`     // requests sent again, and peers looked up again
}

// Stats are an agent's counters and gauges.
type Stats struct {
	Agent     string `json:"agent"`
	EngineID  string `json:"engine_id"`
	Bootstrap string `json:"bootstrap"`
	Transport string `json:"transport"` // those that are available, the preferred one first
	Totals
	Offered        uint64  `json:"offered"` // accepted calls
	LoadsStarted   uint64  `json:"loads_started"`
	Claimed        uint64  `json:"claimed"`
	ClaimsLost     uint64  `json:"claims_lost"`      // of them, those that were reported: a load could only fail
	Reaped         uint64  `json:"reaped"`           // claims and loads of others that this engine never named
	Grown          uint64  `json:"grown"`            // offers that began to move before the engine had all of their blocks
	Retracted      uint64  `json:"retracted"`        // of them, those that the engine took back
	LoadsUnderWay  int     `json:"loads_under_way"`  // claims among them
	LoadsClaimed   int     `json:"loads_claimed"`    // of them, those without blocks yet
	LoadsWaiting   int     `json:"loads_waiting"`    // of them, those that P has and whose bytes are awaited
	OffersUnderWay int     `json:"offers_under_way"` // announced, offered, sending, and early ones
	OffersEarly    int     `json:"offers_early"`     // of them, claims and loads that this engine has not named
	Outstanding    int     `json:"outstanding"`      // accepted and not reported
	Unread         int     `json:"unread"`           // reported and not collected
	OldestWait     float64 `json:"oldest_wait_s"`    // of what is outstanding

	Transports map[string]TransportStats `json:"transports"`
	Pairs      []PairStats               `json:"pairs"` // those used last, at most 64
}

func (t *Totals) add(r core.Report) {
	ok := r.Code == core.OK
	switch {
	case r.Side == core.SideLoad && ok:
		t.Loads++
		t.BytesIn += r.Stats.Bytes
	case r.Side == core.SideLoad:
		t.LoadsFailed++
		t.LoadsBy = counted(t.LoadsBy, r.Code)
	case ok:
		t.Offers++
		t.BytesOut += r.Stats.Bytes
	default:
		t.OffersFailed++
		t.OffersBy = counted(t.OffersBy, r.Code)
	}
}

func counted(by map[string]uint64, c core.Code) map[string]uint64 {
	if by == nil {
		by = map[string]uint64{}
	}
	by[c.String()]++
	return by
}

// count changes the totals.
func (a *Agent) count(f func(t *Totals)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f(&a.total)
}

// Stats returns the agent's counters and gauges.
func (a *Agent) Stats() Stats {
	s := a.stats()
	s.Bootstrap = a.BootstrapAddress()
	return s
}

// stats is Stats for who may ask while the agent is being opened.
func (a *Agent) stats() Stats {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := Stats{Agent: string(a.id), EngineID: a.cfg.EngineID, Totals: a.total, Outstanding: a.outstanding, Unread: a.reports.Unread()}
	s.LoadsBy, s.OffersBy = maps.Clone(a.total.LoadsBy), maps.Clone(a.total.OffersBy)
	if a.machine != nil {
		n, c := a.machine.Sizes(), a.machine.Counters()
		s.LoadsUnderWay, s.LoadsClaimed, s.LoadsWaiting = n.Loads, n.Claims, n.Waiting
		s.OffersUnderWay, s.OffersEarly = n.Offers, n.Early
		s.Offered, s.LoadsStarted, s.Claimed, s.ClaimsLost, s.Reaped, s.Grown, s.Retracted = c.Offered, c.Loaded, c.Claimed, c.ClaimsLost, c.Reaped, c.Grown, c.Retracted
		s.Retries += c.Retries
		s.OldestWait = a.machine.OldestWait(a.clock.Now()).Seconds()
		s.Transport = a.transport.String()
		s.Transports, s.Pairs = a.transport.stats()
	}
	return s
}

// explain adds to a failed half's cause what a reader needs who sees only this
// text: which side of which engines and ranks, in which state, after how long.
// The cause comes first, because the C completion cuts off the end.
func (a *Agent) explain(r core.Report) string {
	if !failure(r.Code) {
		return r.Reason
	}
	where := fmt.Sprintf("engine %q dp%d tp%d pp%d", a.cfg.EngineID, a.cfg.DPRank, a.cfg.TPRank, a.cfg.PPRank)
	if r.Side == core.SideLoad || r.Side == core.SideClaim {
		from := a.peers.rankOf(r.Peer)
		if from == "" {
			from = fmt.Sprintf("engine %q", r.From.EngineID)
		}
		where += fmt.Sprintf(" from %s at %s", from, r.From.Bootstrap)
	}
	return fmt.Sprintf("%s [%v of %s, %s, %d ms]", r.Reason, r.Side, where, r.State, r.Elapsed.Milliseconds())
}

// failure: neither success nor what this engine has asked for.
func failure(c core.Code) bool { return c != core.OK && c != core.Cancelled && c != core.Closed }

func (a *Agent) logReport(r core.Report) {
	level := zap.DebugLevel
	if failure(r.Code) {
		level = zap.WarnLevel
	}
	if ce := a.log.Check(level, "transfer ended"); ce != nil {
		ce.Write(zap.String("transfer_id", string(r.ID)), zap.Stringer("side", r.Side), zap.Stringer("code", r.Code), zap.String("engine_id", a.cfg.EngineID),
			zap.Ints("rank", []int{a.cfg.DPRank, a.cfg.TPRank, a.cfg.PPRank}), zap.String("state", r.State), zap.String("peer", string(r.Peer)),
			zap.String("reason", r.Reason), zap.Int64("ms", r.Elapsed.Milliseconds()), zap.Uint64("bytes", r.Stats.Bytes), zap.Duration("wait", r.Wait),
			zap.Duration("transfer", time.Duration(r.Stats.Nanos)))
	}
}
