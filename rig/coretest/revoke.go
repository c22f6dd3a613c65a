// Cases of Revoke: before, in the middle of, at the end of and after a transfer.

package coretest

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

func revokeBefore(t *testing.T, f Fixture) {
	p, d := pair(t, f, dense(4096, 100), dense(4096, 100))
	blocks := [][]kv.BlockID{sequence(0, 100)}
	p.paint(1, blocks)
	grant := d.expect("t", p, blocks)
	d.revoke("t")
	d.revoke("t")
	p.write("t", d, grant, blocks, blocks)
	if o := p.sink.Wait("written", "t", 1); o.Err == nil {
		t.Errorf("a write to a revoked grant ended well: %+v", o)
	}
	d.check(t)
	noReceived(t, d, "t", 0)
}

func revokeDuring(t *testing.T, f Fixture) {
	var frozen []byte
	told := 0
	midTransfer(t, f,
		func(p, d *endpoint) {
			d.revoke("t")
			frozen = d.snapshot()
			told = len(d.sink.All("received", "t"))
		},
		func(p, d *endpoint, dst [][]kv.BlockID) {
			p.giveRest()
			o := p.sink.Wait("written", "t", 1)
			if told == 0 && o.Err == nil && o.Stats.Bytes != p.layout.Bytes(dst) {
				t.Errorf("written without an error after %d bytes", o.Stats.Bytes)
			}
			p.close()
			if i := d.changed(frozen); i >= 0 {
				place, _ := d.place(i)
				t.Errorf("a byte changed after Revoke had returned: %d, %s", i, place)
			}
			d.check(t, delivery{transfer: 1, blocks: dst, part: told == 0})
			noReceived(t, d, "t", told)
		})
}

func revokeAfter(t *testing.T, f Fixture) {
	p, d := pair(t, f, dense(4096, 20), dense(4096, 20))
	src, dst := [][]kv.BlockID{sequence(0, 9)}, [][]kv.BlockID{shuffled(1, 9, 20)}
	p.paint(1, src)
	p.write("t", d, d.expect("t", p, dst), src, dst)
	well(t, "t", p, d, d.layout.Bytes(dst))
	d.revoke("t")
	d.check(t, delivery{transfer: 1, blocks: dst})
	noReceived(t, d, "t", 1)
}

// revokeRaces has Revoke meet the last bytes. The outcome was told before Revoke returned
// or never, and the blocks may be used again at once.
func revokeRaces(t *testing.T, f Fixture) {
	p, d := pair(t, f, dense(4096, 8), dense(4096, 8))
	src, dst := [][]kv.BlockID{sequence(0, 4)}, [][]kv.BlockID{sequence(2, 4)}
	p.paint(1, src)
	told, revoked := 0, 0
	var usual time.Duration // how long the first transfers take
	rounds := 400
	if testing.Short() { // on emulated processors
		rounds = 100
	}
	for i := range rounds {
		id := core.TransferID(fmt.Sprint("t", i))
		d.wipe()
		grant := d.expect(id, p, dst)
		start := time.Now()
		p.write(id, d, grant, src, dst)
		if i < 10 {
			d.sink.Wait("received", id, 1)
			usual = time.Since(start)
		}
		for at := usual * time.Duration(i) * 3 / 2 / time.Duration(rounds); time.Since(start) < at; runtime.Gosched() {
		}
		d.revoke(id)
		n := len(d.sink.All("received", id))
		frozen := d.snapshot()
		p.sink.Wait("written", id, 1)
		noReceived(t, d, id, n)
		if i := d.changed(frozen); i >= 0 {
			t.Fatalf("byte %d changed after Revoke had returned", i)
		}
		if n == 1 {
			d.check(t, delivery{transfer: 1, blocks: dst})
			told++
		} else {
			revoked++
		}
		if t.Failed() {
			return
		}
	}
	t.Logf("%d told, %d revoked before", told, revoked)
}

// revokeLeavesOthers: a revoke in the middle is daily business (a cancelled
// request) and must not end what else moves between the two agents.
func revokeLeavesOthers(t *testing.T, f Fixture) {
	const blockBytes = 64 << 10
	n := f.BigBytes / blockBytes / 4
	spec := dense(blockBytes, uint32(2*n))
	p, d := pair(t, f, spec, spec)
	one, two := [][]kv.BlockID{sequence(0, n)}, [][]kv.BlockID{sequence(n, n)}
	p.paint(1, one)
	p.paint(2, two)
	g1, g2 := d.expect("cut", p, one), d.expect("kept", p, two)
	p.write("cut", d, g1, one, one)
	p.write("kept", d, g2, two, two)
	d.landed(one)
	d.revoke("cut")
	p.sink.Wait("written", "cut", 1)
	well(t, "kept", p, d, d.layout.Bytes(two))
	d.check(t, delivery{transfer: 1, blocks: one, part: true}, delivery{transfer: 2, blocks: two})
	three := [][]kv.BlockID{sequence(n, 1)}
	p.paint(3, three)
	p.write("later", d, d.expect("later", p, three), three, three)
	well(t, "later", p, d, d.layout.Bytes(three))
}
