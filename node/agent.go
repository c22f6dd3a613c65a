package node

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/wire"
)

// Options are the parts that a Config cannot name; zero values get the real ones.
type Options struct {
	Logger  *zap.Logger
	Reports Reports
	Clock   core.Clock

	rdma openRDMA // tests only
}

// Agent is one open kvconn instance.
type Agent struct {
	id      core.AgentID
	cfg     Config
	log     *zap.Logger
	clock   core.Clock
	opened  time.Time // by clock
	reports Reports
	plane   *controlPlane
	bus     core.Bus
	metrics *metrics   // nil where no port is served
	allow   *allowList // whom this agent may contact
	rdma    openRDMA

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup
	closed chan struct{} // closed when Close is done

	mu          sync.Mutex
	state       agentState
	layout      *core.Layout
	machine     *core.Machine
	self        *wire.Agent
	transport   *transports
	outstanding int // accepted offers and loads without a report
	queue       []core.Action
	retracting  []*retracting
	current     currentStep
	performing  bool // the run goroutine has taken the queue and is not done
	total       Totals

	wake    chan struct{}
	peers   *peerTable
	lanes   *lanes
	outbox  *outbox
	revokes *revokes
	signals signalGate
}

type agentState int

const (
	stateOpen agentState = iota
	stateRegistering
	stateRegistered
	stateClosing
	stateClosed
)

// ErrNotRegistered: a transfer was asked for before RegisterKVCaches.
var ErrNotRegistered = errors.New("no KV caches are registered")

// Open starts an agent. It waits for the bootstrap port or the cluster, at most
// connect_timeout_s; with bootstrap_join for that port, at most join_timeout_s. The agent is not findable before RegisterKVCaches.
func Open(cfg Config, opt Options) (*Agent, error) {
	if err := cfg.Check(); err != nil {
		return nil, err
	}
	a := &Agent{id: newAgentID(), cfg: cfg, log: opt.Logger, clock: opt.Clock, reports: opt.Reports, closed: make(chan struct{}), wake: make(chan struct{}, 1)}
	if a.log == nil {
		a.log = zap.NewNop()
	}
	if a.clock == nil {
		a.clock = systemClock{}
	}
	a.opened = a.clock.Now()
	if a.reports == nil {
		a.reports = newReportQueue(4 * cfg.MaxTransfers)
	}
	a.ctx, a.cancel = context.WithCancel(context.Background())
	a.peers = newPeerTable()
	a.lanes = newLanes(a)
	a.outbox = newOutbox(a)
	a.revokes = &revokes{a: a}
	if a.rdma = opt.rdma; a.rdma == nil {
		a.rdma = newRDMA
	}
	plane, err := openControlPlane(a)
	if err != nil {
		a.cancel()
		return nil, err
	}
	a.plane, a.bus = plane, plane.bus
	a.bus.Serve(a.serve)
	a.goRun("agent", a.run)
	a.log.Info("agent open", zap.String("agent", string(a.id)), zap.String("engine_id", cfg.EngineID),
		zap.String("role", cfg.Role), zap.String("bootstrap", a.BootstrapAddress()))
	return a, nil
}

func newAgentID() core.AgentID {
	var b [15]byte
	rand.Read(b[:])
	return core.AgentID(base32.StdEncoding.EncodeToString(b[:]))
}

func (a *Agent) goRun(name string, f func()) {
	a.wg.Add(1)
	safe.Go(name, func() {
		defer a.wg.Done()
		f()
	})
}

// ID is this open agent's name; a restarted one has another.
func (a *Agent) ID() core.AgentID { return a.id }

// BootstrapAddress is the "http://host:port" that this agent serves or has joined,
// or "".
func (a *Agent) BootstrapAddress() string {
	return a.plane.address()
}

// RegisterKVCaches gives the agent the engine's paged memory, once. The memory
// must stay mapped until Close has returned. On a prefill agent the call makes
// it findable and waits for the registry, at most connect_timeout_s, or
// join_timeout_s with bootstrap_join. An agent of role bootstrap has none.
func (a *Agent) RegisterKVCaches(regions []core.Region) error {
	if a.cfg.Role == RoleBootstrap {
		return fmt.Errorf("%w: register_kv_caches on an agent of role %q: the ranks that join it register theirs", core.ErrInvalid, a.cfg.Role)
	}
	layout, err := core.NewLayout(regions)
	if err != nil {
		return fmt.Errorf("%w: register_kv_caches: %w", core.ErrInvalid, err)
	}
	a.mu.Lock()
	if err := a.enter(stateOpen); err != nil {
		a.mu.Unlock()
		return err
	}
	a.state = stateRegistering
	a.mu.Unlock()

	t, err := a.openTransports(layout)
	if err != nil {
		a.setState(stateOpen)
		return fmt.Errorf("register_kv_caches: %w", err)
	}
	self := a.describe(layout, t)
	a.mu.Lock()
	if a.state != stateRegistering { // closed meanwhile
		a.mu.Unlock()
		_ = t.Close()
		return core.ErrClosed
	}
	a.layout, a.transport, a.self = layout, t, self
	a.machine = core.New(layout, core.Options{Lease: time.Duration(a.cfg.Lease), PeerTimeout: time.Duration(a.cfg.PeerTimeout),
		EarlyLoad: time.Duration(a.cfg.EarlyLoad), Claim: time.Duration(a.cfg.Claim), MaxTransfers: a.cfg.MaxTransfers, ReportWants: a.cfg.ReportWants, ReportClaims: a.cfg.ReportClaims})
	a.mu.Unlock()
	if a.cfg.prefills() {
		bound := a.cfg.ConnectTimeout
		if a.cfg.BootstrapJoin != "" {
			bound = a.cfg.JoinTimeout
		}
		ctx, cancel := context.WithTimeout(a.ctx, time.Duration(bound))
		defer cancel()
		if err := a.bus.Register(ctx, self); err != nil {
			a.unregister()
			return fmt.Errorf("%w: register_kv_caches: the registry does not take the agent: %w", core.ErrUnreachable, err)
		}
		if err := a.plane.publish(self); err != nil {
			a.unregister()
			return fmt.Errorf("register_kv_caches: %w", err)
		}
	}
	a.mu.Lock()
	if a.state != stateRegistering {
		a.mu.Unlock()
		return core.ErrClosed // Close has taken it all back
	}
	a.state = stateRegistered
	a.mu.Unlock()
	a.log.Info("KV caches registered", zap.Int("regions", len(layout.Regions)), zap.Int("groups", len(layout.Groups)),
		zap.Uint32("blocks", layout.Groups[0].NumBlocks), zap.Uint64("block_bytes", layout.Groups[0].BlockBytes),
		zap.Stringer("transports", t))
	return nil
}

func (a *Agent) describe(l *core.Layout, t *transports) *wire.Agent {
	d := &wire.Agent{
		Version: wire.Version, ID: string(a.id), EngineID: a.cfg.EngineID,
		DPRank: a.cfg.DPRank, TPRank: a.cfg.TPRank, PPRank: a.cfg.PPRank, TPSize: a.cfg.TPSize, PPSize: a.cfg.PPSize, DPSize: a.cfg.DPSize, Joined: a.cfg.BootstrapJoin != "",
		Model: a.cfg.Model, DType: a.cfg.DType, BlockTokens: a.cfg.BlockTokens,
		Endpoints: t.endpoints(), Lacks: t.lacks, RouteInfo: a.cfg.RouteInfo,
	}
	describeShapes(d, l.Shapes())
	return d
}

// unregister takes back what RegisterKVCaches has set up, so that it can be
// called again.
func (a *Agent) unregister() {
	a.mu.Lock()
	t := a.transport
	if a.state == stateRegistering { // else Close does it
		a.layout, a.transport, a.self, a.machine, a.state = nil, nil, nil, nil, stateOpen
	}
	a.mu.Unlock()
	if t != nil {
		_ = t.Close()
	}
}

func (a *Agent) setState(s agentState) {
	a.mu.Lock()
	if a.state < stateClosing {
		a.state = s
	}
	a.mu.Unlock()
}

// enter says why a call is not possible now; a.mu is held.
func (a *Agent) enter(want agentState) error {
	switch {
	case a.state >= stateClosing:
		return core.ErrClosed
	case want == stateOpen && a.state != stateOpen:
		return fmt.Errorf("%w: KV caches are registered already", core.ErrDuplicate)
	case want == stateRegistered && a.state != stateRegistered:
		return fmt.Errorf("%w: call register_kv_caches first", ErrNotRegistered)
	}
	return nil
}

// do makes calls of the machine under the lock and hands on their actions.
func (a *Agent) do(f func(m *core.Machine, now time.Time) error) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.enter(stateRegistered); err != nil {
		return err
	}
	err := f(a.machine, a.clock.Now())
	a.collect()
	return err
}

// step feeds the machine an event, also while the agent closes.
func (a *Agent) step(f func(m *core.Machine, now time.Time)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.machine != nil {
		f(a.machine, a.clock.Now())
		a.collect()
	}
}

// collect moves the machine's actions on; a.mu is held. Reports go to the
// engine at once, the rest to the run goroutine, in order.
func (a *Agent) collect() {
	n := len(a.queue)
	for _, act := range a.machine.Actions() {
		if r, ok := act.(core.Report); ok {
			switch r.Side {
			case core.SideClaim: // the machine counts these itself
				a.logReport(r)
				r.Reason = a.explain(r)
				a.reports.Push(r)
				continue
			case core.SideWant:
				a.outstanding--
				r.Reason = a.explain(r)
				a.reports.Push(r)
				continue
			}
			a.outstanding--
			r.Transport = a.transport.ended(r)
			a.total.add(r)
			a.metrics.observe(r)
			a.logReport(r)
			r.Reason = a.explain(r)
			a.reports.Push(r)
			continue
		}
		a.queue = append(a.queue, act)
	}
	if len(a.retracting) > 0 {
		a.checkRetracting()
	}
	if len(a.queue) > n || a.machine.Busy() {
		a.signal()
	}
}

func (a *Agent) signal() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// room says why n more transfers cannot be accepted; a.mu is held. The machine counts
// the claims that may be reported, since most end without.
func (a *Agent) room(n int) error {
	busy, unread := a.outstanding+a.machine.Untold(), a.reports.Unread()
	if busy+unread+n > a.reports.Capacity() {
		return fmt.Errorf("%w: %d under way and %d finished ones not collected, %d more do not fit (max_transfers)", core.ErrOverload, busy, unread, n)
	}
	return nil
}

// each accepts a batch in order. The first that is refused ends it: what was
// before it is accepted, and n says how many that are.
func each[T any](a *Agent, list []T, reports int, f func(m *core.Machine, now time.Time, v T) error) (n int, err error) {
	err = a.do(func(m *core.Machine, now time.Time) error {
		for _, v := range list {
			if err := a.room(reports); err != nil {
				return err
			}
			a.outstanding += reports
			if err := f(m, now, v); err != nil {
				a.outstanding -= reports
				return err
			}
			n++
		}
		return nil
	})
	return n, err
}

// Announce tells that the engine knows these requests and works on them, so
// that D waits as long as it takes; with report_wants each gets a report of side
// want when D has room for it. Returns how many were accepted.
func (a *Agent) Announce(ids []core.TransferID) (int, error) {
	if !a.cfg.prefills() {
		return 0, fmt.Errorf("%w: announce on an agent of role %q", core.ErrInvalid, a.cfg.Role)
	}
	reports := 0
	if a.cfg.ReportWants {
		reports = 1
	}
	return each(a, ids, reports, func(m *core.Machine, now time.Time, id core.TransferID) error { return m.Announce(now, id) })
}

// Offer tells that blocks hold transfers. The blocks belong to the transfer
// until its report. Returns how many were accepted.
func (a *Agent) Offer(offers []core.OfferRequest) (int, error) {
	if !a.cfg.prefills() {
		return 0, fmt.Errorf("%w: offer on an agent of role %q", core.ErrInvalid, a.cfg.Role)
	}
	a.endStep(nil)
	return each(a, offers, 1, func(m *core.Machine, now time.Time, o core.OfferRequest) error { return m.Offer(now, o) })
}

// Claim tells prefill engines that this engine will load transfers as soon as
// it has blocks for them, so that they are kept however long that takes. A
// claim ends by StartLoad or Cancel and has no report, unless with report_claims a
// load could only fail: then it ends by a report of side claim. Returns how many
// were accepted.
func (a *Agent) Claim(claims []core.ClaimRequest) (int, error) {
	if !a.cfg.decodes() {
		return 0, fmt.Errorf("%w: claim on an agent of role %q", core.ErrInvalid, a.cfg.Role)
	}
	return each(a, claims, 0, func(m *core.Machine, now time.Time, c core.ClaimRequest) error {
		if a.cfg.ReportClaims {
			if err := a.room(1); err != nil {
				return err
			}
		}
		return m.Claim(now, c)
	})
}

// StartLoad asks for transfers in the engine's blocks. The blocks belong to the
// transfer until its report. Returns how many were accepted.
func (a *Agent) StartLoad(loads []core.LoadRequest) (int, error) {
	if !a.cfg.decodes() {
		return 0, fmt.Errorf("%w: start_load on an agent of role %q", core.ErrInvalid, a.cfg.Role)
	}
	return each(a, loads, 1, func(m *core.Machine, now time.Time, l core.LoadRequest) error { return m.Load(now, l) })
}

// Cancel ends this agent's halves of transfers; each still gets its report. An
// id that is not known here is remembered: the peer's half is refused.
func (a *Agent) Cancel(ids []core.TransferID, reason string) (int, error) {
	a.endStep(ids)
	return each(a, ids, 0, func(m *core.Machine, now time.Time, id core.TransferID) error { return m.Cancel(now, id, reason) })
}

// GetFinished returns the reports since the last call; it never waits. Only
// with the Reports that Open made itself.
func (a *Agent) GetFinished() []core.Report {
	if q, ok := a.reports.(*reportQueue); ok {
		return q.take()
	}
	return nil
}

// Finished has a value when GetFinished has something.
func (a *Agent) Finished() <-chan struct{} {
	if q, ok := a.reports.(*reportQueue); ok {
		return q.ready
	}
	return nil
}

// goodbye is what Close keeps of its time to withdraw the agent, when transfers
// do not end in time.
const goodbye = time.Second

// Close ends every transfer (each gets its report, with code closed), waits
// until no byte can land any more, and withdraws the agent. It is bounded by
// close_timeout_s, and a few seconds more if the embedded server does not stop.
// A second call waits for the first one and returns ErrClosed.
func (a *Agent) Close() error {
	a.mu.Lock()
	if a.state >= stateClosing {
		a.mu.Unlock()
		<-a.closed
		return core.ErrClosed
	}
	defer close(a.closed)
	a.state = stateClosing
	if a.machine != nil {
		a.machine.Close(a.clock.Now())
		a.collect()
	}
	a.mu.Unlock()

	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(a.cfg.CloseTimeout))
	defer cancel()
	draining, stop := context.WithTimeout(ctx, max(time.Duration(a.cfg.CloseTimeout)-goodbye, time.Duration(a.cfg.CloseTimeout)/2))
	defer stop()
	drained := a.drain(draining)
	var errs []error
	if a.transport != nil {
		errs = append(errs, a.transport.Close())
	}
	if !drained {
		// The transport is closed: nothing can land. The reports are still owed.
		a.step(func(m *core.Machine, now time.Time) { m.Abandon(now) })
	}
	a.lanes.wait(draining)
	a.outbox.wait(draining)
	a.cancel()
	errs = append(errs, a.plane.close(ctx))
	a.wg.Wait()
	a.mu.Lock()
	a.state = stateClosed
	a.mu.Unlock()
	a.log.Info("agent closed", zap.String("agent", string(a.id)))
	return errors.Join(errs...)
}

// drain waits until the machine holds nothing.
func (a *Agent) drain(ctx context.Context) bool {
	idle := func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.machine == nil || !a.machine.Busy() && len(a.queue) == 0 && !a.performing
	}
	t := time.NewTicker(2 * time.Millisecond)
	defer t.Stop()
	for !idle() {
		select {
		case <-ctx.Done():
			return false
		case <-t.C:
		}
	}
	return true
}
