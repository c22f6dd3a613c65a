package tcp

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/internal/safe"
)

// One of several streams can be dead while the others live: a cable of a bundle, one path
// of many. The kernel finds out after StallTimeout. P knows sooner, by looking at the
// bytes that D's kernel has acknowledged, and D opens that stream anew.

// lookEvery is the time between two looks, stuckLooks how many of them see a stream
// without progress before it counts as stuck.
const (
	lookEvery  = time.Second
	stuckLooks = 2
)

// startPatrol looks at the streams while there are transfers; s.mu is held.
func (s *sender) startPatrol() {
	if s.patrol == nil {
		s.t.wg.Add(1)
		s.patrol = time.AfterFunc(lookEvery, func() {
			defer safe.Recover("tcp patrol")
			s.look()
		})
	}
}

// look finds the streams without progress.
func (s *sender) look() {
	var streams []*outStream
	s.mu.Lock()
	for _, p := range s.peers {
		if len(p.byGrant) == 0 || p.open < 2 {
			continue
		}
		for i := range p.slots {
			if st := p.slots[i].stream; st != nil {
				streams = append(streams, st)
			}
		}
	}
	s.mu.Unlock()
	infos := make([]*unix.TCPInfo, len(streams))
	for i, st := range streams {
		_ = st.raw.Control(func(fd uintptr) { // an error means that it has ended
			infos[i], _ = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	moving := map[*outPeer]bool{}
	for i, st := range streams {
		if infos[i] == nil {
			continue
		}
		if infos[i].Bytes_acked != st.acked {
			moving[st.peer] = true
			st.acked, st.still = infos[i].Bytes_acked, 0
		} else if st.still++; infos[i].Unacked == 0 && infos[i].Notsent_bytes == 0 {
			st.still = 0
		}
	}
	for i, st := range streams {
		// A D that takes no bytes is slow on all its streams alike. If nothing comes back at
		// all, the way is dead.
		dead := infos[i] != nil && infos[i].Retransmits > 0
		if st.still >= stuckLooks && (dead || moving[st.peer]) && st.peer.stuck == nil {
			st.still, st.peer.stuck = 0, st
			st.peer.wake.Broadcast()
		}
	}
	if s.closed || len(s.byID) == 0 {
		s.patrol = nil
		s.t.wg.Done()
		return
	}
	s.patrol.Reset(lookEvery)
}
