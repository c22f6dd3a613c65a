package rdma

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/internal/sleep"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// Transport is the rdma core.Transport of one agent.
type Transport struct {
	cfg    Config
	id     core.AgentID
	layout *kv.Layout
	sink   core.Sink
	signal core.Signal
	log    *zap.Logger

	memory  agentMemory
	devices []*device
	ports   []*localPort // of all devices

	stale     atomic.Pointer[error] // why the GPUs' memory is not registered
	remapping remapping

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup // goroutines of the transport, and calls of the sink
	ears   sync.WaitGroup // goroutines that wait for events of devices

	closing  sync.Mutex // held by Close
	mu       sync.Mutex
	shut     bool // no goroutine begins, nothing is told
	finished bool
	lands    error // why bytes may land for ever, the first cause

	sender   sender
	receiver receiver

	requests, doorbells, signals atomic.Uint64
}

var (
	_ core.Signaller = (*Transport)(nil)
	_ core.Cutter    = (*Transport)(nil)
)

var (
	errClosed    = fmt.Errorf("rdma %w", core.ErrTransportClosed)
	errDismissed = errors.New("the peer was dismissed")
	errRefused   = errors.New("refused")
)

// refusef makes the error whose text a peer gets as the reason.
func refusef(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errRefused, fmt.Sprintf(format, args...))
}

// New opens the devices that cfg allows, registers the memory of layout with them,
// and opens a Transport. An error says why RDMA cannot be used here. Outcomes go to sink
// until Close returns. signal sends the transport's signals.
func New(cfg Config, id core.AgentID, layout *kv.Layout, sink core.Sink, signal core.Signal) (*Transport, error) {
	if err := cfg.Check(); err != nil {
		return nil, err
	}
	t := &Transport{cfg: cfg, id: id, layout: layout, sink: sink, signal: signal, log: cfg.Logger}
	if t.log == nil {
		t.log = zap.NewNop()
	}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.remapping.held = true
	t.receiver.init(t, min(max(cfg.MaxTransfers, 1), maxSlots))
	t.sender.init(t)
	if err := t.open(); err != nil {
		t.cancel()
		return nil, err
	}
	for _, d := range t.devices {
		t.ears.Add(1)
		safe.Go("rdma events", func() {
			defer t.ears.Done()
			t.events(d)
		})
	}
	return t, nil
}

// Name implements core.Transport.
func (t *Transport) Name() string { return "rdma" }

// Endpoint implements core.Transport. Peers need no address, since signals go over the
// control plane.
func (t *Transport) Endpoint() string { return "signal" }

// Admit implements core.Transport.
func (t *Transport) Admit(peer core.AgentID) ([]byte, error) { return t.sender.admit(peer) }

// Dismiss implements core.Transport.
func (t *Transport) Dismiss(peer core.AgentID) {
	t.sender.dismiss(peer)
	t.receiver.dismiss(peer)
}

// Connect implements core.Transport.
func (t *Transport) Connect(peer core.AgentID, endpoint string, ticket []byte) error {
	return t.receiver.connect(peer, ticket)
}

// Expect implements core.Transport.
func (t *Transport) Expect(id core.TransferID, peer core.AgentID, dst []kv.Segment) ([]byte, error) {
	return t.receiver.expect(id, peer, dst)
}

// ExpectPlan implements core.Cutter. Nothing is kept of the plan: P has the keys of the regions, and
// marks count stripes.
func (t *Transport) ExpectPlan(id core.TransferID, peer core.AgentID, dst kv.Plan) ([]byte, error) {
	return t.receiver.arm(id, peer, kv.PlanBytes(dst), dst.Pieces(), t.allGPUs())
}

// Revoke implements core.Transport.
func (t *Transport) Revoke(id core.TransferID) error {
	return t.receiver.revoke(id)
}

// Write implements core.Transport.
func (t *Transport) Write(op core.WriteOp) { t.sender.write(op) }

// Extend implements core.Transport.
func (t *Transport) Extend(op core.WriteOp) { t.sender.extend(op) }

// Stop implements core.Transport.
func (t *Transport) Stop(id core.TransferID) { t.sender.stop(id) }

// Usable implements core.Signaller for transfers that the peer writes. A peer that this
// agent only writes to is not connected.
func (t *Transport) Usable(ctx context.Context, peer core.AgentID) error {
	src := t.receiver.source(peer)
	if src == nil {
		return fmt.Errorf("rdma: agent %s is not connected", peer)
	}
	for {
		busy := t.remapping.waits() // first: when it is closed, forgotten knows the outcome, and the peers have been asked
		err := t.forgotten()
		if busy != nil {
			select {
			case <-busy:
				continue
			case <-ctx.Done():
				return fmt.Errorf("rdma: the GPUs' memory is being registered again: %w", allOf(err, ctx.Err()))
			case <-t.ctx.Done():
				return errClosed
			}
		}
		if err != nil {
			return err
		}
		if err := t.unusable(); err != nil {
			return err
		}
		settled, cause := src.usable()
		if cause != errUnsettled {
			return cause
		}
		select {
		case <-settled:
		case <-ctx.Done():
			return fmt.Errorf("rdma: agent %s: %w: %w", peer, errUnsettled, ctx.Err())
		case <-t.ctx.Done():
			return errClosed
		}
	}
}

// Signalled implements core.Signaller.
func (t *Transport) Signalled(from core.AgentID, msg []byte) ([]byte, error) {
	s, err := decodeSignal(msg)
	if err != nil {
		return nil, err
	}
	var rep *reply
	switch s.Kind {
	case signalHello, signalDrain, signalBye:
		rep, err = t.sender.signalled(from, s)
	default:
		rep, err = t.receiver.signalled(from, s)
	}
	if err != nil {
		rep = &reply{Refused: shorten(err.Error())}
	}
	return rep.MarshalMsg(nil)
}

// ask sends a signal and waits for the answer.
func (t *Transport) ask(peer core.AgentID, s *signal, bound time.Duration) (*reply, error) {
	return t.askUntil(t.ctx, peer, s, bound)
}

func (t *Transport) askUntil(ctx context.Context, peer core.AgentID, s *signal, bound time.Duration) (*reply, error) {
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	msg, err := s.MarshalMsg(nil)
	if err != nil {
		return nil, err
	}
	answer, err := t.signal(ctx, peer, msg)
	if err != nil {
		return nil, err
	}
	rep, err := decodeReply(peer, answer)
	if err == nil && rep.Refused != "" {
		err = fmt.Errorf("agent %s: %w: %s", peer, errRefused, rep.Refused)
	}
	return rep, err
}

// byeBound is how long a signal of an end may take. A peer that does not hear the
// signal finds out by itself.
const byeBound = 300 * time.Millisecond

// sayBye tells a peer of an end, also while this transport closes.
func (t *Transport) sayBye(peer core.AgentID, s *signal) {
	t.goRun("rdma bye", func() { _, _ = t.askUntil(context.Background(), peer, s, byeBound) })
}

// goRun starts a goroutine that Close waits for. It returns false if Close already waits.
func (t *Transport) goRun(name string, f func()) bool {
	if !t.enter() {
		return false
	}
	safe.Go(name, func() {
		defer t.wg.Done()
		f()
	})
	return true
}

// enter makes Close wait until t.wg.Done is called. It returns false if Close already waits.
func (t *Transport) enter() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.shut {
		return false
	}
	t.wg.Add(1)
	return true
}

// tell calls the sink, unless Close already waits. Close waits for the call.
func (t *Transport) tell(f func(s core.Sink)) {
	if t.enter() {
		defer t.wg.Done()
		f(t.sink)
	}
}

func (t *Transport) down(peer core.AgentID, err error) {
	t.tell(func(s core.Sink) { s.PeerDown(peer, err) })
}

// pause waits. It returns false if the transport was closed meanwhile.
func (t *Transport) pause(d time.Duration) bool { return sleep.For(t.ctx, d) == nil }

// Close implements core.Transport.
func (t *Transport) Close() error {
	t.closing.Lock()
	defer t.closing.Unlock()
	if t.finished {
		return nil
	}
	t.finished = true
	lands := t.receiver.close() // first: the sender may wait for its outcomes, and nothing may land meanwhile
	t.sender.close()
	t.cancel()
	t.mu.Lock()
	t.shut = true
	t.mu.Unlock()
	t.wg.Wait()
	err := t.closeDevices() // ends the goroutines that wait for events
	t.ears.Wait()
	t.mu.Lock()
	defer t.mu.Unlock()
	return errors.Join(lands, t.lands, err)
}

// mayLand notes for Close that bytes may land for ever.
func (t *Transport) mayLand(cause error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.lands == nil {
		t.lands = cause
	}
}

// shorten bounds a text for the wire.
func shorten(s string) string {
	const most = 500
	if len(s) <= most {
		return s
	}
	for i := most; i > 0; i-- {
		if s[i]&0xc0 != 0x80 { // not in the middle of a rune
			return s[:i]
		}
	}
	return ""
}

// posted counts the writes and completions of a chain.
func (t *Transport) posted(chain []verbs.Write) {
	t.doorbells.Add(1)
	t.requests.Add(uint64(len(chain)))
	for i := range chain {
		if chain[i].Flags&verbs.Signaled != 0 {
			t.signals.Add(1)
		}
	}
}

// Counters are the transport's own numbers in the agent's statistics: writes, doorbells
// (chains) and completions that were asked for, all since it was opened, and the open
// lanes of both halves.
func (t *Transport) Counters() map[string]uint64 {
	lanes := t.sender.lanes() + t.receiver.lanes()
	return map[string]uint64{"writes": t.requests.Load(), "doorbells": t.doorbells.Load(), "signals": t.signals.Load(), "lanes": uint64(lanes)}
}
