// How a P is looked up, as node's finder does it.

package sim

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
)

// resolve answers from memory or starts one look-up per target.
func (a *agent) resolve(r core.Resolve) {
	if id, known := a.byTarget[r.From]; known && r.Part && !r.Fresh {
		a.resolved(r, id, core.OK, "")
		return
	}
	if found, known := a.byEngine[r.From]; known && !r.Fresh {
		a.resolvedEngine(r, found)
		return
	}
	a.looking[r.From] = append(a.looking[r.From], r)
	switch {
	case len(a.looking[r.From]) > 1:
	case r.Part:
		a.findOne(r.From)
	default:
		a.findAll(r.From)
	}
}

func (a *agent) findOne(t core.Target) {
	a.find(t, a.w.now+connectTimeout, func(id core.AgentID, code core.Code, why string) {
		if code == core.OK {
			a.byTarget[t] = id
		}
		for _, r := range a.looked(t) {
			a.resolved(r, id, code, why)
		}
	})
}

// findAll looks up all ranks of an engine that this agent loads from. The first rank that is
// not found ends the look-up, as node's does: a load that comes afterwards begins another.
func (a *agent) findAll(t core.Target) {
	dl := a.w.engines[t]
	found := a.w.found(dl, slices.Index(dl.ds, a.host))
	left, over := len(found), false
	for i := range found {
		f := &found[i]
		a.find(f.From, a.w.now+connectTimeout, func(id core.AgentID, code core.Code, why string) {
			if f.Peer = id; code == core.OK {
				a.byTarget[f.From] = id
			}
			left--
			switch {
			case over:
			case code != core.OK:
				over = true
				for _, r := range a.looked(t) {
					a.resolved(r, "", code, why)
				}
			case left == 0:
				a.byEngine[t] = found
				for _, r := range a.looked(t) {
					a.resolvedEngine(r, found)
				}
			}
		})
	}
}

// looked takes the requests that wait for a look-up that has ended.
func (a *agent) looked(t core.Target) []core.Resolve {
	waiting := a.looking[t]
	delete(a.looking, t)
	return waiting
}

// resolvedEngine tells of an engine's ranks, of which there may be but one.
func (a *agent) resolvedEngine(r core.Resolve, found []core.FoundPart) {
	if len(found) == 1 && found[0].Share.Of == 1 {
		a.resolved(r, found[0].Peer, core.OK, "")
		return
	}
	a.w.faults["found-parts"]++
	found = slices.Clone(found)
	var parts, peers, opened, of []string
	for i := range found {
		f := &found[i]
		age := a.peers[f.Peer].opened
		f.Opened = time.Unix(0, 0).Add(age)
		parts = append(parts, fmt.Sprintf("%s %s %d/%d@%d", f.From.Bootstrap, f.From.EngineID, f.Share.K, f.Share.Of, f.Share.Source))
		peers, opened, of = append(peers, string(f.Peer)), append(opened, age.String()), append(of, list(f.Regions))
	}
	told := map[core.TransferID]core.AgentID{}
	for i := range found {
		told[machine.PartID(r.ID, found[i].Share)] = found[i].Peer
	}
	defer a.checkTold(r, told)()
	a.checkStale(r.ID, r.Seq, func() {
		a.event(core.ResolvedParts{ID: r.ID, Seq: r.Seq, Found: found},
			"found %s seq=%d parts=[%s] peers=[%s] opened=[%s] of=[%s]", r.ID, r.Seq,
			strings.Join(parts, " | "), list(peers), list(opened), strings.Join(of, " | "))
	})
}

func (a *agent) resolved(r core.Resolve, id core.AgentID, code core.Code, why string) {
	peer := ""
	if id != "" {
		peer = " peer=" + string(id)
	}
	var opened time.Time
	if id != "" {
		age := a.peers[id].opened
		opened = time.Unix(0, 0).Add(age)
		peer += fmt.Sprintf(" opened=%v", age)
	}
	if code == core.OK {
		defer a.checkTold(r, map[core.TransferID]core.AgentID{r.ID: id})()
	}
	a.checkStale(r.ID, r.Seq, func() {
		a.event(core.Resolved{ID: r.ID, Seq: r.Seq, Peer: id, Opened: opened, Code: code, Reason: why},
			"resolved %s seq=%d%s code=%v%s", r.ID, r.Seq, peer, code, optional("why", why))
	})
}

// find looks an agent up, says hello and opens the way to it. An entry of an
// agent that is gone is waited out.
func (a *agent) find(t core.Target, until time.Duration, found func(id core.AgentID, code core.Code, why string)) {
	var opened time.Duration
	end := func(id core.AgentID, code core.Code, why string) {
		if code == core.OK {
			a.peers[id] = &peer{opened: opened}
		}
		found(id, code, why)
	}
	a.after(2*a.w.delay(), func() {
		id, there := a.w.registry[t]
		if !there {
			end("", core.Unreachable, "engine is not registered")
			return
		}
		if a.w.now >= until {
			end("", core.Unreachable, "no time left")
			return
		}
		ticket, asked := "", a.now()
		a.ask(id, until-a.w.now, func(p *agent) func() {
			if p.shut {
				return func() {}
			}
			p.peers[a.id] = &peer{}
			t := p.admit(a)
			age := p.now() - p.opened
			return func() { ticket, opened = t, asked-age }
		}, func(_ bool, err error) {
			switch {
			case err == nil && ticket == "":
				end("", core.Refused, "transport is closed")
			case err == nil && a.misfit(id) != nil:
				end("", core.Refused, a.misfit(id).Error())
			case err == nil:
				a.connect(id, ticket)
				end(id, core.OK, "")
			case errors.Is(err, errAbsent) && a.w.now < until:
				a.after(100*time.Millisecond, func() { a.find(t, until, found) })
			default:
				end("", core.Unreachable, "hello: "+err.Error())
			}
		})
	})
}
