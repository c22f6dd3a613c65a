// What an agent counts, in the form in which programs and pages read it.

package node

import (
	"github.com/kvconn/kvconn/core"
)

// Counts are halves that ended, and their bytes.
type Counts struct {
	Loads        uint64 `json:"loads"`  // ended well
	Offers       uint64 `json:"offers"` // ended well: sent, or released by a decode engine that needed nothing
	LoadsFailed  uint64 `json:"loads_failed"`
	OffersFailed uint64 `json:"offers_failed"`
	BytesIn      uint64 `json:"bytes_in"`
	BytesOut     uint64 `json:"bytes_out"`
}

func (c *Counts) add(r core.Report) {
	ok := r.Code == core.OK
	switch {
	case r.Side == core.SideLoad && ok:
		c.Loads++
		c.BytesIn += r.Stats.Bytes
	case r.Side == core.SideLoad:
		c.LoadsFailed++
	case ok:
		c.Offers++
		c.BytesOut += r.Stats.Bytes
	default:
		c.OffersFailed++
	}
}

// Totals count what an agent has done since Open.
type Totals struct {
	Counts
	LoadsBy      map[string]uint64 `json:"loads_failed_by"`  // number of each code's name
	OffersBy     map[string]uint64 `json:"offers_failed_by"` // "expired" among them
	BytesPartial uint64            `json:"bytes_partial"`    // given to the transport while the engine still computed; of bytes_out, unless the transfer was stopped
	Retries      uint64            `json:"retries"`          // requests sent again, and peers looked up again
}

// Stats are an agent's counters and gauges.
type Stats struct {
	Agent     string `json:"agent"`
	EngineID  string `json:"engine_id"`
	Bootstrap string `json:"bootstrap"`
	Transport string `json:"transport"` // the available transports, the preferred one first
	Totals
	Offered        uint64  `json:"offered"` // accepted calls
	LoadsStarted   uint64  `json:"loads_started"`
	Claimed        uint64  `json:"claimed"`
	ClaimsLost     uint64  `json:"claims_lost"`      // claims that were reported since a load could only fail
	ExpiredEarly   uint64  `json:"expired_early"`    // claims and loads of others that this engine never named
	Partial        uint64  `json:"partial_offers"`   // offers that began to move before the engine had all of their blocks
	Withdrawn      uint64  `json:"withdrawn"`        // of them, those that the engine took back
	LoadsUnderWay  int     `json:"loads_under_way"`  // claims among them
	LoadsClaimed   int     `json:"loads_claimed"`    // claims: loads without blocks yet
	LoadsWaiting   int     `json:"loads_waiting"`    // loads that P has and whose bytes are awaited
	OffersUnderWay int     `json:"offers_under_way"` // announced, offered, sending, and early ones
	OffersEarly    int     `json:"offers_early"`     // claims and loads of others that this engine has not named
	Outstanding    int     `json:"outstanding"`      // accepted and not reported
	Unread         int     `json:"unread"`           // reported and not collected
	OldestWait     float64 `json:"oldest_wait_s"`    // of the halves under way

	ClusterRefused map[string]uint64 `json:"cluster_refused,omitempty"` // messages over a NATS cluster that were not taken, by reason: natsbus.Bus.Refused

	Transports map[string]TransportStats `json:"transports"`
	Pairs      []PairStats               `json:"pairs"` // the pairs used last, at most 64
}

func (t *Totals) add(r core.Report) {
	t.Counts.add(r)
	switch {
	case r.Code == core.OK:
	case r.Side == core.SideLoad:
		t.LoadsBy = counted(t.LoadsBy, r.Code)
	default:
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

// TransportStats count an agent's transfers by one transport since it registered its
// KV caches.
type TransportStats struct {
	Available bool   `json:"available"`
	Reason    string `json:"reason,omitempty"` // why it is not
	Counts
	Fallbacks map[string]uint64 `json:"fallbacks,omitempty"` // loads that another took in its place, by reason
	// FallbacksBy are the same loads, by the kind of the reason.
	FallbacksBy map[core.Why]uint64 `json:"fallbacks_by,omitempty"`
	Counters    map[string]uint64   `json:"counters,omitempty"` // of the transport itself: Counters of rdma.Transport, local.Transport
}

// PairStats count an agent's transfers with one peer.
type PairStats struct {
	Agent     string            `json:"agent"`
	EngineID  string            `json:"engine_id"`
	Transport string            `json:"transport"`           // by which new transfers go
	How       string            `json:"how,omitempty"`       // local: mapping, process_vm_readv, device, or several
	Reason    string            `json:"reason,omitempty"`    // why not by a better one
	Transfers map[string]uint64 `json:"transfers"`           // that ended well, by transport
	Fallbacks map[string]uint64 `json:"fallbacks,omitempty"` // loads that did not take the best one, by reason
}
