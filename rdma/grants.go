package rdma

import (
	"fmt"
	"slices"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
)

// Which grants are dead at P, and how D hears that nothing of them is on its way.

// grants says which of D's grants are dead.
type grants struct {
	below uint64 // dead
	next  uint64 // when live was told, this was to be the next one
	live  map[uint64]bool
	dead  map[uint64]bool // told since, or used up
}

// maxDead is how many are remembered one by one; then D is asked.
const maxDead = 1 << 16

func (g *grants) alive(seq uint64) bool {
	return seq >= g.below && !g.dead[seq] && (seq >= g.next || g.live[seq])
}

// told takes D's word of which were alive; of words that crossed the later one
// has the greater next.
func (g *grants) told(next uint64, live []uint64) {
	if next < g.next {
		return
	}
	g.next, g.live = next, make(map[uint64]bool, len(live))
	for _, seq := range live {
		g.live[seq] = true
	}
	for seq := range g.dead {
		if seq < next && !g.live[seq] {
			delete(g.dead, seq)
		}
	}
}

func (g *grants) drop(below uint64) {
	if below <= g.below {
		return
	}
	g.below = below
	for seq := range g.dead {
		if seq < below {
			delete(g.dead, seq)
		}
	}
}

// kill: a grant is used up, or revoked.
func (lk *link) kill(seq uint64) {
	if seq >= lk.grants.below {
		lk.grants.dead[seq] = true
	}
	if len(lk.grants.dead) > maxDead {
		lk.tasks |= askGrants
	}
}

// drain takes D's word that grants are dead, and says which of their transfers
// may still have something on its way. Of these tellDrained will tell.
func (lk *link) drain(m *signal) (pending []uint64) {
	for _, seq := range m.Seqs {
		lk.kill(seq)
		w := lk.bySeq[seq]
		switch {
		case len(lk.lost) > 0: // what they have sent may land as long as D has not ended them
			lk.held = append(lk.held, seq)
			pending = append(pending, seq)
		case w != nil && w.flight > 0:
			w.drained = true
			pending = append(pending, seq)
		}
		if w != nil {
			lk.fail(w, errRevoked(w))
		}
	}
	lk.grants.drop(m.Below)
	return pending
}

// confirmed: D has ended its side of lanes that broke. Some may have been confirmed
// before, by a word of D that crossed the answer.
func (lk *link) confirmed(lanes []uint32) {
	var rest []uint32
	for _, id := range lk.lost {
		if !slices.Contains(lanes, id) {
			rest = append(rest, id)
		}
	}
	if lk.lost = rest; len(rest) == 0 {
		lk.drained = append(lk.drained, lk.held...)
		lk.held = nil
	}
}

// tellDrained tells D of transfers of which nothing is on its way any more.
func (lk *link) tellDrained() {
	for {
		lk.mu.Lock()
		s := &signal{Kind: signalDrained, Ticket: lk.ticket, Seqs: lk.drained}
		lk.drained = nil
		if len(s.Seqs) == 0 {
			lk.tells = false
			lk.mu.Unlock()
			return
		}
		lk.mu.Unlock()
		if _, err := lk.t.ask(lk.peer, s, drainBound); err != nil {
			lk.t.log.Debug("rdma: a peer does not hear that writes have ended", zap.String("peer", string(lk.peer)), zap.Error(err))
		}
	}
}

// told takes D's word of which grants are alive. A D without lanes revokes without
// a word: what waits to be written again learns it by this. What is under way may have
// arrived since, and a grant is dead then too; so may what was lost, until D says.
func (lk *link) told(rep *reply) {
	lk.grants.told(rep.Next, rep.Live)
	if len(lk.lost) > 0 {
		return
	}
	for seq, w := range lk.bySeq {
		if !lk.grants.alive(seq) && (w.jobs == nil || w.isLost()) {
			lk.fail(w, errRevoked(w))
		}
	}
}

func errRevoked(w *write) error {
	return fmt.Errorf("rdma: transfer %q was revoked: %w", string(w.op.ID), core.ErrNotExpected)
}
