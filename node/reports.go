package node

import (
	"sync"

	"github.com/kvconn/kvconn/core"
)

// Reports is where an agent's reports go. Push is called under the agent's lock
// and does not wait. There is room for each report: the agent accepts a transfer
// only while those under way and the unread reports fit into Capacity.
type Reports interface {
	Push(core.Report)
	Unread() int
	Capacity() int
}

// reportQueue is the Reports of Go programs.
type reportQueue struct {
	mu    sync.Mutex
	list  []core.Report
	ready chan struct{} // holds a value while list is not empty
	cap   int
}

func newReportQueue(capacity int) *reportQueue {
	return &reportQueue{ready: make(chan struct{}, 1), cap: capacity}
}

func (q *reportQueue) Push(r core.Report) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.list = append(q.list, r)
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

func (q *reportQueue) Unread() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.list)
}

func (q *reportQueue) Capacity() int { return q.cap }

func (q *reportQueue) take() []core.Report {
	q.mu.Lock()
	defer q.mu.Unlock()
	out := q.list
	q.list = nil
	select {
	case <-q.ready:
	default:
	}
	return out
}
