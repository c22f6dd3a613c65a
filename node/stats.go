package node

import (
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
