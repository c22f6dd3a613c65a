package core

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
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

// Options bound a Machine's waits and queues. Zero values get the defaults.
type Options struct {
	Lease        time.Duration // P keeps an offer that nobody renews; 30 s
	PeerTimeout  time.Duration // silence after which a peer counts as gone; 3 s
	EarlyLoad    time.Duration // P keeps a claim or load whose request its engine has not named; 30 s
	Claim        time.Duration // D keeps a claim that no load follows; 1 h
	MaxTransfers int           // claims, loads, offers, and early ones of both, each; 8192
	ReportWants  bool          // P: Report when an announced transfer is wanted
	ReportClaims bool          // D: Report when a claim can come to nothing any more
}

func (o Options) withDefaults() Options {
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	def(&o.Lease, 30*time.Second)
	def(&o.PeerTimeout, 3*time.Second)
	def(&o.EarlyLoad, 30*time.Second)
	def(&o.Claim, time.Hour)
	if o.MaxTransfers <= 0 {
		o.MaxTransfers = 8192
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

	loads  map[TransferID]*load
	parts  int // of them, those that are parts
	joins  map[TransferID]*join
	claims int               // of what the engine has named, those that are only claimed
	peers  map[AgentID]*peer // the P agents that loads wait for
	offers map[TransferID]*offer
	wholes map[TransferID]*whole
	wants  map[TransferID]bool // announced, and no load is here
	early  int                 // offers that no call of the engine backs yet
	// earlyBlocks is how many block ids they hold.
	earlyBlocks int
	ended       tombstones
	lost        remembered[Report] // claims of which the engine was told that they came to nothing
	probes      map[AgentID]*probe // the D agents that P asks whether they live
	count       Counters
	awake       time.Time // last time that this process is known to have run

	actions []Action
	checks  int // calls of Actions, for the invariants
}

// New makes a Machine for one registered layout.
func New(layout *Layout, opt Options) *Machine {
	opt = opt.withDefaults()
	return &Machine{
		opt: opt, layout: layout,
		loads: map[TransferID]*load{}, joins: map[TransferID]*join{}, wholes: map[TransferID]*whole{}, peers: map[AgentID]*peer{}, offers: map[TransferID]*offer{}, wants: map[TransferID]bool{}, probes: map[AgentID]*probe{},
		ended: tombstones{remember[tombstone](opt.MaxTransfers)}, lost: remember[Report](opt.MaxTransfers),
	}
}

// Actions returns what is to be done since the last call, in order.
func (m *Machine) Actions() []Action {
	if invariants.Enabled {
		// Now and then when there is much to look at: it is all looked at.
		if m.checks++; m.checks%(1+(len(m.loads)+len(m.offers))/64) == 0 {
			m.checkInvariants()
		}
	}
	a := m.actions
	m.actions = nil
	return a
}

func (m *Machine) act(a Action) { m.actions = append(m.actions, a) }

// Busy says whether anything waits for the time.
func (m *Machine) Busy() bool { return len(m.loads) > 0 || len(m.offers) > 0 }

// begin is called before the first half is added: nobody ticks while there is none.
func (m *Machine) begin(now time.Time) {
	if !m.Busy() {
		m.awake = now
	}
}

// Tick ends what has waited too long and renews leases.
func (m *Machine) Tick(now time.Time) {
	m.noticePause(now)
	m.tickOffers(now)
	m.tickProbes(now)
	m.tickLoads(now)
	m.tickPeers(now)
}

// Cancel ends the half or halves of a transfer that this agent has; each still
// gets its Report. For an id that is not known here yet it is remembered, so
// that a peer's load that comes later is refused at once.
func (m *Machine) Cancel(now time.Time, id TransferID, reason string) error {
	if err := checkID(id); err != nil {
		return err
	}
	if m.closed {
		return ErrClosed
	}
	ld := m.loads[id]
	if ld != nil {
		m.endLoad(now, ld, Cancelled, orText(reason, "cancelled by the decode engine"), true)
	}
	j := m.joins[id]
	if j != nil {
		m.endParts(now, j, Cancelled, orText(reason, "cancelled by the decode engine"))
	}
	if w := m.wholes[id]; w != nil {
		for i, of := range m.live(w) {
			if fault.On("cancel-one-share") && i > 0 {
				break
			}
			m.endOffer(now, of, Cancelled, orText(reason, "cancelled by the prefill engine"), true)
		}
		return nil
	}
	if of := m.offers[id]; of != nil || ld == nil && j == nil && !m.wasLost(id) {
		m.cancelOffer(now, id, of, orText(reason, "cancelled by the prefill engine"))
	}
	return nil
}

// Close ends every transfer; the agent may go when Busy says no.
func (m *Machine) Close(now time.Time) {
	m.closed = true
	for _, id := range sortedKeys(m.loads) {
		if ld := m.loads[id]; ld != nil {
			m.endLoad(now, ld, Closed, "the decode agent was closed", true)
		}
	}
	for _, id := range sortedKeys(m.offers) {
		m.endOffer(now, m.offers[id], Closed, "the prefill agent was closed", true)
	}
}

// Abandon reports all that Close could not bring to an end. It may be called
// only when the transports are closed, so that no byte can move.
func (m *Machine) Abandon(now time.Time) {
	for _, id := range sortedKeys(m.loads) {
		if ld := m.loads[id]; ld != nil {
			m.reportLoad(now, ld)
		}
	}
	for _, id := range sortedKeys(m.offers) {
		m.reportOffer(now, m.offers[id], TransferStats{})
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

func orText(s, def string) string {
	if s == "" {
		return def
	}
	return s
}

// tombstones remember, within a bound, how transfers ended, so that a late or
// doubled message is answered by the truth and not by a new wait.
type tombstones struct{ remembered[tombstone] }

// remembered are things about the newest transfers, as many as limit.
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

type tombstone struct {
	code    Code
	reason  string
	offered bool          // the engine has had its report
	nacked  AgentID       // the D whose transport did not expect it any more
	stats   TransferStats // of what had ended before it was offered
}

func (t *tombstones) add(id TransferID, code Code, reason string, offered bool) {
	if fault.On("no-tombstones") {
		delete(t.byID, id)
		t.order = nil
		return
	}
	t.put(id, tombstone{code: code, reason: reason, offered: offered})
}

func (t *tombstones) moved(id TransferID, s TransferStats) {
	end := t.byID[id]
	end.stats = s
	t.byID[id] = end
}

func (t *tombstones) nacked(id TransferID, by AgentID) {
	end := t.byID[id]
	end.nacked = by
	t.byID[id] = end
}

// sortedKeys gives maps one order, so that a run can be told again.
func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K {
	return slices.Sorted(maps.Keys(m))
}

// checkInvariants panics when the machine contradicts itself; only in builds
// with the tag "invariants".
func (m *Machine) checkInvariants() {
	must := func(ok bool, format string, args ...any) {
		if !ok {
			panic("core: broken invariant: " + fmt.Sprintf(format, args...))
		}
	}
	early, earlyBlocks, claims, busy, parts := 0, 0, 0, 0, 0
	for id, of := range m.offers {
		loaded, timed := of.load != nil, !of.deadline.IsZero()
		_, gone := m.ended.byID[id]
		must(!loaded || of.load.Peer == of.peer, "offer %q is loaded by another agent than %q, for which it is kept", id, of.peer)
		must(of.id == id, "offer %q is kept as %q", of.id, id)
		must(!gone, "offer %q has ended and is under way", id)
		switch of.state {
		case offerEarly:
			early++
			earlyBlocks += of.loadBlocks()
			must((of.peer != "" || of.whole != nil) && timed && of.blocks == nil, "early offer %q: peer %q, deadline %v", id, of.peer, timed)
		case offerPrefill:
			must((of.peer != "") == timed, "prefill %q: peer %q, deadline %v", id, of.peer, timed)
		case offerGrowing:
			must(loaded && timed && of.offered.IsZero() && of.sent != nil, "growing offer %q: load %v, deadline %v", id, loaded, timed)
		case offerReady:
			must(!loaded && timed, "ready offer %q: load %v, deadline %v", id, loaded, timed)
		case offerSending, offerStopping:
			must(loaded && timed && !of.sendAt.IsZero(), "sending offer %q: load %v, deadline %v, sent at %v", id, loaded, timed, of.sendAt)
		default:
			must(false, "offer %q in state %v", id, of.state)
		}
	}
	must(early == m.early && earlyBlocks == m.earlyBlocks, "%d early offers of %d blocks, counted %d of %d", early, earlyBlocks, m.early, m.earlyBlocks)
	must(early <= m.opt.MaxTransfers && len(m.offers)-early <= m.opt.MaxTransfers, "%d offers, %d early, over the limit", len(m.offers), early)
	for id, ld := range m.loads {
		must(ld.id == id && ld.state <= loadFencing, "load %q is kept as %q in state %v", ld.id, id, ld.state)
		must(!ld.given || ld.state == loadResolving, "load %q was reported in state %v", id, ld.state)
		must(!ld.claim || ld.state <= loadClaimed, "claim %q in state %v", id, ld.state)
		must(ld.state != loadClaimed || ld.claim, "load %q in state %v", id, ld.state)
		must(!ld.again || ld.state == loadFencing && (ld.tried != "" || ld.anew), "load %q starts over in state %v", id, ld.state)
		must(ld.peer != "" || ld.state == loadResolving || ld.code != OK, "load %q has no peer in state %v", id, ld.state)
		must(ld.retryAt.IsZero() || ld.claim && ld.state == loadResolving, "load %q is looked up later in state %v", id, ld.state)
		switch {
		case ld.join != nil:
			parts++
		case ld.claim:
			claims++
		case !ld.empty() && !ld.given:
			busy++
		}
		renewed := ld.state == loadWaiting || ld.state == loadClaimed && ld.code == OK
		must(!renewed || m.peers[ld.peer] != nil, "load %q waits for %q, which nobody watches", id, ld.peer)
	}
	for _, j := range m.joins {
		switch {
		case j.claim:
			claims++
		case j.blocks > 0:
			busy++
		}
	}
	m.checkJoined(must)
	m.checkWants(must)
	m.checkLost(must)
	must(parts == m.parts, "%d parts, counted %d", parts, m.parts)
	must(claims == m.claims && claims <= m.opt.MaxTransfers, "%d claims, counted %d", claims, m.claims)
	must(busy <= m.opt.MaxTransfers, "%d loads, over the limit", busy)
	must(len(m.loads) > 0 || len(m.peers) == 0, "%d peers are watched for no load", len(m.peers))
	must(len(m.offers) > 0 || len(m.probes) == 0, "%d peers are asked for no offer", len(m.probes))
	must(len(m.ended.order) == len(m.ended.byID) && len(m.ended.byID) <= m.ended.limit, "%d tombstones, %d in order", len(m.ended.byID), len(m.ended.order))
	must(len(m.lost.order) == len(m.lost.byID) && len(m.lost.byID) <= m.lost.limit, "%d lost claims, %d in order", len(m.lost.byID), len(m.lost.order))
}
