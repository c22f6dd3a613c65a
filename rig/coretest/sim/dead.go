// When a D dies, its P must free what it keeps: after a probe, or by leases.

package sim

import (
	"maps"
	"slices"

	"github.com/kvconn/kvconn/core"
)

// expectProbe: when P's connections to a D broke, P asks whether the D lives. When P hears
// that the D is dead, P frees what it keeps for that D.
func (a *agent) expectProbe(d *agent) {
	w := a.w
	if !d.dead || d.silent || w.plan.slow > 0 || w.plan.opt.MaxTransfers < 16 { // P forgets what has ended
		return
	}
	since, bound := w.now, w.plan.absence()+3*core.TickInterval
	if a.probing[d.id] {
		bound += w.plan.opt.PeerTimeout / 10 // one probe may get no answer
	}
	if a.now()-a.heard[d.id] >= w.plan.opt.Lease-core.TickInterval {
		return // its leases have ended, or are about to
	}
	kept := func(part core.TransferID) bool {
		return slices.Contains([]string{"ready", "partial", "sending"}, a.m.StateOf(core.SideOffer, part))
	}
	parts := d.promisedBy(a)
	for part, p := range d.claims {
		if p == a.id && !d.released[part] && !slices.Contains(parts, part) {
			parts = append(parts, part)
		}
	}
	slices.SortFunc(parts, compare)
	for _, part := range parts {
		if !kept(part) || w.reused[base(part)] || w.shared[base(part)] {
			continue
		}
		var look func()
		look = func() {
			if a.resuming { // it has ended some, and is to go on
				a.after(core.TickInterval, look)
			} else if kept(part) && a.host.disturbed <= since {
				w.fault(base(part), "%s: %v after the connections to %s, which is dead, broke, the offer of %q is still under way", a.id, w.now-since, d.id, part)
			}
		}
		a.after(bound, look)
	}
}

// expectLeases: a dead D's claims end with their own leases, even if others renew other
// shares of the same offer.
func (w *world) expectLeases(d *agent) {
	lease := w.plan.opt.Lease
	for _, part := range slices.SortedFunc(maps.Keys(d.claims), compare) {
		p := w.byID[d.claims[part]]
		if p.dead || p.m.StateOf(core.SideOffer, part) != "ready" || w.shared[base(part)] || w.reused[base(part)] {
			continue
		}
		since := w.now
		var look func()
		look = func() {
			switch {
			case p.dead || p.host.stopped || p.host.disturbed > since || p.now()-p.heard[d.id] < lease+2*core.TickInterval:
			case p.resuming: // it has ended some, and is to go on
				p.after(core.TickInterval, look)
			case p.m.StateOf(core.SideOffer, part) == "ready":
				w.fault(base(part), "%s: %v after the last word of %s, which is dead, %q is still kept for it", p.id, p.now()-p.heard[d.id], d.id, part)
			}
		}
		w.after(lease+3*core.TickInterval, look)
	}
}
