package core

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvconn/kvconn/internal/invariants"
	"github.com/kvconn/kvconn/kv"
)

// Errors of a Refuse; they are wrapped with the value and the remedy.
var (
	ErrInvalid   = errors.New("invalid argument")
	ErrDuplicate = errors.New("already under way")
	ErrOverload  = errors.New("too many transfers")
	ErrClosed    = errors.New("agent is closed")
)

// TickInterval is how often a Machine must be told Tick while it is busy.
const TickInterval = 100 * time.Millisecond

// Defaults are the Options of an agent that sets none, and the only place of these
// numbers.
var Defaults = Options{Lease: 30 * time.Second, PeerTimeout: 3 * time.Second, EarlyLoad: 30 * time.Second, Claim: time.Hour, Load: time.Hour, Offer: time.Hour, MomentTimeout: time.Minute, MaxTransfers: 4096, Ends: 16}

// Options bound a Machine's waits and queues. Zero values get the Defaults.
type Options struct {
	Lease         time.Duration // P keeps an offer that nobody renews
	PeerTimeout   time.Duration // silence after which a peer counts as gone
	EarlyLoad     time.Duration // P keeps a claim or load whose request its engine has not named
	Claim         time.Duration // D keeps a claim that no load follows
	Load          time.Duration // D waits for a load's bytes, whatever P says
	Offer         time.Duration // P keeps an offer, whatever D says
	MomentTimeout time.Duration // a moment that has not passed by then fails, and a load that D's own memory holds up for so long
	MaxTransfers  int           // claims, loads, offers, and early ones of both, each
	Ends          int           // P: offers that a step ends before Yield, see pace.go
	ReportDemands bool          // P: Report when an announced transfer is demanded
	ReportClaims  bool          // D: Report a claim that cannot succeed any more

	// OnTransition hears of each change of a half's state, for tests; may be nil.
	OnTransition func(Transition)
	// OnStep hears of each step, for tests; may be nil. Only builds with the tag "invariants" have it: without the tag
	// no event need be kept on the heap.
	OnStep func(now time.Time, e Event, actions []Action)
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
	if o.Ends <= 0 {
		o.Ends = Defaults.Ends
	}
	return o
}

// Machine is the state of all transfers of one agent. See the package comment
// for the user's duties.
type Machine struct {
	opt    Options
	layout *kv.Layout
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
	earlyOf     greedy              // who has brought them
	earlyLoads  greedy              // and their loads, each with the weight of its block ids
	probes      map[AgentID]*probe  // the D agents that P asks whether they live
	ended       tombstones

	moments map[Moment]*awaited // that halves wait for

	ends    int  // offers that this step has ended
	yielded bool // Resume is to come

	outcomes []outcome // of the halves; settle takes them
	actions  []Action
	steps    int // for the invariants
	taken    observer
}

// New makes a Machine for one registered layout.
func New(layout *kv.Layout, opt Options) *Machine {
	opt = opt.withDefaults()
	return &Machine{
		opt: opt, layout: layout, taken: observer{tell: opt.OnTransition},
		claims: newHalves[*claim](), loads: newHalves[*load](), farewells: newHalves[*farewell](),
		fans: newFans(), peers: map[AgentID]*peer{},
		offers: map[TransferID]*offer{}, demands: map[TransferID]bool{}, moments: map[Moment]*awaited{}, earlyOf: newGreedy(), earlyLoads: newGreedy(), probes: map[AgentID]*probe{},
		ended: newTombstones(opt.MaxTransfers), lost: remember[Report](opt.MaxTransfers),
	}
}

// accepted is the answer to most loads.
var accepted Action = AnswerLoad{}

// Step takes an event that has happened now, and returns what it brings about: the answer first, if the
// event has one, and then what is to be done.
func (m *Machine) Step(now time.Time, e Event) []Action {
	m.taken.begin(e)
	m.ends = 0
	var answer Action
	switch v := e.(type) {
	case LoadMessage:
		if m.actions == nil {
			m.actions = make([]Action, 0, 2) // most have an answer and a Write
		}
		answer = accepted
		if code, reason := m.stepLoadMessage(now, v); code != OK || reason != "" {
			answer = AnswerLoad{code, reason}
		}
	case RenewMessage:
		answer = AnswerRenew{m.stepRenewMessage(now, v)}
	case FinishMessage:
		m.stepFinishMessage(now, v)
	case RestartMessage:
		m.stepRestartMessage(now, v)
	case Resolved:
		m.stepResolved(now, v)
	case ResolvedParts:
		m.stepResolvedParts(now, v)
	case Expecting:
		m.stepExpecting(now, v)
	case LoadAnswered:
		m.stepLoadAnswered(now, v)
	case RenewReplied:
		m.stepRenewReplied(now, v)
	case ProbeReplied:
		m.stepProbeReplied(now, v)
	case MomentPassed:
		m.stepMomentPassed(now, v.Moment)
	case MomentFailed:
		m.stepMomentFailed(now, v)
	case Received:
		m.stepReceived(now, v)
	case Revoked:
		m.stepRevoked(now, v)
	case Written:
		m.stepWritten(now, v)
	case PeerDown:
		m.stepPeerDown(now, v.Peer)
	case Remapped:
		m.stepRemapped(now, v)
	case Tick:
		m.stepTick(now)
	case Resume:
		m.stepResume(now)
	case Close:
		m.stepClose(now)
	case Abandon:
		m.stepAbandon(now)
	default:
		if err := m.stepRequest(now, e); err != nil {
			answer = Refuse{err}
		}
	}
	if answer != nil {
		m.actions = slices.Insert(m.actions, 0, answer)
	}
	if invariants.Enabled {
		// With many halves only some steps check, since a check looks at all of them.
		if m.steps++; m.steps%(1+m.halves()/64) == 0 {
			m.checkInvariants()
		}
	}
	m.taken.end()
	actions := m.actions
	m.actions = nil
	if invariants.Enabled && m.opt.OnStep != nil {
		m.opt.OnStep(now, e, actions)
	}
	return actions
}

// stepRequest takes an event of the engine, or says why not.
func (m *Machine) stepRequest(now time.Time, e Event) error {
	switch v := e.(type) {
	case Announce:
		return m.stepAnnounce(now, v.ID)
	case PartialOffer:
		return m.stepPartialOffer(now, v)
	case OfferRequest:
		return m.stepOffer(now, v)
	case ClaimRequest:
		return m.stepClaim(now, v)
	case LoadRequest:
		return m.stepLoad(now, v)
	case Cancel:
		return m.stepCancel(now, v)
	case Withdraw:
		return m.stepWithdraw(now, v.ID)
	}
	panic("core: an event of no known type")
}

// Layout is what the machine was made for.
func (m *Machine) Layout() *kv.Layout { return m.layout }

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

func (m *Machine) stepTick(now time.Time) {
	m.noticePause(now)
	m.tickMoments(now)
	m.tickOffers(now)
	m.tickProbes(now)
	m.tickLookups(now)
	m.tickLoads(now)
	m.tickPeers(now)
}

func (m *Machine) stepCancel(now time.Time, e Cancel) error {
	id := e.ID
	if err := checkID(id); err != nil {
		return err
	}
	if m.closed {
		return ErrClosed
	}
	end := ending{Cancelled, cmp.Or(e.Reason, "cancelled by the decode engine")}
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
		m.cancelOffer(now, id, cmp.Or(e.Reason, "cancelled by the prefill engine"))
		m.settle(now)
	}
	return nil
}

func (m *Machine) stepClose(now time.Time) {
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

func (m *Machine) stepAbandon(now time.Time) {
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
