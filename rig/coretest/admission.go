// Cases of who gets in: tickets, grants and dismissed peers.

package coretest

import (
	"bytes"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

func wrongGrants(t *testing.T, f Fixture) {
	for name, forge := range map[string]func(grant []byte) []byte{
		"empty":       func(g []byte) []byte { return nil },
		"cut":         func(g []byte) []byte { return g[:len(g)-1] },
		"longer":      func(g []byte) []byte { return append(bytes.Clone(g), 0) },
		"one bit off": func(g []byte) []byte { g = bytes.Clone(g); g[len(g)-1] ^= 1; return g },
		"random":      func(g []byte) []byte { return bytes.Repeat([]byte{0x5a}, len(g)) },
	} {
		t.Run(name, func(t *testing.T) {
			p, d := pair(t, f, dense(4096, 100), dense(4096, 100))
			blocks := [][]kv.BlockID{sequence(0, 50)}
			p.paint(1, blocks)
			grant := d.expect("t", p, blocks)
			p.write("t", d, forge(grant), blocks, blocks)
			if o := p.sink.Wait("written", "t", 1); o.Err == nil {
				t.Errorf("a write with a wrong grant ended well: %+v", o)
			}
			d.revoke("t")
			d.check(t)
			if arrived(d) {
				t.Errorf("received of a write with a wrong grant ended well")
			}
		})
	}
}

// stolenGrant: a grant is for one peer.
func stolenGrant(t *testing.T, f Fixture) {
	spec := dense(4096, 20)
	p, d := pair(t, f, spec, spec)
	thief := open(t, f, "thief", spec)
	connect(t, d, thief)
	blocks := [][]kv.BlockID{sequence(0, 20)}
	p.paint(1, blocks)
	thief.paint(2, blocks)
	grant := d.expect("t", p, blocks)
	thief.write("t", d, grant, blocks, blocks)
	if o := thief.sink.Wait("written", "t", 1); o.Err == nil {
		t.Errorf("a write with another peer's grant ended well: %+v", o)
	}
	d.revoke("t")
	d.check(t)
}

func neverConnected(t *testing.T, f Fixture) {
	spec := dense(4096, 4)
	p, d := open(t, f, "sender", spec), open(t, f, "unknown", spec)
	blocks := [][]kv.BlockID{sequence(0, 4)}
	p.paint(1, blocks)
	p.write("s", d, bytes.Repeat([]byte{1}, 16), blocks, blocks) // not even admitted
	p.admit(d.id)
	p.write("t", d, bytes.Repeat([]byte{1}, 16), blocks, blocks)
	p.write("u", d, nil, blocks, blocks)
	for _, id := range []core.TransferID{"s", "t", "u"} {
		if o := p.sink.Wait("written", id, 1); o.Err == nil {
			t.Errorf("a write to a peer that never connected ended well: %+v", o)
		}
	}
	d.check(t)
}

func nobodyThere(t *testing.T, f Fixture) {
	spec := dense(4096, 4)
	p, d := open(t, f, "sender", spec), open(t, f, "receiver", spec)
	address, ticket := p.tr.Endpoint(), p.admit(d.id)
	p.close()
	if err := d.tr.Connect(p.id, address, ticket); err != nil {
		return
	}
	d.down(p.id, 1)
}

// admitAgain: a second hello must not cut off the streams that the first one has set up.
func admitAgain(t *testing.T, f Fixture) {
	p, d := pair(t, f, dense(4096, 4), dense(4096, 4))
	blocks := [][]kv.BlockID{sequence(0, 4)}
	p.paint(1, blocks)
	ticket := p.admit(d.id)
	if again := p.admit(d.id); !bytes.Equal(ticket, again) {
		t.Errorf("the ticket of an admitted peer has changed")
	}
	if other := p.admit("other"); bytes.Equal(ticket, other) {
		t.Errorf("two peers have one ticket")
	}
	p.tr.Dismiss("nobody")
	clear(ticket) // it is the caller's
	moves(t, p, d, "t", blocks)
	connect(t, d, p)
	moves(t, p, d, "u", blocks)
	d.check(t, delivery{transfer: 1, blocks: blocks})
}

// wrongTickets: a peer that shows none of P's tickets gets no connection and no byte, and
// does not disturb the others.
func wrongTickets(t *testing.T, f Fixture) {
	spec := dense(4096, 40)
	p, d := pair(t, f, spec, spec)
	blocks, more := [][]kv.BlockID{sequence(0, 20)}, [][]kv.BlockID{sequence(20, 20)}
	p.paint(1, blocks)
	p.paint(2, more)
	moves(t, p, d, "before", blocks)
	good := p.admit("unknown")
	for name, ticket := range map[string][]byte{
		"empty":       nil,
		"cut":         good[:len(good)-1],
		"longer":      append(bytes.Clone(good), 0),
		"one bit off": append(bytes.Clone(good[:len(good)-1]), good[len(good)-1]^1),
		"zero":        make([]byte, len(good)),
	} {
		t.Run(name, func(t *testing.T) {
			unknown := open(t, f, "unknown", spec)
			if err := unknown.tr.Connect(p.id, p.tr.Endpoint(), ticket); err != nil {
				return // it can see that the ticket is none
			}
			unknown.down(p.id, 1)
			id := core.TransferID("t-" + name)
			p.write(id, unknown, bytes.Repeat([]byte{1}, 16), blocks, blocks)
			if o := p.sink.Wait("written", id, 1); o.Err == nil {
				t.Errorf("a write to a peer with a wrong ticket ended well: %+v", o)
			}
			unknown.check(t)
		})
	}
	moves(t, p, d, "after", more)
	d.check(t, delivery{transfer: 1, blocks: blocks}, delivery{transfer: 2, blocks: more})
	if down := p.sink.All("down", ""); len(down) != 0 {
		t.Errorf("the sender was told %+v", down)
	}
}

// crossedGrant: a grant of one peer is written to no other.
func crossedGrant(t *testing.T, f Fixture) {
	spec := dense(4096, 20)
	p, a := pair(t, f, spec, spec)
	b := open(t, f, "other", spec)
	connect(t, b, p)
	blocks := [][]kv.BlockID{sequence(0, 20)}
	p.paint(1, blocks)
	ga, gb := a.expect("t", p, blocks), b.expect("u", p, blocks)
	p.write("u", a, gb, blocks, blocks)
	if o := p.sink.Wait("written", "u", 1); o.Err == nil {
		t.Errorf("a write with the grant of another peer ended well: %+v", o)
	}
	a.check(t)
	b.check(t)
	p.write("t", a, ga, blocks, blocks)
	well(t, "t", p, a, a.layout.Bytes(blocks))
	noReceived(t, b, "u", 0)
}

// dismiss: a dismissed peer gets nothing, until it is admitted anew.
func dismiss(t *testing.T, f Fixture) {
	spec := dense(4096, 20)
	p, d := pair(t, f, spec, spec)
	blocks := [][]kv.BlockID{sequence(0, 20)}
	p.paint(1, blocks)
	old := p.admit(d.id)
	moves(t, p, d, "before", blocks)
	d.wipe()
	grant := d.expect("t", p, blocks)
	p.tr.Dismiss(d.id)
	p.tr.Dismiss(d.id)
	d.down(p.id, 1)
	p.write("t", d, grant, blocks, blocks)
	if o := p.sink.Wait("written", "t", 1); o.Err == nil {
		t.Errorf("a write to a dismissed peer ended well: %+v", o)
	}
	d.revoke("t")
	connectWith(t, d, p, old)
	d.down(p.id, 2)
	d.check(t)
	if down := p.sink.All("down", ""); len(down) != 0 {
		t.Errorf("the sender was told %+v of a peer that it has dismissed", down)
	}
	if again := p.admit(d.id); bytes.Equal(old, again) {
		t.Errorf("the ticket of a dismissed peer lives again")
	}
	connect(t, d, p)
	moves(t, p, d, "after", blocks)
}
