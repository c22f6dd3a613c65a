// What tests do to the network of the fake transports.

package coretest

import (
	"fmt"

	"github.com/kvconn/kvconn/core"
)

// Cut breaks the way between two agents until Mend, and tells both sides, with the cause
// why. Writes under way end, and so do transfers that have begun to arrive.
func (n *Network) Cut(a, b core.AgentID, why error) {
	n.mu.Lock()
	n.broken[link{a, b}], n.broken[link{b, a}] = why, why
	x, y := n.fakes[a], n.fakes[b]
	up := n.links[link{a, b}] || n.links[link{b, a}]
	delete(n.links, link{a, b})
	delete(n.links, link{b, a})
	n.mu.Unlock()
	lost := fmt.Errorf("mem: %w: %w", core.ErrConnectionLost, why)
	for s, other := range map[*Signaller]core.AgentID{x: b, y: a} {
		if s == nil {
			continue
		}
		s.mu.Lock()
		for _, w := range s.writes {
			if w.peer == other {
				w.end(lost)
			}
		}
		var begun []*expect
		for _, e := range s.expected {
			if e.peer == other {
				begun = append(begun, e)
			}
		}
		s.mu.Unlock()
		for _, e := range begun {
			e.fence.Lock()
			taken := e.taken
			e.fence.Unlock()
			if taken {
				s.end(e, core.TransferStats{Segments: e.segments}, lost)
			}
		}
		if up {
			s.spawn(func() { s.sink.PeerDown(other, lost) })
		}
	}
}

// Mend ends Cut: agents that were told to connect say hello again.
func (n *Network) Mend(a, b core.AgentID) {
	n.mu.Lock()
	delete(n.broken, link{a, b})
	delete(n.broken, link{b, a})
	x, y := n.fakes[a], n.fakes[b]
	n.mu.Unlock()
	for s, other := range map[*Signaller]core.AgentID{x: b, y: a} {
		if s == nil {
			continue
		}
		s.state.Lock()
		w := s.connections[other]
		if w != nil {
			w = &fakeConnection{ticket: w.ticket, settled: make(chan struct{})}
			s.connections[other] = w
		}
		s.state.Unlock()
		if w != nil {
			s.spawn(func() { s.sayHello(other, w) })
		}
	}
}

// Hold holds every handshake up until c is closed.
func (n *Network) Hold(c <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.hold = c
}

// Revoking has f called before each Revoke of a Signaller, on its goroutine: f may
// wait, as for the word of a peer.
func (n *Network) Revoking(f func(id core.TransferID)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.revoking = f
}
