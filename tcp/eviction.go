// If P's places for streams are taken, a stream of the host or agent that has the most gives way.

package tcp

import (
	"net/netip"
	"slices"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/internal/fault"
)

// count gives a stream its place; s.mu is held.
func (s *sender) count(st *outStream) {
	st.peer.open++
	s.streams++
	s.from.Add(st.from, 1)
}

// discount takes a stream's place back; s.mu is held.
func (s *sender) discount(st *outStream) {
	st.peer.open--
	s.streams--
	s.from.Add(st.from, -1)
	st.peer.tuner.reset()
	if st.peer.open == 0 { // D may have forgotten P, and comes back with as few streams as at first
		s.applyFound(st.peer)
	}
}

// evict ends a stream for one of a decode agent at an address: one agent or host, or a few, must not keep all others out. It is a
// stream of the address that has the most, if that has at least two more; else of the agent that has the most, if that has
// at least two more. A stream with frames of a transfer is left alone, since the transfer would wait for the stream of that
// number. false: there is no such stream. s.mu is held.
func (s *sender) evict(p *outPeer, from netip.Prefix) bool {
	victim := s.evictableOfAddress(from)
	if victim == nil {
		victim = s.evictableOfAgent(p)
	}
	if victim == nil {
		return false
	}
	victim.shutDown()
	victim.abort()
	victim.peer.slots[victim.number].stream = nil
	s.discount(victim)
	victim.peer.wake.Broadcast()
	s.t.cfg.Logger.Debug("stream ended to make room for an agent with fewer", zap.String("peer", string(victim.peer.id)), zap.Int("number", victim.number), zap.Stringer("of", victim.from))
	return true
}

// evictableOfAddress is a stream that an address with the most can do without, if it has at least two more than another address; nil if
// there is none. Of its agents it is the one that has the most. s.mu is held.
func (s *sender) evictableOfAddress(than netip.Prefix) (victim *outStream) {
	places, over := s.from.Over(than)
	if !over || fault.On("stream-addresses-alike") {
		return nil
	}
	most := 0
	for _, other := range s.peers {
		if other.open > most && (other.open > 1 || len(other.byGrant) == 0) { // the last stream of an agent with transfers stays
			if st := other.idleStream(func(st *outStream) bool { return s.from[st.from] == places }); st != nil {
				victim, most = st, other.open
			}
		}
	}
	return victim
}

// evictableOfAgent is a stream of the agent that has the most, if it has at least two more than another agent; nil if there is none. s.mu
// is held.
func (s *sender) evictableOfAgent(than *outPeer) (victim *outStream) {
	if fault.On("stream-agents-alike") {
		return nil
	}
	most := than.open + 1
	for _, other := range s.peers {
		if other.open > most {
			if st := other.idleStream(func(*outStream) bool { return true }); st != nil {
				victim, most = st, other.open
			}
		}
	}
	return victim
}

// idleStream chooses a stream that has no transfer's frames, among those for which may is true; nil if there is none. If one of them
// cannot take frames, it is that one. Else it is the one with the highest number, since the lowest ones are in use. sender.mu is held.
func (p *outPeer) idleStream(may func(*outStream) bool) (victim *outStream) {
	for n, slot := range slices.Backward(p.slots[:]) {
		st := slot.stream
		busy := st == nil || !may(st)
		for _, out := range p.byGrant {
			busy = busy || out.sentOn(n)
		}
		if !busy && (victim == nil || victim.able() && !st.able()) {
			victim = st
		}
	}
	return victim
}
