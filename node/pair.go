package node

import (
	"strings"
	"time"

	"github.com/kvconn/kvconn/core"
)

// pair is what the transports remember of one peer; guarded by their lock.
type pair struct {
	engine    string
	connected map[string]bool      // D: by these it has been told to connect
	absent    map[string]string    // D: why not by the others
	down      map[string]bool      // D: those whose connections broke since
	settled   bool                 // D has waited once for the preferred one
	now       map[core.Side]string // by which the last transfer went, from and to the peer
	why       string               // D: and not by the preferred one
	used      time.Time
	transfers map[string]uint64 // that ended well, by transport
	fallbacks map[string]uint64 // that the preferred one did not take, by reason
}

// passedOver is a transport that a transfer did not take.
type passedOver struct {
	name string
	why  error
}

func (o passedOver) String() string { return o.name + ": " + o.why.Error() }

func joined(passed []passedOver) string {
	list := make([]string, len(passed))
	for i, o := range passed {
		list[i] = o.String()
	}
	return strings.Join(list, "; ")
}

// way is one transport of a prefill agent, and where that is reached.
type way struct {
	via      core.Transport
	endpoint string
}

func (w way) String() string { return w.via.Name() + " " + w.endpoint }

// maxReasons bounds the reasons that are counted apart: some hold numbers.
const maxReasons = 16

const otherReasons = "other reasons"

func count(by map[string]uint64, why string) {
	why = shorten(why)
	if _, known := by[why]; !known && len(by) >= maxReasons {
		why = otherReasons
	}
	by[why]++
}

// TransportStats are what one transport of an agent has done since it was
// registered.
type TransportStats struct {
	Available    bool              `json:"available"`
	Reason       string            `json:"reason,omitempty"` // why it is not
	Loads        uint64            `json:"loads"`            // ended well
	Offers       uint64            `json:"offers"`           // ended well
	LoadsFailed  uint64            `json:"loads_failed"`     // after they had begun to wait for it
	OffersFailed uint64            `json:"offers_failed"`
	BytesIn      uint64            `json:"bytes_in"`
	BytesOut     uint64            `json:"bytes_out"`
	Fallbacks    map[string]uint64 `json:"fallbacks,omitempty"` // loads that another took in its place, by reason
	Counters     map[string]uint64 `json:"counters,omitempty"`  // of the transport itself: rdma.Transport.Counters
}

// counting is a transport with counters of its own.
type counting interface{ Counters() map[string]uint64 }

func (s *TransportStats) add(r core.Report) {
	ok := r.Code == core.OK
	switch {
	case r.Side == core.SideLoad && ok:
		s.Loads++
		s.BytesIn += r.Stats.Bytes
	case r.Side == core.SideLoad:
		s.LoadsFailed++
	case ok:
		s.Offers++
		s.BytesOut += r.Stats.Bytes
	default:
		s.OffersFailed++
	}
}

// PairStats are what an agent has done with one peer.
type PairStats struct {
	Agent     string            `json:"agent"`
	EngineID  string            `json:"engine_id"`
	Transport string            `json:"transport"`           // by which new transfers go
	Reason    string            `json:"reason,omitempty"`    // why not by a better one
	Transfers map[string]uint64 `json:"transfers"`           // that ended well, by transport
	Fallbacks map[string]uint64 `json:"fallbacks,omitempty"` // loads that did not take the best one, by reason
}
