package natsbus

import (
	"errors"
	"fmt"
	"sync"
	"time"
)

// window bounds the requests of a client that are not answered yet. While a client has
// too many of them, the server reads nothing from it.
type window struct {
	most    int
	share   *share // of the bytes of the requests
	queries *registryQueries
	left    time.Duration

	mu      sync.Mutex
	pending map[string]pendingRequest // by the subject of its answer
	swept   time.Time                 // when sweep was called last
	freed   chan struct{}             // closed when a request was answered, or the client has gone; nil: nobody waits
	gone    bool
	over    chan struct{} // closed when the client has gone
}

type pendingRequest struct {
	subj     string // of its answer
	bytes    int64
	since    time.Time
	answered func() // if it is a query to the registry; else nil
}

const (
	// maxUnanswered bounds a client's requests that are not answered yet. Agents answer at
	// once; a request that has waited longer than answerWithin does not count any more.
	maxUnanswered = 512
	answerWithin  = 5 * time.Second
	// perRequest is what a request costs beside its bytes.
	perRequest = 1 << 10
	// maxQueries bounds the queries of all clients that are in JetStream's queue. The queue
	// keeps the memory of what was in it once, with the 64 KiB in which each query was read.
	// If it is long, it drops the queries of all clients. If a client does not listen, nobody sees the
	// answer to its query: so after queryTimeout the query does not count any more.
	maxQueries   = 4
	queryTimeout = 100 * time.Millisecond
	// maxQuerySize bounds the bytes of one query.
	maxQuerySize = 8 << 10
)

// registryQueries are slots for the queries of all clients to the registry.
type registryQueries struct {
	slots  chan struct{} // holds a value for each slot that is taken
	within time.Duration
}

func newRegistryQueries() *registryQueries {
	return &registryQueries{make(chan struct{}, maxQueries), queryTimeout}
}

func newWindow(s *share, q *registryQueries) *window {
	return &window{most: maxUnanswered, left: answerWithin, share: s, queries: q, pending: map[string]pendingRequest{},
		over: make(chan struct{})}
}

// ask waits for a slot for a query to the registry. Who waits longest is next.
func (w *window) ask() (answered func(), err error) {
	select {
	case w.queries.slots <- struct{}{}:
	case <-w.over:
		return nil, errGone
	}
	answered = sync.OnceFunc(func() { <-w.queries.slots })
	time.AfterFunc(w.queries.within, answered)
	return answered, nil
}

var errGone = errors.New("the client has gone")

// open waits for a place for a message, and counts its bytes: a request's until it is
// answered, an answer's until done is called. Agents name another subject for each answer:
// requests with one subject would count as one. A query is a request to the registry.
func (w *window) open(reply string, size int64, query bool) (done func(), err error) {
	size += perRequest
	if reply == "" {
		w.share.add(size)
		return func() { w.share.add(-size) }, nil
	}
	var answered func()
	for {
		w.mu.Lock()
		if w.gone {
			w.mu.Unlock()
			return nil, errGone
		}
		if _, again := w.pending[reply]; again {
			w.mu.Unlock()
			return nil, fmt.Errorf("%w: a second request that wants its answer at %.80q, and the first is not answered", errProtocol, reply)
		}
		now := time.Now()
		oldest := now
		if len(w.pending) >= w.most || now.Sub(w.swept) >= w.left { // an agent does not answer all: the bytes of those count no longer either
			oldest = w.sweep(now)
		}
		if buf := len(w.pending) < w.most; buf && query && answered == nil {
			w.mu.Unlock()
			if answered, err = w.ask(); err != nil {
				return nil, err
			}
			continue
		} else if buf {
			w.pending[reply] = pendingRequest{reply, size, now, answered}
			w.mu.Unlock()
			w.share.add(size)
			return func() {}, nil
		}
		if w.freed == nil {
			w.freed = make(chan struct{})
		}
		freed := w.freed
		w.mu.Unlock()
		timer := time.NewTimer(oldest.Add(w.left).Sub(now))
		select {
		case <-freed:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// answered takes a request out whose answer is on its way to the client.
func (w *window) answered(subj []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if p, ok := w.pending[string(subj)]; ok {
		w.forget(p)
		w.wakeUp()
	}
}

// wakeUp wakes those who wait for a place; w.mu is held.
func (w *window) wakeUp() {
	if w.freed != nil {
		close(w.freed)
		w.freed = nil
	}
}

// sweep forgets the requests that have waited too long. It returns since when the oldest of the others has waited; w.mu is held.
func (w *window) sweep(now time.Time) (oldest time.Time) {
	w.swept, oldest = now, now
	for _, p := range w.pending {
		if now.Sub(p.since) >= w.left {
			w.forget(p)
		} else if p.since.Before(oldest) {
			oldest = p.since
		}
	}
	return oldest
}

// forget takes a request out; w.mu is held.
func (w *window) forget(p pendingRequest) {
	delete(w.pending, p.subj)
	w.share.add(-p.bytes)
	if p.answered != nil {
		p.answered()
	}
}

// close ends a wait.
func (w *window) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.gone {
		w.gone = true
		w.wakeUp()
		close(w.over)
	}
}
