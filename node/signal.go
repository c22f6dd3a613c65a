// A transport's own messages go over the control plane to the peer's transport of the same name.

package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/sleep"
	"github.com/kvconn/kvconn/wire"
)

// Signals that are handled at a time, of all peers and of one. The rest of the bus's
// handlers stays free for loads and renewals.
const (
	maxSignals     = 16
	maxSignalsEach = 4
)

// busyPause is how long a sender waits after wire.AgainLater.
const busyPause = 20 * time.Millisecond

// signalling carries messages between the two ends of a transport.
type signalling struct {
	id       core.AgentID
	engineID string
	client   *rpcClient
	bound    time.Duration // of a signal whose transport sets none: that of everything that meets
	limiter  limiter[core.AgentID]
}

// serve hands a message of a peer that was met to the transport that the message names.
func (s *signalling) serve(t *transports, from core.AgentID, msg *wire.Signal) *wire.Reply {
	w, ok := t.named(msg.Transport).(core.Signaller)
	if !ok {
		return refuse("a signal came for transport %q, but agent %s of engine %q has %s", msg.Transport, s.id, s.engineID, t.have(nil))
	}
	if !s.limiter.acquire(from) {
		return &wire.Reply{Code: int(core.Failed), Again: wire.AgainLater, Reason: "other signals are being handled"}
	}
	defer s.limiter.release(from)
	answer, err := w.Signalled(from, msg.Data)
	if err == nil && len(answer) > wire.MaxSignal {
		err = fmt.Errorf("the answer has %d bytes, at most %d are carried", len(answer), wire.MaxSignal)
	}
	if err != nil {
		return refuse("%s of agent %s: %v", msg.Transport, s.id, err)
	}
	return &wire.Reply{Signal: answer}
}

// of is the core.Signal of one of this agent's transports.
func (s *signalling) of(transport string) core.Signal {
	return func(ctx context.Context, to core.AgentID, msg []byte) ([]byte, error) {
		if len(msg) > wire.MaxSignal {
			return nil, fmt.Errorf("signal to agent %s: %w: %d bytes, at most %d are carried", to, core.ErrTooLarge, len(msg), wire.MaxSignal)
		}
		bound := s.bound
		if end, ok := ctx.Deadline(); ok {
			bound = time.Until(end)
		}
		ctx, cancel := context.WithTimeout(ctx, bound)
		defer cancel()
		defer context.AfterFunc(s.client.ctx, cancel)()
		for {
			rep, err := s.client.request(ctx, to, &wire.Request{Kind: wire.KindSignal, Signal: &wire.Signal{Transport: transport, Data: msg}})
			switch {
			case err != nil:
				return nil, err
			case rep.Code == 0:
				return rep.Signal, nil
			case rep.Again == wire.AgainAfterHello:
				s.client.peers.suspect(to) // the next load looks the agent up and says hello
				fallthrough
			case rep.Again != wire.AgainLater:
				return nil, errors.New(rep.Reason)
			}
			if err := sleep.For(ctx, busyPause); err != nil {
				return nil, fmt.Errorf("signal to agent %s: the agent was busy: %w", to, err)
			}
		}
	}
}
