package node

import (
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
)

// Totals count an agent's finished transfers since Open.
type Totals struct {
	Loads        uint64 `json:"loads"` // ended well
	LoadsFailed  uint64 `json:"loads_failed"`
	Offers       uint64 `json:"offers"`
	OffersFailed uint64 `json:"offers_failed"`
	BytesIn      uint64 `json:"bytes_in"`
	BytesOut     uint64 `json:"bytes_out"`
}

// Stats are an agent's counters and gauges.
type Stats struct {
	Agent     string `json:"agent"`
	EngineID  string `json:"engine_id"`
	Bootstrap string `json:"bootstrap"`
	Transport string `json:"transport"`
	Totals
	LoadsUnderWay  int `json:"loads_under_way"`
	LoadsWaiting   int `json:"loads_waiting"`    // of them, those that P has and whose bytes are awaited
	OffersUnderWay int `json:"offers_under_way"` // announced, offered, sending, and early loads
	Outstanding    int `json:"outstanding"`      // accepted and not reported
	Unread         int `json:"unread"`           // reported and not collected
}

func (t *Totals) add(r core.Report) {
	ok := r.Code == core.OK
	switch {
	case r.Side == core.SideLoad && ok:
		t.Loads++
		t.BytesIn += r.Stats.Bytes
	case r.Side == core.SideLoad:
		t.LoadsFailed++
	case ok:
		t.Offers++
		t.BytesOut += r.Stats.Bytes
	default:
		t.OffersFailed++
	}
}

// Stats returns the agent's counters and gauges.
func (a *Agent) Stats() Stats {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := Stats{Agent: string(a.id), EngineID: a.cfg.EngineID, Bootstrap: a.BootstrapAddress(), Totals: a.total, Outstanding: a.outstanding, Unread: a.reports.Unread()}
	if a.machine != nil {
		s.LoadsUnderWay, s.OffersUnderWay = a.machine.Counts()
		s.LoadsWaiting = a.machine.Waiting()
		s.Transport = a.transport.Name()
	}
	return s
}

func (a *Agent) logReport(r core.Report) {
	level := zap.DebugLevel
	if r.Code != core.OK && r.Code != core.Cancelled && r.Code != core.Closed {
		level = zap.WarnLevel
	}
	if ce := a.log.Check(level, "transfer ended"); ce != nil {
		ce.Write(zap.String("transfer_id", string(r.ID)), zap.Stringer("side", r.Side), zap.Stringer("code", r.Code), zap.String("reason", r.Reason),
			zap.Uint64("bytes", r.Stats.Bytes), zap.Duration("wait", r.Wait), zap.Duration("transfer", time.Duration(r.Stats.Nanos)))
	}
}
