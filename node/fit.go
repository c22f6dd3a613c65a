// How a peer's caches fit this agent's is worked out once. While one peer with many regions is looked at, another such
// peer is to ask again.

package node

import (
	"fmt"

	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/wire"
)

// errManyRegions refuses a peer with many regions while another such peer is being matched.
var errManyRegions = fmt.Errorf("%w: another engine with many regions is being looked at", errBusy)

// fit says how the caches of this agent and of a peer fit. prefills says that this agent is the
// prefill agent of the two. fit does not keep the match: add does.
func (t *peerTable) fit(self, other *wire.Agent, prefills bool) (*matched, error) {
	of := cachesKey{self, prefills, sumOf(other.Shapes, false)}
	t.mu.Lock()
	known := t.matches.by[of]
	t.mu.Unlock()
	var m *kv.Match
	if known != nil {
		m = known.match
	} else if len(other.Shapes) > manyRegions {
		select {
		case t.long <- struct{}{}:
			defer func() { <-t.long }()
		default:
			return nil, errManyRegions
		}
	}
	p, d := self, other
	if !prefills {
		p, d = other, self
	}
	m, err := compatible(p, d, m)
	switch {
	case err != nil:
		return nil, err
	case known != nil:
		return known, nil
	case m.Kept() > maxMatch:
		return nil, fmt.Errorf("%s describes %d regions, and how they fit this agent's takes %d bytes, at most %d are kept for one peer: register fewer regions, with more heads in each",
			rankText(other), len(other.Shapes), m.Kept(), maxMatch)
	}
	return &matched{of: of, match: m}, nil
}
