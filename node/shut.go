package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/internal/devices"
	"github.com/kvconn/kvconn/internal/safe"
)

// shut is what transports have come to when they are closed.
type shut struct {
	quiet   bool // all have closed: no byte moves any more
	answers bool // the driver does, as it does where there are no devices
}

// Close closes all at once: each may take a few seconds. What a transport waits for is a peer, and bounded, or the driver, which may never
// answer. So if ctx ends first, Close closes the devices: if the driver has let go of all, it waits on for the transports. Else it
// gives up those that are not closed.
func (t *transports) Close(ctx context.Context) (shut, error) {
	t.closing.Store(true)
	t.devices.Closing()
	c := closing{ends: make(chan end, len(t.list)), open: t.names()}
	for _, w := range t.list {
		safe.Go("close "+w.Name(), func() { c.ends <- end{w.Name(), w.Close()} })
	}
	var late <-chan struct{}
	if t.devices != nil {
		late = ctx.Done()
	}
	c.wait(late)
	failed := t.devices.Close()
	if failed == nil {
		c.wait(nil)
	}
	c.take()
	if len(c.open) > 0 {
		open := fmt.Errorf("%w: transport %s is not closed: it may still read and write the registered memory",
			devices.ErrDevice, strings.Join(c.open, ","))
		return shut{}, errors.Join(append(c.errs, failed, open)...)
	}
	t.held.release()
	t.held = nil
	return shut{quiet: true, answers: failed == nil}, errors.Join(append(c.errs, failed)...)
}

// end is that of a transport.
type end struct {
	name string
	err  error
}

// closing are transports that are being closed.
type closing struct {
	ends chan end
	open []string // those that have not ended
	errs []error  // of the others
}

func (c *closing) ended(e end) {
	c.errs, c.open = append(c.errs, e.err), slices.DeleteFunc(c.open, func(name string) bool { return name == e.name })
}

// wait waits until all have ended, or until it is late.
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

// take takes the ends that are there.
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
