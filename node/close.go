package node

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/kvconn/kvconn/internal/devices"
	"github.com/kvconn/kvconn/internal/safe"
)

// goodbye is the part of close_timeout_s in which Close withdraws the agent if
// transfers do not end in time.
const goodbye = time.Second

// left waits until all goroutines have left. On devices one may wait for the driver, so ctx bounds it.
func left(ctx context.Context, wg *sync.WaitGroup, onDevices bool) error {
	if !onDevices {
		wg.Wait()
		return nil
	}
	ended := make(chan struct{})
	safe.Go("close", func() {
		wg.Wait()
		close(ended)
	})
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
	}
	late := time.NewTimer(goodbye / 10) // the others may have used up the time
	defer late.Stop()
	select {
	case <-ended:
		return nil
	case <-late.C:
		return fmt.Errorf("%w: closing the agent: a call of the driver has not returned", devices.ErrDevice)
	}
}

// drain waits until the machine holds nothing.
func drain(ctx context.Context, h *halves) bool {
	t := time.NewTicker(2 * time.Millisecond)
	defer t.Stop()
	for !h.idle() {
		select {
		case <-ctx.Done():
			return false
		case <-t.C:
		}
	}
	return true
}
