// Each event goes to its half.

package machine

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/half"
	"github.com/kvconn/kvconn/internal/invariants"
	"github.com/kvconn/kvconn/kv"
)

// Machine is the state of all transfers of one agent. See the comment of package core
// for the user's duties.
type Machine struct {
	opt     core.Options
	layout  *kv.Layout
	closed  bool
	halves  *half.Set                                     // each half knows one peer
	fans    fans                                          // transfers of several halves
	lost    half.Remembered[core.TransferID, core.Report] // claims that were reported since they could not succeed any more
	demands map[core.TransferID]bool                      // transfers that are announced and have no load here
	steps   int                                           // for the invariants
}

// New makes a Machine for one registered layout.
func New(layout *kv.Layout, opt core.Options) *Machine {
	opt = opt.WithDefaults()
	m := &Machine{opt: opt, layout: layout, demands: map[core.TransferID]bool{}, lost: half.Remember[core.TransferID, core.Report](opt.MaxTransfers)}
	m.fans = fans{claims: map[core.TransferID]*parts{}, loads: map[core.TransferID]*loadFanIn{}, offers: map[core.TransferID]*fanOut{}}
	m.halves = half.New(layout, opt, above{m})
	return m
}

// accepted is the answer to most loads.
var accepted core.Action = core.AnswerLoad{}

// Step takes an event that has happened now, and returns what it brings about: the answer first, if the
// event has one, and then what is to be done.
func (m *Machine) Step(now time.Time, e core.Event) []core.Action {
	m.halves.Begin(e)
	var answer core.Action
	switch v := e.(type) {
	case core.LoadMessage:
		answer = accepted
		if code, reason := m.stepLoadMessage(now, v); code != core.OK || reason != "" {
			answer = core.AnswerLoad{Code: code, Reason: reason}
		}
	case core.RenewMessage:
		answer = core.AnswerRenew{Answers: m.halves.StepRenewMessage(now, v)}
	case core.FinishMessage:
		m.halves.StepFinishMessage(now, v)
	case core.RestartMessage:
		m.halves.StepRestartMessage(now, v)
	case core.Resolved:
		m.halves.StepResolved(now, v)
	case core.ResolvedParts:
		m.stepResolvedParts(now, v)
	case core.Expecting:
		m.halves.StepExpecting(now, v)
	case core.LoadAnswered:
		m.halves.StepLoadAnswered(now, v)
	case core.RenewReplied:
		m.halves.StepRenewReplied(now, v)
	case core.ProbeReplied:
		m.halves.StepProbeReplied(now, v)
	case core.MomentPassed:
		m.halves.StepMomentPassed(now, v.Moment)
	case core.MomentFailed:
		m.halves.StepMomentFailed(now, v)
	case core.Received:
		m.halves.StepReceived(now, v)
	case core.Revoked:
		m.halves.StepRevoked(now, v)
	case core.Written:
		m.halves.StepWritten(now, v)
	case core.PeerDown:
		m.halves.StepPeerDown(now, v.Peer)
	case core.Remapped:
		m.stepRemapped(now, v)
	case core.Tick:
		m.halves.Tick(now)
	case core.Resume:
		m.halves.StepResume(now)
	case core.Close:
		m.closed = true
		m.halves.Close(now)
	case core.Abandon:
		for _, id := range slices.Sorted(maps.Keys(m.fans.claims)) {
			m.fanTo(&m.fans.claims[id].fan, "", half.Always, fanNone)
		}
		m.halves.Abandon(now)
	default:
		if err := m.stepRequest(now, e); err != nil {
			answer = core.Refuse{Err: err}
		}
	}
	m.halves.Settle(now)
	if invariants.Enabled {
		// With many halves only some steps check, since a check looks at all of them.
		if m.steps++; m.steps%(1+m.halves.Len()/64) == 0 {
			m.checkInvariants()
		}
	}
	actions := m.halves.End(answer)
	if invariants.Enabled && m.opt.OnStep != nil {
		m.opt.OnStep(now, e, actions)
	}
	return actions
}

// stepRequest takes an event of the engine. If it refuses the event, the error says why.
func (m *Machine) stepRequest(now time.Time, e core.Event) error {
	switch v := e.(type) {
	case core.Announce:
		return m.stepAnnounce(now, v.ID)
	case core.PartialOffer:
		return m.stepPartialOffer(now, v)
	case core.OfferRequest:
		return m.stepOffer(now, v)
	case core.ClaimRequest:
		return m.stepClaim(now, v)
	case core.LoadRequest:
		return m.stepLoad(now, v)
	case core.Cancel:
		return m.stepCancel(now, v)
	case core.Withdraw:
		return m.stepWithdraw(now, v.ID)
	}
	panic("core: an event of no known type")
}

// Layout is the layout that the machine was made for.
func (m *Machine) Layout() *kv.Layout { return m.layout }

// Busy says whether the machine needs Ticks, since some half may be waiting.
func (m *Machine) Busy() bool { return m.halves.Len() > 0 }

// Counters count what the machine has done since New.
func (m *Machine) Counters() core.Counters { return m.halves.Count }

// Sizes counts what the machine holds; it walks over all loads.
func (m *Machine) Sizes() core.Sizes {
	s := m.halves.Sizes()
	s.FanIns, s.FanOuts = len(m.fans.claims)+len(m.fans.loads), len(m.fans.offers)
	s.Ended += m.lost.Len()
	return s
}

// OldestWait is how long the engine has waited for the report that it has waited for longest.
func (m *Machine) OldestWait(now time.Time) time.Duration { return m.halves.OldestWait(now) }

// PeerOf is the agent at the other end of a half, or of a part of one; "" if there is no such
// half, or if the agent is not known.
func (m *Machine) PeerOf(s core.Side, id core.TransferID) core.AgentID {
	peer, _ := m.halves.At(s, half.ID(id))
	return peer
}

// StateOf names the state of a half, or of a part of one; "-" if there is none.
func (m *Machine) StateOf(s core.Side, id core.TransferID) string {
	_, state := m.halves.At(s, half.ID(id))
	return state
}

func (m *Machine) stepLoadMessage(now time.Time, l core.LoadMessage) (core.Code, string) {
	if m.closed {
		return core.Closed, "the prefill agent is closing"
	}
	if checkWireID(l.ID) != nil {
		return core.Refused, "malformed transfer_id"
	}
	return m.halves.StepLoadMessage(now, l)
}

func (m *Machine) stepResolvedParts(now time.Time, r core.ResolvedParts) {
	if isPart(r.ID) {
		return
	}
	ids := make([]core.TransferID, len(r.Found))
	for i := range r.Found {
		ids[i] = PartID(r.ID, r.Found[i].Share)
	}
	m.halves.StepResolvedParts(now, r, ids)
}

func (m *Machine) stepClaim(now time.Time, r core.ClaimRequest) error {
	if err := m.checkTarget(r.ID, r.From); err != nil {
		return err
	}
	if may, err := m.mayClaim(r.ID); !may {
		return err
	}
	if m.wasLost(r.ID) { // an earlier claim of the id
		m.lost.Put(r.ID, core.Report{})
	}
	m.halves.Claim(now, r)
	return nil
}

func (m *Machine) stepLoad(now time.Time, r core.LoadRequest) error {
	if err := m.checkTarget(r.ID, r.From); err != nil {
		return err
	}
	if err := r.CheckLoad(m.layout); err != nil {
		return fmt.Errorf("%w: load %q: %w", core.ErrInvalid, string(r.ID), err)
	}
	if err := m.mayLoad(&r); err != nil {
		return err
	}
	m.halves.Count.Loaded++
	if !m.loadOfLost(&r) && !m.loadClaimedParts(now, r) {
		m.halves.Load(now, r, false)
	}
	return nil
}

func (m *Machine) checkTarget(id core.TransferID, from core.Target) error {
	if err := m.check(id); err != nil || from.Bootstrap != "" || from.EngineID != "" {
		return err
	}
	return fmt.Errorf("%w: load %q names neither a bootstrap address nor an engine_id", core.ErrInvalid, string(id))
}

func (m *Machine) overload(what string) error {
	return fmt.Errorf("%w: %d %s are under way (max_transfers); collect finished ones or raise the limit", core.ErrOverload, m.opt.MaxTransfers, what)
}

func (m *Machine) stepCancel(now time.Time, e core.Cancel) error {
	if err := m.check(e.ID); err != nil {
		return err
	}
	end := half.Ending{Code: core.Cancelled, Reason: cmp.Or(e.Reason, "cancelled by the decode engine")}
	_, _, pendingFinish := m.halves.Decodes(half.ID(e.ID))
	decodes := slices.Contains([]bool{pendingFinish, m.wasLost(e.ID), // and all that there are end:
		m.dropClaim(e.ID, half.Always, end), m.endLoad(now, e.ID, end)}, true)
	m.halves.Settle(now)
	if !decodes || m.halfOf(e.ID) != nil {
		m.cancelOffer(now, e.ID, cmp.Or(e.Reason, "cancelled by the prefill engine"))
	}
	return nil
}

// check checks the id of an engine's call.
func (m *Machine) check(id core.TransferID) error {
	if err := checkID(id); err != nil {
		return err
	}
	if m.closed {
		return core.ErrClosed
	}
	return nil
}

func checkID[T ~string](id T) error {
	if len(id) == 0 || len(id) > core.MaxTransferID {
		return fmt.Errorf("%w: transfer_id %.40q has %d bytes, want 1 to %d", core.ErrInvalid, string(id), len(id), core.MaxTransferID)
	}
	if isPart(id) {
		return fmt.Errorf("%w: transfer_id %.40q holds a NUL byte", core.ErrInvalid, string(id))
	}
	return nil
}

// checkInvariants panics when the machine contradicts itself; only in builds
// with the tag "invariants".
func (m *Machine) checkInvariants() {
	busy := m.halves.Check()
	for _, l := range m.fans.loads {
		if l.sum.Blocks > 0 {
			busy++
		}
	}
	invariants.Must(busy <= m.opt.MaxTransfers, "%d loads, over the limit", busy)
	invariants.Must(m.namedClaims() <= m.opt.MaxTransfers, "%d claims, over the limit", m.namedClaims())
	m.checkFanIns()
	m.checkFanOuts()
	m.checkDemands()
	m.checkLost()
}
