// Package sleep waits in a way that a context can end.
package sleep

import (
	"context"
	"time"
)

// For waits for d. If ctx ends first, it returns the context's error.
func For(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
