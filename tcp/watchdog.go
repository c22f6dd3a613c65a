// One of several streams can be dead while the others live, for instance if one cable of a bundle, or one of
// many paths, is broken. The kernel finds out after StallTimeout. P finds out sooner, by looking at the
// bytes that D's kernel has acknowledged, and has D open that stream anew. As long as the path is dead, D may be
// unable to open it. So the stream counts as stalled until it moves: P sends no frames on it.

package tcp

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/internal/safe"
)

// watchdogInterval is the time between two looks. If stuckChecks looks in a row see a stream without progress,
// it counts as stuck.
const (
	watchdogInterval = time.Second
	stuckChecks      = 2
)

// startWatchdog looks at the streams while there are transfers; s.mu is held.
func (s *sender) startWatchdog() {
	if s.watchdog == nil {
		s.t.wg.Add(1)
		s.watchdog = time.AfterFunc(watchdogInterval, func() {
			defer safe.Recover("tcp watchdog")
			s.checkStreams()
		})
	}
}

// checkStreams finds the streams without progress.
func (s *sender) checkStreams() {
	var streams []*outStream
	s.mu.Lock()
	for _, p := range s.peers {
		if len(p.byGrant) == 0 {
			continue
		}
		for i := range p.slots {
			if st := p.slots[i].stream; st != nil && (p.open > 1 || st.stalled) {
				streams = append(streams, st)
			}
		}
	}
	s.mu.Unlock()
	infos := make([]*unix.TCPInfo, len(streams))
	for i, st := range streams {
		infos[i] = st.info()
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
			if st.peer.stuck == st {
				st.peer.stuck = nil
			}
			st.setStalled(false)
		} else if st.still++; infos[i].Unacked == 0 && infos[i].Notsent_bytes == 0 {
			st.still = 0
		}
	}
	for i, st := range streams {
		// A D that takes no bytes is slow on all its streams alike. If nothing comes back at
		// all, not even a closed window's answer to a probe, the path is dead.
		dead := infos[i] != nil && (infos[i].Retransmits > 0 || infos[i].Probes > 1)
		if st.still >= stuckChecks && (dead || moving[st.peer]) && st.peer.stuck == nil && st.peer.open > 1 {
			st.still, st.peer.stuck = 0, st
			st.setStalled(true)
			st.peer.wake.Broadcast()
		}
	}
	if s.closed || len(s.byID) == 0 {
		s.watchdog = nil
		s.t.wg.Done()
		return
	}
	s.watchdog.Reset(watchdogInterval)
}

// info is what the kernel says of a stream; nil if the stream has ended.
func (st *outStream) info() (info *unix.TCPInfo) {
	_ = st.raw.Control(func(fd uintptr) { // an error means that the descriptor is closed
		info, _ = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	})
	return info
}

// setStalled has other streams take frames in a stalled one's place, or lets it take frames again; s.mu is held.
func (st *outStream) setStalled(stalled bool) {
	if st.stalled == stalled {
		return
	}
	p := st.peer
	if st.stalled = stalled; stalled {
		p.tuner.reset()
	} else {
		p.tuner.opened(len(p.usable()))
	}
	p.wake.Broadcast()
}
