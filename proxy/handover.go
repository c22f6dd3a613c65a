package proxy

import (
	"sync"
	"time"
)

// handOver is when P had computed the prompt and when D began to stream, after the request's arrival.
type handOver struct {
	mu              sync.Mutex
	prefill, decode time.Duration // 0: not yet
}

func (h *handOver) prefilled(after time.Duration) (took time.Duration, both bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.prefill = after
	return h.took()
}

func (h *handOver) streams(after time.Duration) (took time.Duration, both bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.decode = after
	return h.took()
}

func (h *handOver) both() (took time.Duration, both bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.took()
}

// took is the time between the two; h.mu is held. D's first token waits for nothing in P's answer, so P's answer may
// come after it.
func (h *handOver) took() (time.Duration, bool) {
	return max(h.decode-h.prefill, 0), h.decode > 0 && h.prefill > 0
}

// observeHandOver is called with what one of the two events made of a hand-over.
func (p *Proxy) observeHandOver(took time.Duration, both bool) {
	if both {
		p.metrics.handOver.Observe(took.Seconds())
	}
}
