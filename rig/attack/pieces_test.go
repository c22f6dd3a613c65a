package attack

import (
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/wire"
)

// manyLoads are so many that 131,072 pieces of each, kept as a list, take more than a gigabyte.
const manyLoads = 300

// otherOrder is a hello of the attacker, whose blocks have heads and tokens the other way
// round than a victim's: each item is then a piece of its own.
func otherOrder() *wire.Request {
	req := aHello()
	for i := range req.Hello.Shapes {
		s := &req.Hello.Shapes[i]
		r := ordered(kv.Region{}, "HND")[0]
		s.Tokens, s.Heads, s.TotalHeads, s.TokenStride, s.HeadStride = r.Tokens, r.Heads, r.TotalHeads, r.TokenStride, r.HeadStride
	}
	return req
}

// TestLoadsOfManyPieces: a decode engine that says it has heads and tokens in the other order
// had prefill keep a list of 131,072 pieces for each of its loads. Now tcp cuts such a plan a
// window at a time.
func TestLoadsOfManyPieces(t *testing.T) { atBoth(t, loadsOfManyPieces) }

func loadsOfManyPieces(s *scenario) {
	p := s.startAs(exec.Command(os.Args[0]), "NHD", "prefill", nil)
	d := s.startAs(exec.Command(os.Args[0]), "NHD", "decode", nil)
	before(s, p, d)
	r := s.decoder(p)
	if rep := s.answer(r, p, otherOrder()); rep.Code != 0 {
		s.Fatalf("its hello: %+v", rep)
	}
	blocks := make(wire.BlockIDs, numBlocks)
	for i := range blocks {
		blocks[i] = uint32(i)
	}
	h := &honest{}
	for i := range manyLoads {
		id := fmt.Sprint("many", i)
		p.say("offer %s 0 %d", id, numBlocks)
		load := &wire.Load{TransferID: id, Transport: "tcp", Grant: fmt.Appendf(nil, "%016d", i), LeaseMS: 30_000}
		load.Groups = []wire.Blocks{{IDs: blocks}}
		if rep := s.answer(r, p, &wire.Request{Kind: wire.KindLoad, Load: load}); rep.Code != 0 {
			s.Fatalf("load %d: %+v", i, rep)
		}
		if i%6 == 0 {
			h.load(s, p, d, fmt.Sprint("beside", i))
		}
	}
	p.watch()
	got(s, "889 MiB held for 300 loads", "%s, %s", p.growth(s), h.went(s))
}

// TestPrefillOfManyPieces: a prefill engine that says it has a region for each head had decode
// keep a list of as many pieces for each load that waited for it.
func TestPrefillOfManyPieces(t *testing.T) {
	p := startOrdered(t, "NHD", map[string]any{"role": "prefill"})
	hostile := startOrdered(t, "heads", map[string]any{"role": "prefill"})
	d := startOrdered(t, "NHD", map[string]any{"role": "decode"})
	calm := before(t, p, d)
	h := &honest{}
	for i := range manyLoads {
		d.say("load many%d 0 %d %s", i, numBlocks, hostile.boot)
		if i%6 == 0 {
			h.load(t, p, d, fmt.Sprint("beside", i))
		}
	}
	d.watch()
	hostile.say("fill 170")
	if l := transfer(t, hostile, d, "after"); l.Code != "ok" { // as an honest one would be, of that order
		t.Errorf("a load in pieces: %+v", l)
	}
	if bytes := d.say("bytes").Bytes; bytes["170"] != 4*layers*blockBytes {
		t.Errorf("the decode engine has %v", bytes)
	}
	got(t, "1,126 MiB held for 300 loads", "%s, %s", d.growth(t), h.comparedWith(t, calm))
}
