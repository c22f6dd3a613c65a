package tcp

import "go.uber.org/zap"

// makeRoom ends a stream of the decode agent that has the most streams, for one that has at
// least two fewer: one agent, or a few, must not keep all others out. A stream with frames of a
// transfer is left alone, since the transfer would wait for the stream of that number. false: there
// is no such stream. s.mu is held.
func (s *sender) makeRoom(p *outPeer) bool {
	var gives *outStream
	most := p.open + 1
	for _, other := range s.peers {
		if other.open > most {
			if st := other.idle(); st != nil {
				gives, most = st, other.open
			}
		}
	}
	if gives == nil {
		return false
	}
	from := gives.peer
	gives.dead = true
	gives.drop()
	from.slots[gives.number].stream = nil
	from.open--
	s.streams--
	from.wake.Broadcast()
	s.t.cfg.Logger.Debug("stream ended to make room for an agent with fewer", zap.String("peer", string(from.id)), zap.Int("number", gives.number))
	return true
}

// idle is a stream of which no transfer has frames; nil if there is none.
func (p *outPeer) idle() *outStream {
	for n := range p.slots {
		st := p.slots[n].stream
		busy := st == nil
		for _, out := range p.byGrant {
			busy = busy || out.sentOn(n)
		}
		if !busy {
			return st
		}
	}
	return nil
}
