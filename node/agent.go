// An agent's parts are made here, and get each other: some when it opens, the rest with the engine's memory.

package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/devices"
	"github.com/kvconn/kvconn/hostmem"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/memrelease"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/natsbus"
	"github.com/kvconn/kvconn/wire"
)

// Options are the parts that a Config cannot name; zero values get the real ones.
type Options struct {
	Logger  *zap.Logger
	Reports Reports
	Clock   core.Clock

	rdma      openRDMA // tests only, as the next three
	near      openLocal
	firstWait time.Duration
	bus       busTimes
}

// Agent is one open kvconn instance. It makes its parts and gives each part the
// other parts that it needs. No part knows the agent.
type Agent struct {
	id        core.AgentID
	identity  *natsbus.Identity
	cfg       Config
	log       *zap.Logger
	openRDMA  openRDMA
	openNear  openLocal
	firstWait time.Duration

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup
	closed chan struct{} // closed when Close is done

	machine     *lockedMachine
	completions *completions
	steps       *steps
	plane       *controlPlane
	bus         core.Bus
	peers       *peerTable
	client      *rpcClient
	signals     *signalling
	server      *server
	caches      atomic.Pointer[caches]
	counts      atomic.Pointer[natsbus.Bus] // the bus, for stats
}

// Open starts an agent. It waits for the bootstrap port or the cluster, at most
// connect_timeout_s; with bootstrap_join it waits for the port that it joins, at
// most join_timeout_s. Peers do not find the agent before RegisterKVCaches.
func Open(cfg Config, opt Options) (*Agent, error) {
	if err := cfg.Check(); err != nil {
		return nil, err
	}
	if opt.Logger == nil {
		opt.Logger = zap.NewNop()
	}
	sec, err := openSecurity(&cfg, opt.Logger)
	if err != nil {
		return nil, err
	}
	a := newAgent(cfg, opt, sec.identity)
	plane, err := openControlPlane(a.identity, &a.cfg, sec, a.log, a.completions.metrics, opt.bus)
	if err != nil {
		a.cancel()
		return nil, err
	}
	a.usePlane(plane)
	a.goRun("agent", func() { run(a.ctx, a.machine, a.perform) })
	a.goRun("memory of the engine", func() { runMemory(a.ctx, a.machine, a.performOfMemory) })
	a.goRun("memory", func() { memrelease.Run(a.ctx) })
	a.log.Info("agent open", zap.String("agent", string(a.id)), zap.String("engine_id", cfg.EngineID),
		zap.String("role", cfg.Role), zap.String("bootstrap", a.BootstrapAddress()))
	return a, nil
}

// newAgent makes the parts that need no network.
func newAgent(cfg Config, opt Options, identity *natsbus.Identity) *Agent {
	a := &Agent{id: identity.ID(), identity: identity, cfg: cfg, log: opt.Logger, openRDMA: opt.rdma, openNear: opt.near, firstWait: cmp.Or(opt.firstWait, firstWait), closed: make(chan struct{}), peers: newPeerTable()}
	if a.log == nil {
		a.log = zap.NewNop()
	}
	if a.openRDMA == nil {
		a.openRDMA = newRDMA
	}
	if a.openNear == nil {
		a.openNear = newLocal
	}
	a.ctx, a.cancel = context.WithCancel(context.Background())
	a.machine = &lockedMachine{clock: opt.Clock, reports: opt.Reports, memory: newActionQueue(), control: newActionQueue()}
	if a.machine.clock == nil {
		a.machine.clock = systemClock{}
	}
	if a.machine.reports == nil {
		a.machine.reports = newReportQueue(4 * cfg.MaxTransfers)
	}
	a.completions = &completions{cfg: &a.cfg, log: a.log, rank: a.peers.rankOf,
		via: func(r core.Report) string { return a.caches.Load().transports.ended(r) }}
	if cfg.servesPort() {
		a.completions.metrics = newMetrics(&a.cfg, a.stats)
	}
	a.machine.ended = a.completions.ended
	a.steps = &steps{log: a.log, ctx: a.ctx, offer: a.machine.OfferPartial,
		start: func(f func()) bool { return a.machine.whileRegistered(func() { a.goRun("step", f) }) }} // Close waits for goroutines that began before it
	a.client = &rpcClient{ctx: a.ctx, peers: a.peers, peerTimeout: time.Duration(cfg.PeerTimeout), retried: a.completions.retried}
	a.signals = &signalling{id: a.id, engineID: cfg.EngineID, client: a.client, bound: time.Duration(cfg.ConnectTimeout),
		limiter: limiter[core.AgentID]{limit: maxSignals, limitEach: maxSignalsEach}}
	opened := a.machine.clock.Now()
	a.server = &server{id: a.id, cfg: &a.cfg, log: a.log, age: func() time.Duration { return a.machine.clock.Now().Sub(opened) },
		caches: a.described, peers: a.peers, machine: a.machine, signals: a.signals, lifetime: a.ctx}
	return a
}

// perform does one action, unless the registration of its machine has failed.
func (a *Agent) perform(act core.Action) {
	if c := a.caches.Load(); c != nil {
		c.performer.perform(act)
	}
}

// performOfMemory does actions of core.OfMemory, likewise.
func (a *Agent) performOfMemory(list []core.Action) {
	if c := a.caches.Load(); c != nil {
		c.performer.performOfMemory(list)
	}
}

func (a *Agent) usePlane(p *controlPlane) {
	a.plane, a.bus = p, p.bus
	a.counts.Store(p.bus)
	a.client.bus, a.server.joined = p.bus, p.joined
	a.bus.Serve(a.server.serve)
}

func (a *Agent) goRun(name string, f func()) {
	a.wg.Add(1)
	safe.Go(name, func() {
		defer a.wg.Done()
		f()
	})
}

// ID is this open agent's name; a restarted agent has another. A prefill agent is known by
// this name. A decode agent is known to each prefill engine by another name.
func (a *Agent) ID() core.AgentID { return a.id }

// BootstrapAddress is the "http://host:port" that this agent serves or has joined,
// or "".
func (a *Agent) BootstrapAddress() string {
	return a.plane.address()
}

// RegisterKVCaches gives the agent the engine's paged memory, once. The memory
// must stay mapped until Close has returned. A prefill agent is in the registry when
// the call returns; it waits for that at most connect_timeout_s, or join_timeout_s
// with bootstrap_join. An agent of role bootstrap has no caches.
func (a *Agent) RegisterKVCaches(regions []kv.Region) error {
	if a.cfg.Role == RoleBootstrap {
		return fmt.Errorf("%w: register_kv_caches on an agent of role %q: the ranks that join it register theirs", core.ErrInvalid, a.cfg.Role)
	}
	layout, err := kv.NewLayout(regions)
	if err != nil {
		return fmt.Errorf("%w: register_kv_caches: %w", core.ErrInvalid, err)
	}
	if err := a.checkMemory(layout.Regions); err != nil {
		return err
	}
	if err := a.machine.setState(stateOpen, stateRegistering, nil); err != nil {
		return err
	}
	devs, err := devices.Open(layout.Regions, a.cfg.deviceOptions())
	if err != nil {
		_ = a.machine.setState(stateRegistering, stateOpen, nil)
		return fmt.Errorf("register_kv_caches: %w", err)
	}
	if err := devs.NoKernel(); err != nil {
		a.log.Warn("many small pieces of GPU memory are copied slowly: there is no copy kernel", zap.Error(err))
	}
	t := a.newTransports(devs)
	if t.held, err = holdOwnMemory(layout); err != nil {
		t.drop()
		_ = a.machine.setState(stateRegistering, stateOpen, nil)
		return fmt.Errorf("%w: register_kv_caches: %w", core.ErrInvalid, err)
	}
	o := opener{id: a.id, cfg: &a.cfg, log: a.log, allow: a.plane.sec.allow, advertised: a.plane.advertised, signal: a.signals.of, rdma: a.openRDMA, near: a.openNear, devices: devs}
	if err := o.openAll(t, layout); err != nil {
		_ = a.machine.setState(stateRegistering, stateOpen, nil)
		return fmt.Errorf("register_kv_caches: %w", err)
	}
	if err := a.use(layout, t); err != nil {
		t.drop()
		return err
	}
	if a.cfg.prefills() {
		if err := a.publish(); err != nil {
			_ = a.machine.setState(stateRegistering, stateOpen, func() { // unless Close does it
				a.machine.inner = nil
				a.caches.Store(nil)
			})
			t.drop()
			return fmt.Errorf("register_kv_caches: %w", err)
		}
	}
	if err := a.machine.setState(stateRegistering, stateRegistered, nil); err != nil {
		return err // Close has taken it all back
	}
	a.log.Info("KV caches registered", zap.Int("regions", len(layout.Regions)), zap.Int("groups", len(layout.Groups)),
		zap.Uint32("blocks", layout.Groups[0].NumBlocks), zap.Uint64("block_bytes", layout.Groups[0].BlockBytes),
		zap.Stringer("transports", t))
	return nil
}

// checkMemory refuses memory that this agent could not read, or not write if it loads.
func (a *Agent) checkMemory(regions []kv.Region) error {
	err := hostmem.Check(regions, a.cfg.decodes())
	var unknown *hostmem.UnknownError
	if errors.As(err, &unknown) { // a transfer will tell
		a.log.Warn("the KV caches' memory is not checked", zap.Error(err))
		return nil
	}
	if err != nil {
		return fmt.Errorf("%w: register_kv_caches: %w", core.ErrInvalid, err)
	}
	return nil
}

// caches are the parts of an agent that are there from RegisterKVCaches on.
type caches struct {
	self       *wire.Agent // how other agents see this one
	transports *transports
	queue      *peerQueue
	performer  *performer
}

func (a *Agent) newTransports(devs *devices.Devices) *transports {
	t := newTransports(a.id, &a.cfg, a.log, a.plane.sec.allow, a.machine, a.peers.suspect)
	t.devices, t.firstWait, t.taking = devs, a.firstWait, &a.machine.mu
	return t
}

// use makes the machine for the memory of a layout, and the parts that work for it.
func (a *Agent) use(layout *kv.Layout, t *transports) error {
	c := &caches{self: describe(&a.cfg, a.id, layout, t.endpoints(), t.lacks), transports: t}
	say := &messageSender{log: a.log, client: a.client, peers: a.peers, machine: a.machine}
	c.queue = newPeerQueue(say, func(id core.TransferID) {
		if err := t.Revoke(id); err != nil && !fault.On("node-report-unfenced") {
			a.log.Error("a load gets no report", zap.String("transfer_id", string(id)), zap.Error(err))
			return
		}
		a.machine.tell(core.Revoked{ID: id})
	}, a.goRun)
	f := &finder{cfg: &a.cfg, log: a.log, ctx: a.ctx, clock: a.machine.clock, bus: a.bus, peers: a.peers,
		layout: layout, self: c.self, transports: t, machine: a.machine, start: a.goRun}
	c.performer = &performer{log: a.log, finder: f, peers: a.peers, transports: t, queue: c.queue, machine: a.machine,
		partial: func(bytes uint64) { a.completions.count(func(t *Totals) { t.BytesPartial += bytes }) }}
	return a.machine.setState(stateRegistering, stateRegistering, func() {
		a.caches.Store(c)
		a.machine.inner = machine.New(layout, a.cfg.machineOptions())
	})
}

// machineOptions are those of the agent's machine.
func (c *Config) machineOptions() core.Options {
	return core.Options{Lease: time.Duration(c.Lease), PeerTimeout: time.Duration(c.PeerTimeout), EarlyLoad: time.Duration(c.EarlyLoad),
		MomentTimeout: time.Duration(c.MomentTimeout), Claim: time.Duration(c.Claim), Load: time.Duration(c.Load), Offer: time.Duration(c.Offer),
		MaxTransfers: c.MaxTransfers, Ends: core.Defaults.Ends, ReportDemands: c.ReportDemands, ReportClaims: c.ReportClaims}
}

// described gives a server its answers' content; nil while no KV caches are
// registered.
func (a *Agent) described() (self *wire.Agent, t *transports) {
	if c := a.caches.Load(); c != nil {
		return c.self, c.transports
	}
	return nil, nil
}

// publish makes the agent findable by its peers, and shows it to routers.
func (a *Agent) publish() error {
	bound := a.cfg.ConnectTimeout
	if a.cfg.BootstrapJoin != "" {
		bound = a.cfg.JoinTimeout
	}
	ctx, cancel := context.WithTimeout(a.ctx, time.Duration(bound))
	defer cancel()
	self := a.caches.Load().self
	if err := a.bus.Register(ctx, self); err != nil {
		return fmt.Errorf("%w: the registry does not accept this agent: %w", core.ErrUnreachable, err)
	}
	if a.plane.listing == nil {
		return nil
	}
	return a.plane.listing.addSelf(self)
}

// Stats returns the agent's counters and gauges.
func (a *Agent) Stats() Stats {
	s := a.stats()
	s.Bootstrap = a.BootstrapAddress()
	return s
}

// stats is Stats also while the agent is being opened.
func (a *Agent) stats() Stats {
	s := Stats{Agent: string(a.id), EngineID: a.cfg.EngineID}
	s.add(a.machine, a.completions, func() *transports { return a.caches.Load().transports })
	if b := a.counts.Load(); b != nil {
		s.ClusterRefused = b.Refused()
	}
	return s
}
