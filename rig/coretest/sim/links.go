// D's streams to a P: how they are opened, how they break, and who notices when.

package sim

import (
	"github.com/kvconn/kvconn/core"
)

// dial opens the streams, if they are not there.
func (l *link) dial() {
	if l.p != nil || l.dialling {
		return
	}
	l.dialling = true
	w, d := l.w, l.d
	d.after(2*w.delay(), func() {
		p := l.host.agent
		switch {
		case w.cut[way{d.host, l.host}]+w.cut[way{l.host, d.host}] > 0:
			d.after(connectTimeout, l.dialFailed)
		case p == nil || p.shut || p.tickets[d.id] != l.ticket:
			d.after(w.delay(), l.dialFailed)
		default:
			l.dialling = false
			l.p = p
			l.gen++
			gen := l.gen
			p.run(func() {
				if l.gen == gen {
					p.in[d.id] = l
					p.streamsCame(l)
				}
			})
		}
	})
}

func (l *link) dialFailed() {
	l.dialling = false
	if l.d.out[l.peer] == l {
		l.d.linkGone(l)
	}
}

// breaks ends the connection; both ends notice, each in its time.
func (l *link) breaks() {
	p, d, gen, w := l.p, l.d, l.gen, l.w
	if p == nil {
		return
	}
	w.faults["break"]++
	l.p = nil
	l.gen++
	l.queue = nil
	parked := []*frame{l.streams[0].parked, l.streams[1].parked}
	l.streams = [2]stream{}
	d.after(w.delay(), func() { d.linkBroke(l) })
	p.after(w.delay(), func() {
		for _, f := range parked {
			if f != nil {
				f.wr.frames--
			}
		}
		p.streamsBroke(l, gen)
	})
}

// linkBroke is D's side: transfers that have begun are lost, the rest waits for new
// streams.
func (a *agent) linkBroke(l *link) {
	if l.p != nil || a.out[l.peer] != l {
		return
	}
	again := false
	for _, e := range a.arms(l.peer) {
		if e.got > 0 || e.flying > 0 {
			a.loses(e)
		} else {
			again = true
		}
	}
	if again {
		l.dial()
		return
	}
	a.linkGone(l)
}

func (a *agent) linkGone(l *link) {
	delete(a.out, l.peer)
	for _, e := range a.arms(l.peer) {
		a.loses(e)
	}
	a.peerDown(l.peer)
}

// loses ends what is expected over a link that is gone.
func (a *agent) loses(e *arm) {
	if !e.gone {
		e.gone = true
		a.when(e, func() { a.received(e, errReset) })
	}
}

func (a *agent) peerDown(id core.AgentID) {
	a.unmap(id)
	a.event(core.PeerDown{Peer: id}, "down peer=%s", id)
}

// streamsBroke is P's side.
func (a *agent) streamsBroke(l *link, gen int) {
	for _, wr := range a.writing() {
		if wr.link == l && wr.gen == gen {
			a.endWrite(wr, errReset)
		}
	}
	if a.in[l.d.id] == l && l.p != a {
		delete(a.in, l.d.id)
		a.peerDown(l.d.id)
		a.expectProbe(l.d)
	}
}

// linksOfDead breaks the links of a process that has ended: at once where its host says so,
// which has the probability seen, else when the other end stalls.
func (a *agent) linksOfDead(seen float64) {
	for _, l := range a.w.links {
		if l.d != a && l.p != a {
			continue
		}
		gen, d := l.gen, stallTimeout
		if a.w.chance(seen) {
			d = a.w.delay()
		}
		a.w.after(d, func() {
			if l.gen == gen {
				l.breaks()
			}
		})
	}
}

// breakLinks breaks all connections of a process that lives.
func (a *agent) breakLinks() {
	for _, l := range a.w.links {
		if l.d == a || l.p == a {
			l.breaks()
		}
	}
}
