package node

import (
	"sync"
	"time"

	"github.com/kvconn/kvconn/core"
)

// maxRevokes is how many revokes wait at a time. One of a peer that does not
// answer takes a second or two, and those behind it must not add up.
const maxRevokes = 1024

// revokes fence transfers beside the run goroutine. The machine has one under way
// for an id at most, and does nothing else with the id until it is told Revoked.
type revokes struct {
	a       *Agent
	mu      sync.Mutex
	running int
	queue   []core.TransferID // more than maxRevokes; max_transfers bounds them
}

func (r *revokes) add(id core.TransferID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.running >= maxRevokes {
		r.queue = append(r.queue, id)
		return
	}
	r.running++
	r.a.goRun("revoke", func() { r.work(id) })
}

func (r *revokes) work(id core.TransferID) {
	for {
		r.a.transport.Revoke(id)
		r.a.step(func(m *core.Machine, now time.Time) { m.Revoked(now, id) })
		r.mu.Lock()
		if len(r.queue) == 0 {
			r.running--
			r.mu.Unlock()
			return
		}
		id, r.queue = r.queue[0], r.queue[1:]
		r.mu.Unlock()
	}
}
