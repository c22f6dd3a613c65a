// The suite's lists are given to a Cutter as plans.

package coretest

import (
	"context"
	"sort"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// Planning opens Cutters that are given plans where the suites give lists.
func Planning(open RemoteOpener) RemoteOpener {
	return func(id core.AgentID, l *kv.Layout, sink core.Sink, signal core.Signal) (core.Transport, error) {
		tr, err := open(id, l, sink, signal)
		if err != nil {
			return nil, err
		}
		p := &planner{tr.(core.Cutter)}
		if s, agrees := tr.(core.Signaller); agrees {
			return &signallingPlanner{p, s}, nil
		}
		return p, nil
	}
}

// signallingPlanner is the planner of a Signaller.
type signallingPlanner struct {
	*planner
	to core.Signaller
}

func (p *signallingPlanner) Usable(ctx context.Context, peer core.AgentID) error {
	return p.to.Usable(ctx, peer)
}

func (p *signallingPlanner) Signalled(from core.AgentID, msg []byte) ([]byte, error) {
	return p.to.Signalled(from, msg)
}

type planner struct{ core.Cutter }

func (p *planner) Expect(id core.TransferID, peer core.AgentID, dst []kv.Segment) ([]byte, error) {
	list := &listPlan{}
	for _, s := range dst {
		list.add(kv.Pair{DstRegion: s.Region, DstOffset: s.Offset, Length: s.Length})
	}
	return p.ExpectPlan(id, peer, list)
}

func (p *planner) Write(op core.WriteOp)  { p.Cutter.Write(Planned(op)) }
func (p *planner) Extend(op core.WriteOp) { p.Cutter.Extend(Planned(op)) }

// Planned puts a plan in place of the pairs of a write.
func Planned(op core.WriteOp) core.WriteOp {
	list, pairs := &listPlan{}, op.Pairs
	for _, e := range op.Extents() {
		list.next = e.Position
		for _, p := range pairs[:e.Pairs] {
			list.add(p)
		}
		pairs = pairs[e.Pairs:]
	}
	op.Plan, op.Pairs, op.At = list, nil, nil
	return op
}

// listPlan cuts a plan off a list, a few pieces at a time.
type listPlan struct {
	pairs []kv.Pair
	at    []uint64 // their positions
	next  uint64
}

func (l *listPlan) add(p kv.Pair) {
	l.pairs, l.at = append(l.pairs, p), append(l.at, l.next)
	l.next += p.Length
}

func (l *listPlan) Pieces() int { return len(l.pairs) }

func (l *listPlan) Extents() (out []kv.Extent) {
	for i, p := range l.pairs {
		if n := len(out); n > 0 && out[n-1].Position+out[n-1].Bytes == l.at[i] {
			out[n-1].Bytes += p.Length
			continue
		}
		out = append(out, kv.Extent{Position: l.at[i], Bytes: p.Length})
	}
	return out
}

func (l *listPlan) Pairs(out []kv.Pair, position, _ uint64) []kv.Pair {
	first := sort.Search(len(l.pairs), func(i int) bool { return l.at[i]+l.pairs[i].Length > position })
	for i, p := range l.pairs[first:] {
		begin := l.at[first+i]
		if begin > position || len(out) == min(cap(out), 3) {
			break
		}
		if skip := position - begin; skip < p.Length {
			p.SrcOffset, p.DstOffset, p.Length = p.SrcOffset+skip, p.DstOffset+skip, p.Length-skip
			out = append(out, p)
			position += p.Length
		}
	}
	return out
}
