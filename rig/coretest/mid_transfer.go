// Something is done to a transfer when its first bytes have landed, and before its last.

package coretest

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// landed waits for the first byte in any of some blocks.
func (e *endpoint) landed(blocks [][]kv.BlockID) {
	e.t.Helper()
	for deadline := time.Now().Add(patience); !e.touched(blocks); time.Sleep(20 * time.Microsecond) {
		if time.Now().After(deadline) {
			e.t.Fatalf("%s: no byte has landed within %v", e.id, patience)
		}
	}
}

// midTransfer starts a big write, calls cut when the write's first bytes have landed, and then
// calls after. If the write ended well all the same, midTransfer tries again with more bytes, so that bytes move when it is cut. A
// machine may be too fast for all of these, or too slow to cut in time. The last try's write cannot have ended: all of its blocks but the
// first and the last are given right before the cut, and the last one only by giveRest.
func midTransfer(t *testing.T, f Fixture, cut func(p, d *endpoint), after func(p, d *endpoint, blocks [][]kv.BlockID)) {
	midTransferOf(t, f, open, open, cut, after)
}

// opener is open or openRemote.
type opener func(t *testing.T, f Fixture, id core.AgentID, specs []regionSpec) *endpoint

func midTransferOf(t *testing.T, f Fixture, openP, openD opener, cut func(p, d *endpoint), after func(p, d *endpoint, blocks [][]kv.BlockID)) {
	const blockBytes, tries = 256<<10 + 4, 4
	size := f.BigBytes
	for try := range tries + 1 {
		n := size / blockBytes
		caught, held := false, try == tries
		t.Run(fmt.Sprintf("try%d", try), func(t *testing.T) {
			spec := dense(blockBytes, uint32(n))
			p, d := openP(t, f, "sender", spec), openD(t, f, "receiver", spec)
			connect(t, d, p)
			src, dst := [][]kv.BlockID{sequence(0, n)}, [][]kv.BlockID{shuffled(1, n, n)}
			p.paint(1, src)
			if held {
				w := beginPartial(p, d, "t", src, dst)
				w.upTo(w.each(1))
				d.landed(dst)
				w.upTo(w.each(uint32(n - 1)))
				p.rest = func() { w.upTo(nil) }
			} else {
				p.write("t", d, d.expect("t", p, dst), src, dst)
				d.landed(dst)
			}
			cut(p, d)
			if caught = !arrived(d); held && !caught {
				t.Error("a write has ended well whose last block was not given")
			}
			after(p, d, dst)
		})
		if caught || t.Failed() {
			return
		}
		if size = min(2*size, 512<<20); try+1 == tries {
			size = f.BigBytes
		}
	}
}

// giveRest gives the last block of midTransfer's write, if it was held back. If the write has ended, it is too late, and no error.
func (e *endpoint) giveRest() {
	if e.rest != nil {
		e.rest()
	}
}

// arrived says whether the transfer of midTransfer ended well at its receiver.
func arrived(d *endpoint) bool {
	for _, o := range d.sink.All("received", "t") {
		if o.Err == nil {
			return true
		}
	}
	return false
}
