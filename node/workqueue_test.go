package node

import (
	"context"
	"slices"
	"sync"
	"testing"

	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// held is work that goes on when it is let.
type held struct {
	mu    sync.Mutex
	parts map[string][][]int // as they were begun
	begun chan struct{}
	let   chan struct{}
}

func newHeld() *held {
	return &held{parts: map[string][][]int{}, begun: make(chan struct{}, 1000), let: make(chan struct{})}
}

func (h *held) work(key string, part []int) {
	h.mu.Lock()
	h.parts[key] = append(h.parts[key], part)
	h.mu.Unlock()
	h.begun <- struct{}{}
	<-h.let
}

func (h *held) of(key string) [][]int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.parts[key]
}

// TestQueueWidth: as many messages of one queue run side by side as the queue is wide,
// whatever other queues do. The rest waits.
func TestQueueWidth(t *testing.T) {
	leaktest.Check(t)
	h := newHeld()
	l := &workQueues[string, int]{name: "test", width: 3, batch: 1, start: safe.Go, work: h.work}
	for i := range 5 {
		l.add("a", i)
	}
	l.add("b", 9)
	for range 4 {
		<-h.begun
	}
	if a, b := h.of("a"), h.of("b"); len(a) != 3 || len(b) != 1 {
		t.Errorf("%v and %v are being done, want 3 and 1", a, b)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	l.wait(ended)
	if !l.busy() {
		t.Error("nothing is being done")
	}
	close(h.let)
	l.wait(t.Context())
	if a := slices.Sorted(slices.Values(slices.Concat(h.of("a")...))); !slices.Equal(a, []int{0, 1, 2, 3, 4}) || l.busy() {
		t.Errorf("done are %v, busy %v", a, l.busy())
	}
}

// TestLineBatches: messages that have waited go in order, as many at a time as a batch
// holds, and of too many the oldest are dropped.
func TestLineBatches(t *testing.T) {
	leaktest.Check(t)
	h := newHeld()
	l := &workQueues[string, int]{name: "test", width: 1, batch: 3, limit: 5, start: safe.Go, work: h.work}
	l.add("a", 0)
	<-h.begun
	for i := 1; i <= 7; i++ { // two more than there is room for
		l.add("a", i)
	}
	close(h.let)
	l.wait(t.Context())
	if got := h.of("a"); len(got) != 3 || !slices.Equal(slices.Concat(got...), []int{0, 3, 4, 5, 6, 7}) || len(got[1]) != 3 {
		t.Errorf("done is %v", got)
	}
}

// TestLimiter: no more than the bounds are in, of all and of one.
func TestLimiter(t *testing.T) {
	g := limiter[string]{limit: 3, limitEach: 2}
	for i, step := range []struct {
		key  string
		want bool
	}{{"a", true}, {"a", true}, {"a", false}, {"b", true}, {"c", false}} {
		if got := g.acquire(step.key); got != step.want {
			t.Errorf("step %d: %v, want %v", i, got, step.want)
		}
	}
	g.release("a")
	if !g.acquire("c") || g.acquire("a") {
		t.Error("the place that was left is not taken once")
	}
	for _, key := range []string{"a", "b", "c"} {
		g.release(key)
	}
	if g.total != 0 || len(g.byKey) != 0 {
		t.Errorf("%d are in: %v", g.total, g.byKey)
	}
}

// busy: something waits or is being done.
func (l *workQueues[K, T]) busy() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.byKey) > 0
}
