// A transport gets a plan as a list of pieces or, if these are many, as what it cuts itself.

package node

import (
	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// maxListedPieces is the most pieces of a transfer that a core.Cutter is given as a list. It cuts
// larger plans itself, a window at a time. So what a peer makes of a transfer, by the blocks
// that it names and the order of heads and tokens that it says it has, takes little memory on
// either side: a list of all pieces could take half a gigabyte. Nothing is refused for it.
const maxListedPieces = 2048

// plan gives a write its pieces, in the form that suits its transport and its size.
func (t *transports) plan(op *core.WriteOp, v *core.Write) (err error) {
	whole := !v.Extends && v.End == nil
	if !whole {
		op.Bytes = v.Match.Bytes(v.Dst)
	}
	name, _ := splitTransportName(v.Grant)
	if _, cuts := t.named(name).(core.Cutter); cuts {
		n, err := v.Match.Pieces(v.Dst, false) // of all of it: each part is given in one form
		if err != nil {
			return err
		}
		if n > maxListedPieces {
			op.Plan, err = v.Match.Plan(v.Src, v.Dst, v.Begin, v.End)
			return err
		}
	}
	if whole {
		op.Pairs, err = v.Match.Pairs(v.Src, v.Dst)
		return err
	}
	op.Pairs, op.At, err = v.Match.PairsBetween(v.Src, v.Dst, v.Begin, v.End)
	return err
}

// receivePlan is where a load's bytes are to land.
type receivePlan struct {
	match    *kv.Match
	to       kv.Selection
	pieces   int
	segments []kv.Segment // nil until a transport has wanted them
}

func newReceivePlan(m *kv.Match, to kv.Selection) (*receivePlan, error) {
	n, err := m.Pieces(to, true)
	return &receivePlan{match: m, to: to, pieces: n}, err
}

// expect arms a transport.
func (l *receivePlan) expect(w core.Transport, id core.TransferID, peer core.AgentID) (grant []byte, err error) {
	if c, cuts := w.(core.Cutter); cuts && l.pieces > maxListedPieces {
		plan, err := l.match.Landing(l.to)
		if err != nil {
			return nil, err
		}
		return c.ExpectPlan(id, peer, plan)
	}
	if l.segments == nil {
		if l.segments, err = l.match.Segments(l.to); err != nil {
			return nil, err
		}
	}
	return w.Expect(id, peer, l.segments)
}
