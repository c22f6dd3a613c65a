package node

import (
	"errors"
	"fmt"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// errBusy: what a peer asks for is to be asked for again.
var errBusy = errors.New("another engine with many regions is being looked at")

// fit says how the caches of this agent and of a peer fit, of which one is the prefill agent.
// It does not keep that: add does.
func (t *peerTable) fit(self, other *wire.Agent, prefills bool) (*matched, error) {
	of := cachesKey{self, prefills, sumOf(other.Shapes, false)}
	t.mu.Lock()
	known := t.matches.by[of]
	t.mu.Unlock()
	var m *core.Match
	if known != nil {
		m = known.match
	} else if len(other.Shapes) > manyRegions {
		select {
		case t.long <- struct{}{}:
			defer func() { <-t.long }()
		default:
			return nil, errBusy
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
