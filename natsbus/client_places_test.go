package natsbus

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestPlace: a request waits for a handler for maxArrival, and no longer.
func TestPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		b, handlers := &Bus{}, make(chan struct{}, 2)
		b.ctx = ctx
		handlers <- struct{}{}
		if why := b.acquire(handlers); why != "" {
			t.Errorf("one of two handlers is free: %s", why)
		}
		begin := time.Now()
		if why := b.acquire(handlers); !strings.Contains(why, "overloaded: 2 requests") || time.Since(begin) != maxArrival {
			t.Errorf("%q after %v, want that it is overloaded after %v", why, time.Since(begin), maxArrival)
		}
		time.AfterFunc(maxArrival-1, func() { <-handlers })
		if why := b.acquire(handlers); why != "" {
			t.Errorf("a handler has become free: %s", why)
		}
		time.AfterFunc(maxArrival/2, cancel)
		if why := b.acquire(handlers); why != "is closing" {
			t.Errorf("%q, want that it is closing", why)
		}
	})
}
