package core

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvconn/kvconn/internal/invariants"
)

// Errors of a Machine's calls; they are wrapped with the value and the remedy.
var (
	ErrInvalid   = errors.New("invalid argument")
	ErrDuplicate = errors.New("already under way")
	ErrOverload  = errors.New("too many transfers")
	ErrClosed    = errors.New("agent is closed")
)

// TickInterval is how often Tick must be called while a Machine is busy.
const TickInterval = 100 * time.Millisecond

// Defaults are the Options of an agent that sets none, and the only place of these
// numbers.
var Defaults = Options{Lease: 30 * time.Second, PeerTimeout: 3 * time.Second, EarlyLoad: 30 * time.Second, Claim: time.Hour, Load: time.Hour, Offer: time.Hour, MomentTimeout: time.Minute, MaxTransfers: 4096}

// Options bound a Machine's waits and queues. Zero values get the Defaults.
type Options struct {
	Lease         time.Duration // P keeps an offer that nobody renews
	PeerTimeout   time.Duration // silence after which a peer counts as gone
	EarlyLoad     time.Duration // P keeps a claim or load whose request its engine has not named
	Claim         time.Duration // D keeps a claim that no load follows
	Load          time.Duration // D waits for a load's bytes, whatever P says
	Offer         time.Duration // P keeps an offer, whatever D says
	MomentTimeout time.Duration // a moment that has not passed by then fails
	MaxTransfers  int           // claims, loads, offers, and early ones of both, each
	ReportDemands bool          // P: Report when an announced transfer is demanded
	ReportClaims  bool          // D: Report a claim that cannot succeed any more

	// OnTransition hears of each change of a half's state, for tests; may be nil.
	OnTransition func(Transition)
}

func (o Options) withDefaults() Options {
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	def(&o.Lease, Defaults.Lease)
	def(&o.PeerTimeout, Defaults.PeerTimeout)
	def(&o.EarlyLoad, Defaults.EarlyLoad)
	def(&o.Claim, Defaults.Claim)
	def(&o.Load, Defaults.Load)
	def(&o.Offer, Defaults.Offer)
	def(&o.MomentTimeout, Defaults.MomentTimeout)
	if o.MaxTransfers <= 0 {
		o.MaxTransfers = Defaults.MaxTransfers
	}
	return o
}

// Machine is the state of all transfers of one agent. See the package comment
// for the user's duties.
type Machine struct {
	opt    Options
	layout *Layout
	closed bool
	seq    uint64
	count  Counters
	awake  time.Time // last time that this process is known to have run

	fans fans // above the halves, which know one peer each

	// D's half.
	claims    halves[*claim]
	loads     halves[*load]
	farewells halves[*farewell]
	peers     map[AgentID]*peer  // the P agents that claims and loads wait for
	lost      remembered[Report] // claims of which the engine was told that they could not succeed any more

	// P's half.
	offers      map[TransferID]*offer
	demands     map[TransferID]bool // announced, and no load is here
	early       int                 // offers that no call of the engine backs yet
	earlyBlocks int                 // block ids that they hold
	earlyOf     greedy              // the D agents that have brought them
	earlyLoads  greedy              // those of their loads, each with the weight of its block ids
	probes      map[AgentID]*probe  // the D agents that P asks whether they live
	ended       tombstones

	moments map[Moment]*awaited // that halves wait for

	outcomes []outcome // of the halves; settle takes them
	actions  []Action
	checks   int // calls of Actions, for the invariants
	taken    observer
}

// New makes a Machine for one registered layout.
func New(layout *Layout, opt Options) *Machine {
	opt = opt.withDefaults()
	return &Machine{
		opt: opt, layout: layout, taken: observer{tell: opt.OnTransition},
		claims: newHalves[*claim](), loads: newHalves[*load](), farewells: newHalves[*farewell](),
		fans: newFans(), peers: map[AgentID]*peer{},
		offers: map[TransferID]*offer{}, demands: map[TransferID]bool{}, moments: map[Moment]*awaited{}, earlyOf: newGreedy(), earlyLoads: newGreedy(), probes: map[AgentID]*probe{},
		ended: newTombstones(opt.MaxTransfers), lost: remember[Report](opt.MaxTransfers),
	}
}

// Actions returns the actions since the last call, in order.
func (m *Machine) Actions() []Action {
	if invariants.Enabled {
		// With many halves only some calls check, since a check looks at all of them.
		if m.checks++; m.checks%(1+m.halves()/64) == 0 {
			m.checkInvariants()
		}
	}
	m.taken.flush()
	a := m.actions
	m.actions = nil
	return a
}

// Busy says whether anything waits for the time.
func (m *Machine) Busy() bool { return m.halves() > 0 }

func (m *Machine) halves() int {
	return len(m.claims.byID) + len(m.loads.byID) + len(m.farewells.byID) + len(m.offers)
}

// begin is called before a half is added: while there is none, perhaps nobody ticks.
func (m *Machine) begin(now time.Time) {
	if !m.Busy() {
		m.awake = now
	}
}

// Tick ends claims, loads and offers that have waited too long, and renews leases.
func (m *Machine) Tick(now time.Time) {
	m.event("Tick")
	m.noticePause(now)
	m.tickMoments(now)
	m.tickOffers(now)
	m.tickProbes(now)
	m.tickLookups(now)
	m.tickLoads(now)
	m.tickPeers(now)
}

// Cancel ends this agent's half or halves of a transfer; each still gets its Report. If
// the id is not known here yet, the cancel is remembered, so that a peer's load that comes
// later is refused at once.
func (m *Machine) Cancel(now time.Time, id TransferID, reason string) error {
	if err := checkID(id); err != nil {
		return err
	}
	if m.closed {
		return ErrClosed
	}
	m.event("Cancel")
	end := ending{Cancelled, cmp.Or(reason, "cancelled by the decode engine")}
	decodes := m.farewells.get(id) != nil || m.wasLost(id)
	if c := m.claims.get(id); c != nil {
		decodes = true
		m.dropClaim(c, end)
	}
	if ld := m.loads.get(id); ld != nil {
		decodes = true
		m.endLoad(now, ld, end, true)
	}
	if m.cancelParts(now, id, end) {
		decodes = true
	}
	m.settle(now)
	if !decodes || m.halfOf(id) != nil {
		m.cancelOffer(now, id, cmp.Or(reason, "cancelled by the prefill engine"))
		m.settle(now)
	}
	return nil
}

// Close ends every transfer; the agent may go when Busy says no.
func (m *Machine) Close(now time.Time) {
	m.event("Close")
	m.closed = true
	end := ending{Closed, "the decode agent was closed"}
	for _, id := range sortedKeys(m.claims.byID) {
		m.dropClaim(m.claims.get(id), end)
		m.settle(now)
	}
	for _, id := range sortedKeys(m.loads.byID) {
		if ld := m.loads.get(id); ld != nil {
			m.endLoad(now, ld, end, true)
			m.settle(now)
		}
	}
	// P hears no more of what was being looked up. The end of another part may have made
	// farewells just now.
	m.farewells = newHalves[*farewell]()
	m.restPeers()
	for _, id := range sortedKeys(m.offers) {
		m.endOffer(now, m.offers[id], ending{Closed, "the prefill agent was closed"}, true)
		m.settle(now)
	}
}

// Abandon reports all halves that Close could not bring to an end. The user may call it
// only when the transports are closed, so that no byte can move.
func (m *Machine) Abandon(now time.Time) {
	m.event("Abandon")
	for _, id := range sortedKeys(m.claims.byID) {
		m.claimTo(m.claims.get(id), claimNone)
	}
	clear(m.fans.claims)
	for _, id := range sortedKeys(m.loads.byID) {
		if ld := m.loads.get(id); ld != nil {
			m.reportLoad(ld)
			m.settle(now)
		}
	}
	m.farewells = newHalves[*farewell]()
	m.restPeers()
	for _, id := range sortedKeys(m.offers) {
		m.reportOffer(now, m.offers[id], TransferStats{})
		m.settle(now)
	}
}

func checkID(id TransferID) error {
	if len(id) == 0 || len(id) > MaxTransferID {
		return fmt.Errorf("%w: transfer_id %.40q has %d bytes, want 1 to %d", ErrInvalid, string(id), len(id), MaxTransferID)
	}
	for i := 0; i < len(id); i++ {
		if id[i] == 0 {
			return fmt.Errorf("%w: transfer_id %.40q holds a NUL byte", ErrInvalid, string(id))
		}
	}
	return nil
}

// remembered are values of the newest transfers, as many as limit.
type remembered[T any] struct {
	limit int
	byID  map[TransferID]T
	order []TransferID
}

func remember[T any](limit int) remembered[T] {
	return remembered[T]{limit: limit, byID: map[TransferID]T{}}
}

func (r *remembered[T]) put(id TransferID, v T) {
	if _, known := r.byID[id]; !known {
		for len(r.order) >= r.limit {
			delete(r.byID, r.order[0])
			r.order = r.order[1:]
		}
		r.order = append(r.order, id)
	}
	r.byID[id] = v
}

// sortedKeys gives maps one order, so that a run can be repeated.
func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K {
	return slices.Sorted(maps.Keys(m))
}
