// Package sleep waits in a way that a context can end.
package sleep

import (
	"context"
	"time"
)

// For waits for d. If ctx ends first, it returns the context's error, also if nobody could see which was first: a process that
// was stopped for a while finds both over.
func For(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		if end, bounded := ctx.Deadline(); bounded && !time.Now().Before(end) {
			return context.DeadlineExceeded
		}
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}
