package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// Signals that are being handled at a time, of all peers and of one: what is left
// of the bus's handlers answers loads and renewals.
const (
	maxSignals     = 16
	maxSignalsEach = 4
)

// codeBusy answers a signal: ask again in a moment. It ends no transfer.
const codeBusy core.Code = 98

// busyPause is how long who was answered so waits.
const busyPause = 20 * time.Millisecond

// signalGate bounds those that are being handled.
type signalGate struct {
	mu  sync.Mutex
	all int
	of  map[core.AgentID]int
}

func (s *signalGate) enter(peer core.AgentID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all >= maxSignals || s.of[peer] >= maxSignalsEach {
		return false
	}
	if s.of == nil {
		s.of = map[core.AgentID]int{}
	}
	s.all++
	s.of[peer]++
	return true
}

func (s *signalGate) leave(peer core.AgentID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all--
	if s.of[peer]--; s.of[peer] == 0 {
		delete(s.of, peer)
	}
}

// serveSignal hands a message to the transport of that name, from those only that
// have said hello or were found.
func (a *Agent) serveSignal(from core.AgentID, msg *wire.Signal) *wire.Reply {
	a.mu.Lock()
	t := a.transport
	a.mu.Unlock()
	if t == nil || a.peers.get(from) == nil {
		return &wire.Reply{Code: int(core.SayHello), Reason: "say hello first"}
	}
	w, ok := t.named(msg.Transport).(core.Signaller)
	if !ok {
		return refuse("a signal for transport %q: agent %s of engine %q has %s", msg.Transport, a.id, a.cfg.EngineID, t.have(nil))
	}
	if !a.signals.enter(from) {
		return &wire.Reply{Code: int(codeBusy), Reason: "other signals are being handled"}
	}
	defer a.signals.leave(from)
	answer, err := w.Signalled(from, msg.Data)
	if err == nil && len(answer) > wire.MaxSignal {
		err = fmt.Errorf("the answer has %d bytes, at most %d are carried", len(answer), wire.MaxSignal)
	}
	if err != nil {
		return refuse("%s of agent %s: %v", msg.Transport, a.id, err)
	}
	return &wire.Reply{Signal: answer}
}

// signalOf is the core.Signal of one of this agent's transports.
func (a *Agent) signalOf(transport string) core.Signal {
	return func(ctx context.Context, to core.AgentID, msg []byte) ([]byte, error) {
		if len(msg) > wire.MaxSignal {
			return nil, fmt.Errorf("signal to agent %s: %w: %d bytes, at most %d are carried", to, core.ErrTooLarge, len(msg), wire.MaxSignal)
		}
		// Without a bound of the transport's own, that of everything that meets.
		bound := time.Duration(a.cfg.ConnectTimeout)
		if end, ok := ctx.Deadline(); ok {
			bound = time.Until(end)
		}
		ctx, cancel := context.WithTimeout(ctx, bound)
		defer cancel()
		defer context.AfterFunc(a.ctx, cancel)()
		for {
			rep, err := a.ask(ctx, to, &wire.Request{Kind: wire.KindSignal, Signal: &wire.Signal{Transport: transport, Data: msg}})
			switch {
			case err != nil:
				return nil, err
			case rep.Code == 0:
				return rep.Signal, nil
			case core.Code(rep.Code) == core.SayHello:
				a.peers.suspect(to) // the next load says it
				fallthrough
			case core.Code(rep.Code) != codeBusy:
				return nil, errors.New(rep.Reason)
			}
			pause := time.NewTimer(busyPause)
			select {
			case <-pause.C:
			case <-ctx.Done():
				pause.Stop()
				return nil, fmt.Errorf("signal to agent %s: it was busy: %w", to, ctx.Err())
			}
		}
	}
}
