// A bus opens its home, if it has one: its own server, that of the joined port, or the cluster. When it closes, it
// closes all links.

package natsbus

import (
	"context"
	"fmt"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/hostenv"
	"github.com/kvconn/kvconn/internal/safe"
)

var _ core.Bus = (*Bus)(nil)

const inProcess = "nats://in-process:4222"

// Open connects to this agent's own server or to the cluster, if there is one.
func Open(opt Options) (*Bus, error) {
	b, err := open(opt)
	if err == nil {
		b.spawn("natsbus.sweep", b.sweep)
	}
	return b, err
}

func open(opt Options) (*Bus, error) {
	if err := opt.complete(); err != nil {
		return nil, fmt.Errorf("natsbus: %w", err)
	}
	b := &Bus{requestSlots: make(chan struct{}, maxHandlers), longSlots: make(chan struct{}, maxLong), links: map[core.Via]*entry{}, handoff: make(chan inboundRequest),
		longQueue: newLongQueue(maxArrival, opt.Identity.ownerIn), longJoinQueue: newLongQueue(maxArrival, opt.Identity.ownerIn), kick: make(chan struct{}, 1)}
	b.common = common{opt: opt, log: opt.Logger, events: b, temp: hostenv.TempDir()}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	switch {
	case opt.ClusterURL != "":
		name, err := CheckCluster(opt.ClusterURL)
		if err != nil {
			b.cancel()
			return nil, err
		}
		b.seals, b.sessionless = newSeals(opt.Identity), newSessionless(opt.Identity.ownerIn)
		b.openHome = func() (*link, error) {
			return connect(&b.common, endpoint{clusterLink, "", name, opt.ClusterURL, dialTCP, nil})
		}
	case opt.Server != nil:
		b.openHome = func() (*link, error) {
			return connect(&b.common, endpoint{homeLink, "", "this agent's own server", inProcess, opt.Server.dialContext, nil})
		}
	case opt.Join != "":
		if err := b.openJoin(); err != nil {
			b.cancel()
			return nil, err
		}
		return b, nil
	default:
		return b, nil
	}
	var err error
	if b.home, err = b.openHome(); err != nil {
		b.cancel()
		return nil, err
	}
	return b, nil
}

// Close implements core.Bus. If ctx ends before all handlers have returned, Close
// does not wait for them, and its error says so.
func (b *Bus) Close(ctx context.Context) error {
	b.mu.Lock()
	if b.closed != nil {
		closed := b.closed
		b.mu.Unlock()
		select {
		case <-closed:
			return b.err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	b.closed = make(chan struct{})
	reg, home := b.reg, b.home
	b.mu.Unlock()

	b.withdraw(ctx, home, reg)
	soon, cancel := context.WithTimeout(ctx, goodbyeWait)
	all(b.allLinks(), func(l *link) { l.quit(soon) })
	cancel()
	b.mu.Lock()
	b.down = true // from now on connectEntry closes the link that it makes
	b.mu.Unlock()
	b.cancel()

	// Handlers finish first, so that their replies still go out.
	idle := make(chan struct{})
	safe.Go("natsbus.Close", func() {
		defer close(idle)
		b.wg.Wait()
	})
	select {
	case <-idle:
	case <-ctx.Done():
		n := len(b.requestSlots) + b.longQueue.unanswered() + b.longJoinQueue.unanswered()
		b.err = fmt.Errorf("natsbus: closed while %d requests were being answered: %w", n, ctx.Err())
	}
	all(b.allLinks(), (*link).close)
	if b.seals != nil {
		b.seals.close()
		b.sessionless.close()
	}
	close(b.closed)
	return b.err
}
