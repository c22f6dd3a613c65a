// Close ends transfers first, then transports, then the control plane, and each of these has a bound.

package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/devices"
	"github.com/kvconn/kvconn/internal/safe"
)

// deregisterTime is the part of close_timeout_s in which Close withdraws the agent if
// transfers do not end in time.
const deregisterTime = time.Second

// Close ends every transfer (each gets its report, with code closed), waits
// until no byte can land any more, and withdraws the agent. It is bounded by
// close_timeout_s. It may take a few seconds more if the embedded server does not stop, or if a transport
// does not end because a peer, the kernel or a driver does not answer.
// If bytes may land all the same, the error wraps core.ErrMayLand and says in which regions, as far as a transport
// knows. Then the transfers of these bytes get no report: bytes may land in their blocks until the process ends.
// A second call waits for the first one and returns ErrClosed.
func (a *Agent) Close() error {
	if !a.machine.close() {
		<-a.closed
		return core.ErrClosed
	}
	defer close(a.closed)
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(a.cfg.CloseTimeout))
	defer cancel()
	patience := max(time.Duration(a.cfg.CloseTimeout)-deregisterTime, time.Duration(a.cfg.CloseTimeout)/2)
	if c := a.caches.Load(); c != nil && c.transports.devices != nil {
		patience -= a.cfg.deviceCloseTime()
	}
	draining, stop := context.WithTimeout(ctx, patience)
	defer stop()
	drained := a.drain(draining)
	var errs []error
	at := closeResult{quiet: true, whole: true}
	if c := a.caches.Load(); c != nil {
		end, _ := ctx.Deadline()
		bounded, ended := context.WithDeadline(ctx, end.Add(-min(deregisterTime/2, time.Duration(a.cfg.CloseTimeout)/8)))
		var err error
		at, err = c.transports.Close(bounded)
		ended()
		errs = append(errs, err)
		if !drained && at.quiet {
			// No transport has said that a copy may land. The reports are still owed.
			a.machine.tell(core.Abandon{})
		}
		c.queue.wait(draining)
	}
	a.cancel()
	end, _ := ctx.Deadline()
	// A transport that was waited for may have used up the time. The agent must be withdrawn all the same.
	last, done := context.WithTimeout(context.Background(), max(time.Until(end), deregisterTime/2))
	defer done()
	errs = append(errs, a.plane.close(last))
	errs = append(errs, a.wait(last, end.Add(further), at))
	_ = a.machine.setState(stateClosing, stateClosed, nil)
	a.log.Info("agent closed", zap.String("agent", string(a.id)))
	return errors.Join(errs...)
}

// wait waits until the agent's goroutines have ended. If a driver does not answer, a goroutine may wait for the driver: then wait gives
// up soon after ctx has ended. If all drivers answer, nothing can hold the goroutines up for long, and they have as long as Close waits
// for everything else.
func (a *Agent) wait(ctx context.Context, until time.Time, at closeResult) error {
	ended := make(chan struct{})
	safe.Go("close", func() {
		a.wg.Wait()
		close(ended)
	})
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
	}
	bound := deregisterTime / 10 // the other parts of Close may have used up the time
	if at.quiet && at.whole {
		bound = max(bound, time.Until(until))
	}
	late := time.NewTimer(bound)
	defer late.Stop()
	select {
	case <-ended:
		return nil
	case <-late.C:
		return fmt.Errorf("%w: closing the agent: a goroutine has not ended: it waits for the driver, most likely", devices.ErrDevice)
	}
}

// drain waits until the machine holds nothing.
func (a *Agent) drain(ctx context.Context) bool {
	t := time.NewTicker(2 * time.Millisecond)
	defer t.Stop()
	for !a.machine.idle() {
		select {
		case <-ctx.Done():
			return false
		case <-t.C:
		}
	}
	return true
}
