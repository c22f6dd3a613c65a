package natsbus

import (
	"errors"
	"sync"
	"time"
)

// window bounds the requests of a client that are not answered yet. While a client has
// too many, nothing is read from it.
type window struct {
	most  int
	share *share // of the bytes of the requests
	left  time.Duration

	mu      sync.Mutex
	pending map[string]pendingRequest // by the subject of its answer
	freed   chan struct{}             // closed when some are answered, or the client has gone
	gone    bool
}

type pendingRequest struct {
	bytes int64
	since time.Time
}

const (
	// maxUnanswered bounds a client's requests that are not answered yet. Agents answer at
	// once; a request that has waited longer than answerWithin does not count any more.
	maxUnanswered = 512
	answerWithin  = 5 * time.Second
	// perRequest is what a request costs beside its bytes.
	perRequest = 1 << 10
)

func newWindow(s *share) *window {
	return &window{most: maxUnanswered, left: answerWithin, share: s, pending: map[string]pendingRequest{}, freed: make(chan struct{})}
}

var errGone = errors.New("the client has gone")

// open waits for a place for a message, and counts its bytes: a request's until it is
// answered, an answer's until done is called.
func (w *window) open(reply string, size int64) (done func(), err error) {
	size += perRequest
	if reply == "" {
		w.share.add(size)
		return func() { w.share.add(-size) }, nil
	}
	for {
		w.mu.Lock()
		if w.gone {
			w.mu.Unlock()
			return nil, errGone
		}
		now := time.Now()
		oldest := now
		if len(w.pending) >= w.most {
			for subj, p := range w.pending {
				if now.Sub(p.since) >= w.left {
					w.forget(subj, p)
				} else if p.since.Before(oldest) {
					oldest = p.since
				}
			}
		}
		if len(w.pending) < w.most {
			if old, again := w.pending[reply]; again {
				w.share.add(-old.bytes)
			}
			w.pending[reply] = pendingRequest{size, now}
			w.mu.Unlock()
			w.share.add(size)
			return func() {}, nil
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
func (w *window) answered(subj string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if p, ok := w.pending[subj]; ok {
		w.forget(subj, p)
		close(w.freed)
		w.freed = make(chan struct{})
	}
}

// forget takes a request out; w.mu is held.
func (w *window) forget(subj string, p pendingRequest) {
	delete(w.pending, subj)
	w.share.add(-p.bytes)
}

// close ends a wait.
func (w *window) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.gone {
		w.gone = true
		close(w.freed)
	}
}
