// All transports close at once. If one does not end, Close gives it up and says that bytes may still land.

package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/devices"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/safe"
)

// closeResult is what transports have come to when they are closed.
type closeResult struct {
	quiet bool // all have closed, and each has said that nothing is copied: no byte moves any more
	whole bool // the devices have given back what they have, too
}

// Close closes all at once: each may take a few seconds. What a transport waits for is a peer, the kernel, or the driver, which may
// never answer. So if ctx ends first, Close waits for the transports only as long as t.further besides, and then gives up those that
// are not closed. The devices close last: transports use them to their end.
func (t *transports) Close(ctx context.Context) (closeResult, error) {
	t.closing.Store(true)
	t.devices.Closing()
	c := closing{ends: make(chan end, len(t.list)), open: t.names()}
	for _, w := range t.list {
		safe.Go("close "+w.Name(), func() { c.ends <- end{w.Name(), closed(w)} })
	}
	c.wait(ctx.Done())
	if len(c.open) > 0 {
		late, done := context.WithTimeout(context.Background(), t.further)
		c.wait(late.Done())
		done()
	}
	failed := t.devices.Close()
	c.take()
	if len(c.open) > 0 {
		open := fmt.Errorf("%w: transport %s is not closed: it may still read and write the registered memory: %w",
			devices.ErrDevice, strings.Join(c.open, ","), core.ErrMayLand)
		return closeResult{}, errors.Join(append(c.errs, failed, open)...)
	}
	err := errors.Join(append(c.errs, failed)...)
	if errors.Is(err, core.ErrMayLand) && !fault.On("node-quiet-unasked") {
		return closeResult{}, err
	}
	t.held.release()
	t.held = nil
	return closeResult{quiet: true, whole: failed == nil}, err
}

// closed closes a transport. If that panics, nobody knows what the transport still does.
func closed(w core.Transport) error {
	panicked, err := safe.Try("close "+w.Name(), w.Close)
	if panicked {
		return fmt.Errorf("transport %s: %w: it may still read and write the registered memory: %w", w.Name(), err, core.ErrMayLand)
	}
	return err
}

// end says how the close of a transport ended.
type end struct {
	name string
	err  error
}

// closing are transports that are being closed.
type closing struct {
	ends chan end
	open []string // the transports whose close has not ended
	errs []error  // the errors of the other transports
}

func (c *closing) ended(e end) {
	c.errs, c.open = append(c.errs, e.err), slices.DeleteFunc(c.open, func(name string) bool { return name == e.name })
}

// wait waits until all transports are closed, or until late.
func (c *closing) wait(late <-chan struct{}) {
	for len(c.open) > 0 {
		select {
		case e := <-c.ends:
			c.ended(e)
		case <-late:
			return
		}
	}
}

// take notes the ends that have come already.
func (c *closing) take() {
	for len(c.ends) > 0 {
		c.ended(<-c.ends)
	}
}

// drop closes the transports of a registration that has failed. The registration's error says why it has.
func (t *transports) drop() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(t.cfg.CloseTimeout))
	defer cancel()
	if _, err := t.Close(ctx); err != nil {
		t.log.Error("what a registration has begun cannot be closed", zap.Error(err))
	}
}
