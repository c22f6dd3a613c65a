// How D answers P's signals.

package rdma

import (
	"bytes"
	"crypto/subtle"
	"fmt"
	"math"
	"slices"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	defect "github.com/kvconn/kvconn/internal/fault"
)

func (r *receiver) signalled(from core.AgentID, s *signal) (*reply, error) {
	src := r.source(from)
	if src == nil {
		return nil, refusef("agent %s has not been told of agent %s", r.t.id, from)
	}
	switch s.Kind {
	case signalDismissed:
		return src.dismissed(s)
	case signalConnect:
		return src.connect(s)
	case signalProbed:
		return src.probed(s)
	}
	src.mu.Lock()
	defer src.mu.Unlock()
	if err := src.knows(s); err != nil {
		return nil, err
	}
	switch s.Kind {
	case signalPorts:
		if r.t.cfg.GPUs != nil && !s.Tries {
			return nil, refusef("decode agent %s has its blocks on GPUs, which the prefill agent's version does not know: use the same version", r.t.id)
		}
		rep := r.t.describe()
		rep.Secret = src.secret
		src.tooEarly = false
		if err := r.t.forgotten(); err != nil {
			rep.Ports, rep.Devices, rep.Lacks = nil, nil, shorten(err.Error())
			src.tooEarly = true
		}
		return rep, nil
	case signalConnected:
		err := src.current(s)
		switch {
		case err == nil:
			src.connected(s)
		case len(s.Lanes) == 0 && s.Reason != "": // P says that it has found no path to the old memory
			src.requestAgain()
		default:
			return nil, err
		}
		return &reply{}, nil
	case signalLost:
		return src.lost(s), nil
	case signalDrained:
		for _, seq := range s.Seqs {
			if e := src.live[seq]; e != nil && e.ended {
				src.fenced(e)
			}
		}
		return &reply{}, nil
	}
	return nil, refusef("signal of unknown kind %d", s.Kind)
}

// knows refuses a signal without the ticket that P gave; src.mu is held.
func (src *source) knows(s *signal) error {
	if src.gone || subtle.ConstantTimeCompare(src.ticket, s.Ticket) != 1 {
		return refusef("agent %s has no ticket of agent %s, or another one", src.r.t.id, src.peer)
	}
	return nil
}

// current refuses a signal about lanes that P makes with old keys of D's; src.mu is held.
func (src *source) current(s *signal) error {
	if src.renewed && !bytes.Equal(s.Secret, src.secret) && !(s.Reason != "" && len(s.Secret) == 0) && !defect.On("rdma-old-keys") {
		return refusef("decode agent %s has registered other memory since: ask for its keys anew", src.r.t.id)
	}
	return nil
}

// dismissed answers a P that has closed or has dismissed this agent.
func (src *source) dismissed(s *signal) (*reply, error) {
	src.mu.Lock()
	err := src.knows(s)
	src.mu.Unlock()
	if err != nil {
		return nil, err
	}
	src.r.t.goRun("rdma dismissed", func() {
		src.disconnect(fmt.Errorf("rdma: prefill agent %s has ended the connection: %s", src.peer, s.Reason))
	})
	return &reply{}, nil
}

// grants names the grants that are alive; src.mu is held.
func (src *source) grants(rep *reply) {
	src.r.mu.Lock()
	rep.Next = src.r.seq
	src.r.mu.Unlock()
	for seq, e := range src.live {
		if !e.ended {
			rep.Live = append(rep.Live, seq)
		}
	}
}

// maxLanes bounds the queue pairs that one P may have here.
const maxLanes = 512

// connect opens D's ends of lanes. Once they are in src.lanes, a revoke must reach P or
// cut these lanes too. So the answer names the grants that are alive. Queue pairs are
// made without src.mu, since RoCE looks up the neighbour, which takes a second if there
// is none.
func (src *source) connect(s *signal) (*reply, error) {
	t := src.r.t
	if !t.enter() {
		return nil, errClosed
	}
	defer t.wg.Done()
	src.mu.Lock()
	err := src.knows(s)
	if err == nil {
		err = src.current(s)
	}
	if n := len(src.lanes) + len(src.dying) + src.connecting; err == nil && n+len(s.Offers) > maxLanes {
		err = refusef("%d lanes are open and %d more wanted, at most %d are allowed", n, len(s.Offers), maxLanes)
	}
	if err != nil {
		src.mu.Unlock()
		return nil, err
	}
	src.connecting += len(s.Offers)
	known := make([]bool, len(s.Offers))
	for i := range s.Offers {
		known[i] = src.open(&s.Offers[i]) != nil
	}
	src.mu.Unlock()
	made := t.accept(src, s.Offers, known)
	src.mu.Lock()
	defer src.mu.Unlock()
	src.connecting -= len(s.Offers)
	rep := &reply{Lanes: make([]laneAnswer, len(s.Offers))}
	if err = src.knows(s); err == nil { // P may have been dismissed meanwhile
		err = src.current(s)
	}
	for i := range made {
		m, o, out := &made[i], &s.Offers[i], &rep.Lanes[i]
		l := src.open(o)
		switch {
		case err != nil || m.err != nil:
		case l == nil && (src.lanes[o.Lane] != nil || src.dying[o.Lane] != nil || m.lane == nil):
			m.err = fmt.Errorf("lane %d is open or was open before: each lane needs a number of its own", o.Lane)
		case l == nil:
			l, m.lane = m.lane, nil
			src.lanes[o.Lane] = l
		}
		if m.lane != nil {
			m.lane.drop(func() {})
		}
		if m.err != nil {
			out.Error = shorten(m.err.Error())
			t.log.Info("rdma lane refused", zap.String("peer", string(src.peer)), zap.Uint32("lane", o.Lane), zap.Error(m.err))
		} else if l != nil {
			out.QPN, out.PSN, out.Place = l.qp.Number(), l.psn, t.memory.places.of(l)
		}
	}
	if err != nil {
		return nil, err
	}
	src.grants(rep)
	return rep, nil
}

// open returns the lane of an offer that has come before, or nil; src.mu is held.
func (src *source) open(o *laneOffer) *lane {
	if l := src.lanes[o.Lane]; l != nil && l.offer == *o {
		return l
	}
	return nil
}

// connected ends the lanes that P does not keep, by P's signal; src.mu is held.
func (src *source) connected(s *signal) {
	keep := map[uint32]bool{}
	for _, id := range s.Lanes {
		keep[id] = true
	}
	for _, l := range src.lanes {
		if l.id <= s.Last && !keep[l.id] { // a later signal names a later lane
			src.retire(l)
		}
	}
	switch {
	case len(src.lanes) > 0:
		src.settle(nil)
		src.owed, src.backoff = true, 0
		src.watch()
	case s.Reason == "": // P closed its lanes because it had nothing to write; it opens others when it has something
		src.settle(nil)
	case src.tooEarly && src.r.t.forgotten() == nil: // the memory was registered after P had looked
		src.requestAgain()
	default: // P gives up what it was writing
		tell := src.disconnecting(core.Setup.Mark(fmt.Errorf("%w: rdma: prefill agent %s reaches none of this agent's ports: %s", core.ErrConnectionLost, src.peer, s.Reason)))
		src.r.t.goRun("rdma no path", tell)
	}
}

// lost retires the lanes that broke at P, and says which stripes have landed. After the
// answer P writes the rest by other lanes, so D answers "busy" while a lane that broke
// can still deliver. P names what it has dealt to lanes: the mark of its begin may have been
// on a lane that broke, while other lanes carried bytes. src.mu is held.
func (src *source) lost(s *signal) *reply {
	rep := &reply{}
	for _, seq := range s.Seqs {
		if e := src.live[seq]; e != nil {
			e.begin()
		}
	}
	for _, id := range s.Lanes {
		if l := src.lanes[id]; l != nil {
			src.retire(l)
		}
		rep.Busy = rep.Busy || src.dying[id] != nil
	}
	if rep.Busy {
		return rep
	}
	src.grants(rep)
	for _, seq := range s.Seqs {
		stripes := uint64(0)
		if e := src.live[seq]; e != nil {
			stripes = e.stripes
		} else if slices.Contains(src.whole[:], seq) {
			stripes = math.MaxUint64
		}
		rep.Arrived = append(rep.Arrived, stripes)
	}
	return rep
}
