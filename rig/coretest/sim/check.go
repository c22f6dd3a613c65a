// What must have come about after a time, or at the end of a seed, is looked for.

package sim

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvconn/kvconn/core"
)

// promised notes that a P agent has said that it has a load: from now on its
// death must be noticed.
func (a *agent) promised(id core.TransferID, p core.AgentID) {
	of := partOf{a.loading[base(id)], id}
	if _, awaited := a.towards[of]; awaited { // else it is here already
		a.promises[of] = p
	}
}

// patience is how long after the last sign of life of P its loads may go on.
func (w *world) patience() time.Duration {
	d := w.plan.opt.PeerTimeout + core.TickInterval
	if w.plan.slow > 0 {
		d += 6 * time.Second // answers that were sent still come, and each step may be late
	}
	if w.plan.pulls {
		d += slowCopy // before the fence is told
	}
	return d
}

// promiseOfDead checks, when it is time, that all that was under way towards p has ended,
// whether p had answered or not, and whichever agent has its place then.
func (w *world) promiseOfDead(p *agent) {
	w.expectLost(p)
	w.expectEnds(p, func(d *agent) map[partOf]core.AgentID { return d.towards }, func(d *agent, h *half) bool {
		next := p.host.agent // that it is younger than a load can be said if hello is answered soon, and if its clock did not jump
		if next == nil || p.host.disturbed >= next.began || h.began >= next.began-w.helloTakes() {
			return next == nil
		}
		met := d.peers[next.id] // a way that was cut has held hello up for as long as that
		return met == nil || h.began+d.host.skew < met.opened
	})
}

// helloTakes is how long an answer to hello may be on its way.
func (w *world) helloTakes() time.Duration {
	if w.plan.slow > 0 {
		return connectTimeout
	}
	return 20 * time.Millisecond
}

func promised(d *agent) map[partOf]core.AgentID { return d.promises }

// promiseOfCut checks the same for a D whose way to P, or back, is cut for that long.
func (w *world) promiseOfCut(k way, lasts time.Duration) {
	for _, k := range []way{k, {k.to, k.from}} {
		if p := k.to.agent; p != nil && k.to.prefill && lasts > w.patience() {
			w.expectEnds(p, promised, func(d *agent, _ *half) bool { return d.host == k.from })
		}
	}
}

// promiseOfStopped checks the same for a process that is stopped for that long.
func (w *world) promiseOfStopped(h *host) {
	p, since := h.agent, w.now
	h.stoppedAt = since
	w.expectEnds(p, promised, func(*agent, *half) bool { return h.agent == p && h.stopped && h.stoppedAt == since })
}

// expectEnds takes the loads that, as waiting says, wait for p now. When the time is over
// it checks that each has ended, if still says that it had to.
func (w *world) expectEnds(p *agent, waiting func(d *agent) map[partOf]core.AgentID, still func(d *agent, h *half) bool) {
	for _, d := range w.all {
		if d.dead || d == p {
			continue
		}
		var parts []partOf
		for of, id := range waiting(d) {
			if id == p.id {
				parts = append(parts, of)
			}
		}
		slices.SortFunc(parts, func(x, y partOf) int { return cmp.Or(cmp.Compare(x.token, y.token), compare(x.id, y.id)) })
		since := w.now
		for _, of := range parts {
			h := d.loads[of.token]
			if h == nil {
				continue // begun by one that was refused
			}
			look := func() {
				if _, awaited := waiting(d)[of]; awaited && d.loads[of.token] == h && still(d, h) && !d.dead && !d.host.stopped && d.host.disturbed <= since {
					w.fault(h.id, "%s: %v after %s has gone, the load of %q still waits for it", d.id, w.now-since, p.id, h.id)
				}
			}
			w.after(w.patience(), func() {
				// P's last word may have been that D must ask anew. D heard it just after P had gone.
				if late := d.askedAt[of] - since; late > 0 && late <= core.TickInterval && waiting(d)[of] == p.id {
					w.after(late+core.TickInterval, look)
					return
				}
				look()
			})
		}
	}
}

// promisedBy lists the loads that a P agent has.
func (a *agent) promisedBy(p *agent) (ids []core.TransferID) {
	for of, id := range a.promises {
		if id == p.id {
			ids = append(ids, of.id)
		}
	}
	return ids
}

// checkEmpty says what an agent still holds at the end.
func (a *agent) checkEmpty() {
	w := a.w
	a.ledger.end()
	for _, f := range a.ledger.broken {
		w.fault(f.id, "%s: at the end: %s", a.id, f.text)
	}
	left := a.m.Sizes()
	left.Ended = 0
	if left != (core.Sizes{}) || a.m.Busy() {
		w.fault(a.someID(), "%s: left at the end: %+v", a.id, left)
	}
	for b := range a.host.mem {
		owner := a.host.mem[b].owner
		if id, owed := a.ledger.owed[owner]; owed {
			w.fault(id, "%s: block %d still belongs to token %d", a.id, b, owner)
		}
	}
	if n := len(a.armed) + len(a.byGrant) + len(a.writes) + len(a.loads); n > 0 {
		w.fault(a.someID(), "%s: left at the end: %d armed, %d grants, %d writes, %d loads", a.id, len(a.armed), len(a.byGrant), len(a.writes), len(a.loads))
	}
}

// someID names one of the transfers that are left.
func (a *agent) someID() core.TransferID {
	if len(a.ledger.owed) == 0 {
		return ""
	}
	return slices.Min(slices.Collect(maps.Values(a.ledger.owed)))
}

func (w *world) checkEnd() {
	for _, a := range w.all {
		if a.dead {
			continue
		}
		a.checkEmpty()
		for id := range a.ledger.claims {
			w.fault(id, "%s: at the end: the claim of %q was neither loaded nor cancelled nor reported", a.id, id)
		}
		if len(a.peerQueues)+len(a.outbox)+len(a.looking)+a.queued()+len(a.waiting) > 0 {
			w.fault("", "%s: left at the end: %d peer queues, %d in the outbox, %d look-ups, %d actions, %d requests",
				a.id, len(a.peerQueues), len(a.outbox), len(a.looking), a.queued(), len(a.waiting))
		}
		for b := range a.host.mem {
			if owner := a.host.mem[b].owner; owner != 0 {
				w.fault("", "%s: block %d still belongs to token %d at the end", a.id, b, owner)
			}
		}
	}
}

// reach is how long it takes at most, in a calm world, until one side has heard what the other has said.
const reach = 250 * time.Millisecond

// expectAbort checks, where nothing is in the way of a message, that the other side hears
// in time that this side has cancelled.
func (a *agent) expectAbort(id core.TransferID) {
	w, since := a.w, a.w.now
	if h := a.loads[a.loading[id]]; h != nil {
		h.dropped = true
	}
	switch {
	case a.host.prefill:
		w.cancelledAtP[id] = since
	case len(a.answered(id)) > 0:
		for _, part := range a.answered(id) {
			w.cancelledAtD[part] = since
		}
	default:
		return // P need not know yet: it has not answered
	}
	if !w.plan.calm || w.reused[id] {
		return
	}
	tells := a.answered(id)
	w.after(reach+w.late(), func() {
		for _, other := range w.all {
			for _, h := range other.halves() {
				part, alone := w.alone(other.host, id) // the other ranks of D's engine say it for themselves
				if other.host.prefill && (a.host.prefill || !alone || w.shared[id] || !slices.Contains(tells, part)) {
					continue
				}
				if h.id == id && h.began < since && !w.reused[id] && other.host.prefill != a.host.prefill && (other.host.prefill || h.needsAll) {
					w.fault(id, "%s: %v after %s has cancelled %q its half is still under way", other.id, reach, a.id, id)
				}
			}
		}
	})
}

// answered lists the parts of a load or claim on which P agents have said something.
func (a *agent) answered(id core.TransferID) (parts []core.TransferID) {
	for part := range a.claims {
		if base(part) == id {
			parts = append(parts, part)
		}
	}
	for of := range a.promises {
		if of.token == a.loading[id] && base(of.id) == id && !slices.Contains(parts, of.id) {
			parts = append(parts, of.id)
		}
	}
	return parts
}

// halves lists the halves that the engine waits for, in a fixed order.
func (a *agent) halves() []*half {
	var out []*half
	for _, h := range a.loads {
		out = append(out, h)
	}
	for _, h := range a.offers {
		out = append(out, h)
	}
	slices.SortFunc(out, func(x, y *half) int { return compare(x.id, y.id) })
	return out
}

// expectClaim: a claim that was made before its P was up reaches the P soon after. A claim
// of an engine needs all of the engine's ranks.
func (a *agent) expectClaim(dl *deal, k int, p *host) {
	w, id, part, up := a.w, dl.id, dl.part(k, p), dl.opensAt()
	if up <= w.now {
		return
	}
	w.after(up-w.now+w.plan.opt.PeerTimeout+2*core.TickInterval+reach, func() {
		_, loaded := a.loading[id]
		_, cancelled := w.cancelledAtP[id]
		if !loaded && !cancelled && !a.aborted[id] && !w.shared[id] && !w.reused[id] && a.claims[part] != p.agent.id {
			w.fault(id, "%s: %s can be found since %v, but the claim of %q has not reached it", a.id, p.agent.id, up, id)
		}
	})
}

// checkOffered: of a transfer that its D has cancelled, the offer ends at once.
func (a *agent) checkOffered(id core.TransferID, token uint64) {
	part, alone := a.w.alone(a.host, id)
	if at, cancelled := a.w.cancelledAtD[part]; cancelled && alone && !a.w.shared[id] && a.w.plan.calm && a.w.now > at+reach && !a.w.reused[id] && a.offers[token] != nil {
		a.w.fault(id, "%s: %q is offered %v after its decode engine has cancelled it, and nobody knows", a.id, id, a.w.now-at)
	}
}

// checkNotReleased: a claim that P has given up is not asked for.
func (a *agent) checkNotReleased(part core.TransferID) {
	if a.released[part] && a.w.plan.calm && !a.w.reused[base(part)] {
		a.w.fault(base(part), "%s: %q is loaded, though P has said that it has given the claim up", a.id, part)
	}
}

// checkLoaded: a load of a transfer that P has cancelled ends soon.
func (a *agent) checkLoaded(h *half, token uint64) {
	w := a.w
	if at, cancelled := w.cancelledAtP[h.id]; cancelled && w.plan.calm && w.now > at+reach && h.needsAll {
		a.after(reach+w.late(), func() {
			if a.loads[token] == h && !w.reused[h.id] {
				w.fault(h.id, "%s: the load of %q, which P has cancelled, still waits after %v", a.id, h.id, reach)
			}
		})
	}
}

// checkReason says whether an end is one that the world gave a reason for.
func (a *agent) checkReason(r core.Report) {
	w := a.w
	if strings.ContainsAny(r.Reason, "\x00") || strings.Contains(r.Reason, `\x00`) {
		w.fault(r.ID, "%s: the engine is told of %q by the id of a part: %s", a.id, r.ID, r.Reason)
	}
	if d := w.byID[r.Peer]; r.Side == core.SideOffer && d != nil && !d.dead && r.Reason == fmt.Sprintf("decode agent %s is gone", d.id) {
		w.fault(r.ID, "%s: %s is said to be gone, but its link only was made anew", a.id, d.id)
	}
	wrong := func() {
		w.fault(r.ID, "%s: nothing was in the way, but the %v of %q ended with %v (%s)", a.id, r.Side, r.ID, r.Code, r.Reason)
	}
	claimed := a.allClaimed(r.ID)
	_, cancelledAtP := w.cancelledAtP[r.ID]
	switch {
	case w.plan.kind && r.Code != core.OK:
		wrong()
	case !w.plan.calm || w.reused[r.ID]:
	case r.Code == core.Unreachable && a.beforeItsP(r):
	case r.Code == core.PeerLost || r.Code == core.Failed || r.Code == core.Unreachable || r.Code == core.Closed:
		wrong()
	case r.Side == core.SideOffer && r.Code == core.Expired && claimed:
		wrong()
	case r.Side == core.SideClaim && !w.shared[r.ID] && (r.Code == core.Cancelled || r.Code == core.PeerCancelled && !cancelledAtP):
		wrong()
	case r.Side == core.SideLoad && a.hasHeard(r):
		h := a.loads[r.Token]
		if h == nil { // reported twice, as the ledger says
			return
		}
		if r.Code == core.Cancelled && !h.dropped || r.Code == core.PeerCancelled && !cancelledAtP || r.Code == core.Expired ||
			r.Code == core.Refused && w.has(a.host, h) && !w.prompts[r.ID].crossed() && !(w.shared[r.ID] && w.deals[r.ID] != nil && !w.deals[r.ID].plain()) {
			wrong()
		}
	}
}

// hasHeard says whether the P agent that a load's end is from had answered.
func (a *agent) hasHeard(r core.Report) bool {
	w := a.w
	for _, part := range a.answered(r.ID) {
		p := a.claims[part]
		if p == "" {
			p = a.promises[partOf{r.Token, part}]
		}
		if w.isOf(w.byID[p].host, r.From) {
			return true
		}
	}
	return false
}

// beforeItsP says whether a load was made before its P was up.
func (a *agent) beforeItsP(r core.Report) bool {
	h := a.loads[r.Token]
	for _, p := range a.w.hosts {
		of := a.w.engines[r.From]
		if p.prefill && (p.target == r.From || of != nil && slices.Contains(of.ps, p)) && h != nil && h.began <= p.openAt {
			return true
		}
	}
	return false
}
