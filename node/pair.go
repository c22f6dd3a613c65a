package node

import (
	"errors"
	"strings"
	"time"

	"github.com/kvconn/kvconn/core"
)

// pair is the transports' record of one peer; their lock guards it.
type pair struct {
	engine    string
	connected map[string]bool      // D: transports that were told to connect
	absent    map[string]error     // D: why each other transport was not
	down      map[string]bool      // D: transports whose connections broke since
	settled   bool                 // D has waited once for the preferred transport
	now       map[core.Side]string // the transport of the last transfer, from and to the peer
	why       string               // D: why that was not the preferred transport
	used      time.Time
	transfers map[string]uint64 // transfers that ended well, by transport
	fallbacks map[string]uint64 // loads that did not go by the preferred transport, by reason
}

// errNotConnected says that nobody has told a transport to connect with a peer, or not yet.
var errNotConnected = core.Setup.Mark(errors.New("it is not connected with that peer"))

// lacks says why a transport was not told to connect.
func (p *pair) lacks(name string) error {
	if why := p.absent[name]; why != nil {
		return why
	}
	return errNotConnected
}

// passedOver is a transport that a transfer did not take.
type passedOver struct {
	name string
	why  error
}

// silent says whether nobody need hear that the transport was passed over, because the peer is on another host
// and the transport never goes to another host.
func (o passedOver) silent() bool { return errors.Is(o.why, core.ErrElsewhere) }

func (o passedOver) String() string {
	return o.name + ": " + strings.TrimPrefix(o.why.Error(), o.name+": ")
}

func joined(passed []passedOver) string {
	list := make([]string, len(passed))
	for i, o := range passed {
		list[i] = o.String()
	}
	return strings.Join(list, "; ")
}

// commonTransport is one transport of a prefill agent, and its address.
type commonTransport struct {
	via       core.Transport
	endpoint  string
	encrypted bool
}

func (w commonTransport) String() string {
	if w.encrypted {
		return w.via.Name() + " " + w.endpoint + " (encrypted)"
	}
	return w.via.Name() + " " + w.endpoint
}

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

// counting is a transport with counters of its own.
type counting interface{ Counters() map[string]uint64 }

// explaining is a transport that has several mechanisms.
type explaining interface {
	How(peer core.AgentID) string
}
