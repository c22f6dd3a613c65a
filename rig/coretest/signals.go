package coretest

import (
	"context"
	"fmt"
	"sync"

	"github.com/kvconn/kvconn/core"
)

// signalHub carries the signals of one case's transports, in place of the control plane, to
// any open transport, in this process or another. A stopped process answers nobody; an
// ended one is absent.
type signalHub struct {
	mu   sync.Mutex
	open map[core.AgentID]core.Transport
}

func newSignalHub() *signalHub { return &signalHub{open: map[core.AgentID]core.Transport{}} }

// signaller is what a hub can hand a signal to.
type signaller interface {
	signalled(ctx context.Context, from core.AgentID, msg []byte) ([]byte, error)
}

func (b *signalHub) enter(id core.AgentID, tr core.Transport) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.open[id] = tr
}

func (b *signalHub) leave(id core.AgentID, tr core.Transport) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open[id] == tr {
		delete(b.open, id)
	}
}

// from is the Signal of one transport.
func (b *signalHub) from(id core.AgentID) core.Signal {
	return func(ctx context.Context, to core.AgentID, msg []byte) ([]byte, error) {
		b.mu.Lock()
		tr := b.open[to]
		b.mu.Unlock()
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		switch s := tr.(type) {
		case signaller:
			return s.signalled(ctx, id, msg)
		case core.Signaller:
			return s.Signalled(id, msg)
		}
		return nil, fmt.Errorf("%s: %w", to, core.ErrAbsent)
	}
}
