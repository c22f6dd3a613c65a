package node

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestManyPieces: loads of so many pieces that no list is made of them bring the same bytes,
// at once and bit by bit, also when the engine takes its blocks back.
func TestManyPieces(t *testing.T) {
	leaktest.Check(t)
	const tokens = 64
	p, d := openShaped(t, RolePrefill, tokens/2, 0, modelHeads, false), openShaped(t, RoleDecode, tokens, 0, modelHeads, true)
	ofHeads := openShaped(t, RoleDecode, tokens, 1, modelHeads, true)
	src, dst := []kv.BlockID{1, 3, 2, 7, 0, 4, 6}, []kv.BlockID{5, 2, 6, 0} // the last half block is behind the prompt
	for _, s := range []*shapedSide{d, ofHeads} {
		if n := len(src) * tokens * int(s.end-s.first); n <= maxListedPieces { // each item is a piece
			t.Fatalf("only %d pieces", n)
		}
	}
	load := func(s *shapedSide, id core.TransferID) {
		if _, err := s.StartLoad([]core.LoadRequest{{ID: id, From: core.Target{Bootstrap: p.BootstrapAddress()}, Selection: kv.Selection{Blocks: [][]kv.BlockID{dst}, Tokens: []uint32{4*tokens - 40}}}}); err != nil {
			t.Fatal(err)
		}
	}
	p.paint(1, src...)
	p.offer("at once", src...)
	load(d, "at once")
	d.want("at once", core.OK)
	p.want("at once", core.OK)
	d.holds(1, 0, 4*tokens-32, dst...)

	p.offer("of some heads", src...)
	load(ofHeads, "of some heads")
	ofHeads.want("of some heads", core.OK)
	p.want("of some heads", core.OK)
	ofHeads.holds(1, 0, 4*tokens-32, dst...)

	for i, withdraw := range []bool{false, true} {
		id := core.TransferID(fmt.Sprint("bit by bit ", i))
		load(d, id)
		for try := range 2 {
			p.paint(2+2*i+try, src...)
			given := src
			if withdraw && try == 0 { // with the last block D might have all that it wants, and its load would have ended well
				given = src[:len(src)-1]
			}
			for n := range given {
				p.partial(id, uint32(n+1), nil, src[n])
			}
			if try == 0 && !withdraw {
				break
			}
			if try == 0 {
				if err := p.Withdraw([]core.TransferID{id}, 10*time.Second); err != nil {
					t.Fatal(err)
				}
			}
		}
		p.offer(id, src...)
		d.want(id, core.OK)
		p.want(id, core.OK)
		salt := 2 + 2*i
		if withdraw {
			salt++
		}
		d.holds(salt, 0, 4*tokens-32, dst...)
	}
}
