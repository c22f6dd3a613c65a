package sleep

import (
	"context"
	"errors"
	"testing"
	"time"
)

func TestFor(t *testing.T) {
	if err := For(t.Context(), time.Nanosecond); err != nil {
		t.Error(err)
	}
	if err := For(stopped{t.Context()}, time.Nanosecond); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("after the context's deadline: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := For(ctx, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that has ended: %v", err)
	}
}

// stopped is a context whose deadline is over, and which had no chance yet to say so.
type stopped struct{ context.Context }

func (stopped) Deadline() (time.Time, bool) { return time.Now().Add(-time.Second), true }
