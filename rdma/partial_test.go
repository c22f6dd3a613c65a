package rdma

import (
	"errors"
	"fmt"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// partialWrite is a write of an agent's blocks that is given bit by bit.
type partialWrite struct {
	p, d  *agent
	op    core.WriteOp
	given int // blocks
	how   form
}

// beginPartial begins a write of the first n blocks to the same of d, with none of them.
func (s *agent) beginPartial(id core.TransferID, d *agent, n int) *partialWrite {
	part := &partialWrite{p: s, d: d, op: core.WriteOp{ID: id, Peer: d.id, Grant: d.expect(id, s, 0, n), Bytes: uint64(n) * blockBytes}}
	s.tr.Write(part.op)
	return part
}

func (part *partialWrite) give(n int) {
	op := part.op
	op.At = []kv.Extent{{Position: uint64(part.given) * blockBytes, Pairs: n}}
	for i := part.given; i < part.given+n; i++ {
		op.Pairs = append(op.Pairs, kv.Pair{SrcOffset: uint64(i) * blockBytes, DstOffset: uint64(i) * blockBytes, Length: blockBytes})
	}
	part.given += n
	part.p.tr.Extend(part.how.given(op))
}

// rests waits until nothing is under way. D has all that was given, and no mark.
func (part *partialWrite) rests() {
	part.p.t.Helper()
	soon(part.p.t, "the write rests", func() bool {
		s := &part.p.tr.sender
		s.mu.Lock()
		w := s.writes[part.op.ID]
		s.mu.Unlock()
		if w == nil {
			part.p.t.Fatalf("the write has ended: %v", part.p.rec.All("written", part.op.ID))
		}
		w.conn.mu.Lock()
		defer w.conn.mu.Unlock()
		for _, j := range w.jobs {
			if j.lane == nil || j.cursor.ready() {
				return false
			}
		}
		return w.flight == 0
	})
	part.d.landed(0, part.given, true)
	r := &part.d.tr.receiver
	r.mu.Lock()
	e := r.expected[part.op.ID]
	r.mu.Unlock()
	if e == nil {
		part.p.t.Fatalf("D has been told of an end: %+v", part.d.rec.All("received", part.op.ID))
	}
	soon(part.p.t, "D knows that bytes come", func() bool { // a completion may be read after the bytes
		e.src.mu.Lock()
		defer e.src.mu.Unlock()
		return !e.begun.IsZero()
	})
	e.src.mu.Lock()
	defer e.src.mu.Unlock()
	if e.stripes != 0 {
		part.p.t.Errorf("marks of stripes %b have come before all was given", e.stripes)
	}
}

// TestPartialLanes: lanes break while a write rests, and in the middle of what it was
// given, at either end. The write goes on by other lanes, and every byte is right.
func TestPartialLanes(t *testing.T) {
	needsRDMA(t)
	sending := func(n int) func(p, d *agent) (int, error) {
		return func(p, d *agent) (int, error) { return p.tr.BreakSending(n) }
	}
	receiving := func(n int) func(p, d *agent) (int, error) {
		return func(p, d *agent) (int, error) { return d.tr.BreakReceiving(n) }
	}
	for _, c := range []struct {
		name string
		long bool
		how  form
		cut  func(p, d *agent) (int, error)
	}{
		{"one at the sender", false, byLists, sending(1)},
		{"all at the sender", true, byLists, sending(100)},
		{"one at the receiver", true, byLists, receiving(1)},
		{"all at the receiver", false, byLists, receiving(100)},
		{"one at the sender, by plans", false, byPlans, sending(1)},
		{"all at the receiver, by plans", false, byPlans, receiving(100)},
		{"all at both ends", true, byLists, func(p, d *agent) (int, error) {
			p.breakAll()
			d.breakAll()
			return 1, nil
		}},
	} {
		if c.long && testing.Short() {
			continue
		}
		for _, rests := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, at rest: %v", c.name, rests), func(t *testing.T) {
				ctl := newControl()
				ctl.config = func(cfg *Config) { cfg.ConnectTimeout, cfg.StallTimeout = patience, patience } // it is not to be given up
				const n = 64
				p, d := start(t, ctl, "p", n, nil), start(t, ctl, "d", n, nil)
				connect(t, d, p)
				usable(t, d, p)
				p.paint(1, 0, n)
				part := p.beginPartial("t", d, n)
				part.how = c.how
				part.give(n / 2)
				if rests {
					part.rests()
				} else {
					d.landed(0, n/2, false)
				}
				if k, err := c.cut(p, d); err != nil || k == 0 {
					t.Fatalf("%d queue pairs broken: %v", k, err)
				}
				part.give(2)
				part.rests()
				part.give(n/2 - 2 - 1)
				part.rests()
				part.give(1)
				for _, s := range []struct {
					a    *agent
					kind string
				}{{p, "written"}, {d, "received"}} {
					if o := s.a.rec.Wait(s.kind, "t", 1); o.Err != nil || o.Stats.Bytes != n*blockBytes {
						t.Errorf("%s: %+v", s.kind, o)
					}
				}
				d.has(1, 0, n)
			})
		}
	}
}

// TestRevokeAtRestUnheard: the grant of a write at rest is revoked, and P does not hear
// of it. P learns it by the loss of its lanes, and sends nothing more of the write.
func TestRevokeAtRestUnheard(t *testing.T) {
	needsRDMA(t)
	c := newControl()
	c.decide = func(from core.AgentID, s *signal) fault {
		if s.Kind == signalDrain {
			return lost
		}
		return passes
	}
	const n = 40
	p, d := start(t, c, "p", n, nil), start(t, c, "d", n, nil)
	connect(t, d, p)
	usable(t, d, p)
	p.paint(1, 0, n)
	part := p.beginPartial("t", d, n)
	part.give(20)
	part.rests()
	d.tr.Revoke("t")
	d.fill(0, n)
	if o := p.rec.Wait("written", "t", 1); !errors.Is(o.Err, core.ErrNotExpected) {
		t.Errorf("written: %v", o.Err)
	}
	part.give(20)
	p.paint(2, 0, 1)
	p.write("next", d, d.expect("next", p, 0, 1), 0, 0, 1)
	if o := d.rec.Wait("received", "next", 1); o.Err != nil {
		t.Error(o.Err)
	}
	d.untouched("a write that was revoked while it rested", 1, n-1)
}
