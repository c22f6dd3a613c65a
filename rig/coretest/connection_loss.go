// Cases in which a write is stopped, or an agent is gone, in the middle of a transfer.

package coretest

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

func stopDuring(t *testing.T, f Fixture) {
	midTransfer(t, f,
		func(p, d *endpoint) { p.tr.Stop("t") },
		func(p, d *endpoint, dst [][]kv.BlockID) {
			o := p.sink.Wait("written", "t", 1)
			p.paint(2, [][]kv.BlockID{sequence(0, len(dst[0]))}) // the blocks are the engine's again
			if o.Err == nil {
				if r := d.sink.Wait("received", "t", 1); r.Err != nil {
					t.Errorf("written without an error, received with %v", r.Err)
				}
			}
			d.revoke("t")
			d.check(t, delivery{transfer: 1, blocks: dst, part: !arrived(d)})
		})
}

func senderGone(t *testing.T, f Fixture) {
	midTransfer(t, f,
		func(p, d *endpoint) { p.close() },
		func(p, d *endpoint, dst [][]kv.BlockID) {
			d.sink.waitFor("word that the sender is gone", func() (Outcome, bool) {
				for _, o := range d.sink.list {
					if o.Kind == "down" && o.Peer == p.id && o.Err != nil || o.Kind == "received" {
						return o, true
					}
				}
				return Outcome{}, false
			})
			d.revoke("t")
			d.check(t, delivery{transfer: 1, blocks: dst, part: !arrived(d)})
		})
}

func receiverGone(t *testing.T, f Fixture) {
	var frozen []byte
	midTransfer(t, f,
		func(p, d *endpoint) {
			d.close()
			frozen = d.snapshot()
		},
		func(p, d *endpoint, dst [][]kv.BlockID) {
			p.giveRest()
			o := p.sink.Wait("written", "t", 1)
			if o.Err == nil && len(d.sink.All("received", "t")) == 0 {
				t.Errorf("written without an error, but the receiver was closed before the end")
			}
			if i := d.changed(frozen); i >= 0 {
				t.Errorf("byte %d changed after Close had returned", i)
			}
		})
}

func dismissDuring(t *testing.T, f Fixture) {
	midTransfer(t, f,
		func(p, d *endpoint) { p.tr.Dismiss(d.id) },
		func(p, d *endpoint, dst [][]kv.BlockID) {
			o := p.sink.Wait("written", "t", 1)
			p.paint(2, [][]kv.BlockID{sequence(0, len(dst[0]))}) // the blocks are the engine's again
			if o.Err == nil {
				if r := d.sink.Wait("received", "t", 1); r.Err != nil {
					t.Errorf("written without an error, received with %v", r.Err)
				}
			}
			d.down(p.id, 1)
			d.revoke("t")
			d.check(t, delivery{transfer: 1, blocks: dst, part: !arrived(d)})
		})
}

// lossAndReturn: P hears once of each loss, and the ticket outlives it.
func lossAndReturn(t *testing.T, f Fixture) {
	spec := dense(4096, 20)
	p := open(t, f, "sender", spec)
	blocks := [][]kv.BlockID{sequence(0, 20)}
	p.paint(1, blocks)
	ticket := p.admit("receiver")
	for i := range 3 {
		d := open(t, f, "receiver", spec)
		connectWith(t, d, p, ticket)
		moves(t, p, d, core.TransferID(fmt.Sprint("t", i)), blocks)
		d.close()
		p.down(d.id, i+1)
		if i == 2 {
			p.write("late", d, bytes.Repeat([]byte{1}, 16), blocks, blocks)
			if o := p.sink.Wait("written", "late", 1); o.Err == nil {
				t.Errorf("a write to a peer that is gone ended well: %+v", o)
			}
		}
	}
	if n := len(p.sink.All("down", "")); n != 3 {
		t.Errorf("the sender was told %d times of 3 losses", n)
	}
}
