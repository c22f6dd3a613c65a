package rdma

import (
	"bytes"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
	"github.com/kvconn/kvconn/rig/coretest"
)

// Blocks of which each item of 4 bytes is a piece of its own: P has them token by token, D head
// by head.
const (
	pieceBytes     = kv.RegionAlign
	piecesOfABlock = blockBytes / pieceBytes
	manyBlocks     = 8 // have 131,072 pieces
	manyLoads      = 300
)

func piecesMatch(t testing.TB) *kv.Match {
	t.Helper()
	const tokens, heads = 128, piecesOfABlock / 128
	r := kv.Region{Name: "kv", Base: 1 << 40, BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: manyBlocks,
		Tokens: tokens, Heads: heads, TotalHeads: heads, TokenStride: heads * pieceBytes, HeadStride: pieceBytes}
	of := func(r kv.Region) []kv.Shape {
		l, err := kv.NewLayout([]kv.Region{r})
		if err != nil {
			t.Fatal(err)
		}
		return l.Shapes()
	}
	other := r
	other.TokenStride, other.HeadStride = pieceBytes, tokens*pieceBytes
	m, err := kv.NewMatch(of(r), of(other))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// someBlocks is the first n blocks, as P or D has them.
func someBlocks(n int) kv.Selection {
	ids := make([]kv.BlockID, n)
	for i := range ids {
		ids[i] = kv.BlockID(i)
	}
	return kv.Selection{Blocks: [][]kv.BlockID{ids}}
}

// itemOf is where P has the item that D has at an offset in a block.
func itemOf(offset int) int {
	const tokens, heads = 128, piecesOfABlock / 128
	item := offset / pieceBytes
	return (item%tokens*heads + item/tokens) * pieceBytes
}

// held is the memory that this process's Go has, without what is free.
func held() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// mostOfAWrite is what P may hold of a write of many pieces: its state, and a range for each
// stripe. A list of the pieces takes 4 MiB.
const mostOfAWrite = 8 << 10

// asked is a plan that remembers for how many pieces it was asked at a time.
type asked struct {
	kv.Plan
	most, calls int
}

func (a *asked) Pairs(out []kv.Pair, position, limit uint64) []kv.Pair {
	a.most, a.calls = max(a.most, cap(out)), a.calls+1
	return a.Plan.Pairs(out, position, limit)
}

// TestWritesOfManyPieces: writes of 131,072 pieces each that are under way together take what
// few pieces take, since P cuts their plans a chain at a time.
func TestWritesOfManyPieces(t *testing.T) {
	sp := beginSpread(t, byPlans, 2, manyBlocks+2)
	m, all := piecesMatch(t), someBlocks(manyBlocks)
	var plans []*asked
	before := held()
	for i := range manyLoads {
		plan, err := m.Plan(all, all, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		a := &asked{Plan: plan}
		plans = append(plans, a)
		id, seq := core.TransferID(fmt.Sprint("many", i)), uint64(100+i)
		sp.conn.t.sender.write(core.WriteOp{ID: id, Peer: sp.peer, Plan: a, Grant: grant{seq: seq, bytes: kv.PlanBytes(plan)}.sign(sp.remote.secret, id)})
	}
	each := int(max(held(), before)-before) / manyLoads
	if each > mostOfAWrite {
		t.Fatalf("P holds %d bytes of each of %d writes of %d pieces", each, manyLoads, manyBlocks*piecesOfABlock)
	}
	requests := sp.conn.t.requests.Load()
	for range 1000 { // each write has its turn
		sp.step()
	}
	if got := sp.conn.t.requests.Load() - requests; got < 20_000 {
		t.Errorf("%d requests, the writes do not go on", got)
	}
	for i, a := range plans {
		if a.calls == 0 {
			t.Errorf("nothing was cut of plan %d", i)
		}
		if a.most > maxChain {
			t.Errorf("plan %d was asked for %d pieces at a time, a chain has %d writes", i, a.most, maxChain)
		}
	}
	if each := int(max(held(), before)-before) / manyLoads; each > mostOfAWrite {
		t.Errorf("P holds %d bytes of each write in the middle of it", each)
	}
	t.Logf("measured: %d bytes of each of %d writes of %d pieces", int(max(held(), before)-before)/manyLoads, manyLoads, manyBlocks*piecesOfABlock)
	runtime.KeepAlive(plans)
	for i := range manyLoads {
		sp.conn.t.sender.stop(core.TransferID(fmt.Sprint("many", i)))
	}
	sp.complete()
}

// TestExpectOfManyPieces: D holds nothing of a plan.
func TestExpectOfManyPieces(t *testing.T) {
	tr := &Transport{cfg: DefaultConfig()}
	tr.receiver.init(tr, manyLoads)
	src := &source{r: &tr.receiver, peer: "p", live: map[uint64]*expect{}, gone: false}
	src.newSecret()
	tr.receiver.sources["p"] = src
	tr.remapping.held = true
	t.Cleanup(func() { src.watching.Stop() })
	m, all := piecesMatch(t), someBlocks(manyBlocks)
	before := held()
	for i := range manyLoads {
		landing, err := m.Landing(all)
		if err != nil {
			t.Fatal(err)
		}
		a := &asked{Plan: landing}
		id := core.TransferID(fmt.Sprint("many", i))
		b, err := tr.ExpectPlan(id, "p", a)
		if err != nil {
			t.Fatal(err)
		}
		if g, err := checkGrant(b, src.secret, id); err != nil || g.bytes != manyBlocks*blockBytes {
			t.Fatalf("a grant of %d bytes, %v", g.bytes, err)
		}
		if a.calls > 0 {
			t.Fatal("D has cut the plan")
		}
	}
	if each := int(max(held(), before)-before) / manyLoads; each > 2<<10 {
		t.Errorf("D holds %d bytes of each load of %d pieces", each, manyBlocks*piecesOfABlock)
	}
}

// TestManyPiecesOnADevice: a load of many pieces brings its bytes, and hundreds that are under way
// take what few pieces take, on both sides.
func TestManyPiecesOnADevice(t *testing.T) {
	needsRDMA(t)
	ctl := newControl()
	ctl.config = func(cfg *Config) { cfg.MaxTransfers = manyLoads }
	p, d := start(t, ctl, "p", manyBlocks, nil), start(t, ctl, "d", manyBlocks, nil)
	connect(t, d, p)
	usable(t, d, p)
	m := piecesMatch(t)
	begin := func(id core.TransferID, blocks int, given uint32) {
		t.Helper()
		of := someBlocks(blocks)
		landing, err := m.Landing(of)
		if err != nil {
			t.Fatal(err)
		}
		plan, err := m.Plan(of, of, nil, []uint32{given})
		if err != nil {
			t.Fatal(err)
		}
		grant, err := d.tr.ExpectPlan(id, p.id, landing)
		if err != nil {
			t.Fatal(err)
		}
		p.tr.Write(core.WriteOp{ID: id, Peer: d.id, Grant: grant, Plan: plan, Bytes: uint64(blocks) * blockBytes})
	}
	p.paint(1, 0, manyBlocks)
	began := time.Now()
	begin("one", 1, 1)
	if o := p.rec.Wait("written", "one", 1); o.Err != nil {
		t.Fatal(o.Err)
	}
	if o := d.rec.Wait("received", "one", 1); o.Err != nil || o.Stats.Bytes != blockBytes {
		t.Fatalf("%+v", o)
	}
	t.Logf("measured: %d pieces in %v", piecesOfABlock, time.Since(began).Round(time.Millisecond))
	for at := 0; at < blockBytes; at += pieceBytes {
		if got, want := d.mem[at:][:pieceBytes], p.mem[itemOf(at):][:pieceBytes]; !bytes.Equal(got, want) {
			t.Fatalf("bytes %d and on are %x, want %x", at, got, want)
		}
	}
	d.untouched("blocks of no load", 1, manyBlocks-1)

	const loads = 10
	before := held()
	ids := make([]core.TransferID, loads)
	for i := range ids {
		ids[i] = core.TransferID(fmt.Sprint("many", i))
		begin(ids[i], manyBlocks, manyBlocks-1) // none ends without its last block
	}
	each := int(max(held(), before)-before) / loads
	t.Logf("measured: %d bytes on both sides of each of %d loads of %d pieces", each, loads, (manyBlocks-1)*piecesOfABlock)
	if each > 2*mostOfAWrite {
		t.Errorf("%d bytes are held of each load", each)
	}
	p.tr.Dismiss(d.id)
	d.tr.Dismiss(p.id)
	for _, id := range ids {
		for kind, rec := range map[string]*coretest.Recorder{"written": p.rec, "received": d.rec} {
			if o := rec.Wait(kind, id, 1); o.Err == nil {
				t.Errorf("%s %s, and was not given its last block", id, kind)
			}
		}
	}
}

// TestPlanStripes: the stripes of a plan are ranges without gaps, each byte in one.
func TestPlanStripes(t *testing.T) {
	m := piecesMatch(t)
	all := someBlocks(manyBlocks)
	for _, c := range []struct {
		name       string
		begin, end []uint32
		from, to   uint64 // blocks
	}{{"all", nil, nil, 0, manyBlocks}, {"of the middle", []uint32{2}, []uint32{7}, 2, 7}, {"nothing", []uint32{3}, []uint32{3}, 3, 3}} {
		plan, err := m.Plan(all, all, c.begin, c.end)
		if err != nil {
			t.Fatal(err)
		}
		at, stripe := c.from*blockBytes, -1
		for _, s := range splitPlan(plan, []float64{1, 2, 1}, 4096) {
			if s.position != at || s.length == 0 || s.stripe <= stripe {
				t.Errorf("%s: stripe %d has %d bytes from %d on, want some from %d on, and a stripe after %d", c.name, s.stripe, s.length, s.position, at, stripe)
			}
			at, stripe = at+s.length, s.stripe
		}
		if at != c.to*blockBytes {
			t.Errorf("%s: the stripes end at %d, want %d", c.name, at, c.to*blockBytes)
		}
	}
}

// TestFillRefusesOfPlan: an error names the byte of the plan that leaves its region.
func TestFillRefusesOfPlan(t *testing.T) {
	m, all := piecesMatch(t), someBlocks(manyBlocks)
	plan, err := m.Plan(all, all, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	const short = manyBlocks*blockBytes - blockBytes // what D says its region has
	local := mustTable(t, "here", []memRange{{1 << 40, manyBlocks * blockBytes}}, key(1<<40, manyBlocks*blockBytes, 1))
	remote := mustTable(t, "at the peer", []memRange{{1 << 41, short}}, key(1<<41, short, 2))
	c := cursor{ranges: splitPlan(plan, nil, 1), whole: true}
	var window [maxChain]kv.Pair
	var sent uint64
	for err == nil {
		var n uint64
		var done bool
		_, _, n, done, err = c.fill(make([]verbs.Write, 7), make([]verbs.SGE, 9), window[:], local, remote, writeLimits{4, 1 << 20, 1 << 40})
		if sent += n; done {
			t.Fatalf("%d bytes are written to a region of %d", sent, short)
		}
	}
	// The last item of a block and the first of the next are one piece, since both are adjacent.
	want := fmt.Sprintf("the piece with byte %d (8 bytes), its destination: region 0: 8 bytes from offset %d leave it: it has %d bytes at the peer", short-4, short-4, short)
	if err.Error() != want {
		t.Errorf("after %d bytes %v, want %s", sent, err, want)
	}
}

// BenchmarkPieces is what 131,072 pieces of 4 bytes cost a prefill agent from the match to
// requests in Go memory, as a list and as a plan: for 4 lanes, in chains of 32.
func BenchmarkPieces(b *testing.B) {
	m, all := piecesMatch(b), someBlocks(manyBlocks)
	table := mustTable(b, "anywhere", []memRange{{1 << 40, manyBlocks * blockBytes}}, key(1<<40, manyBlocks*blockBytes, 1))
	writes, pieces, window := make([]verbs.Write, 32), make([]verbs.SGE, 128), make([]kv.Pair, maxChain)
	weights := []float64{1, 1, 1, 1}
	for _, how := range []string{"list", "plan"} {
		b.Run(how, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				var stripes []stripeRange
				if how == "list" {
					pairs, err := m.Pairs(all, all)
					if err != nil {
						b.Fatal(err)
					}
					stripes = split(pairs, weights, 64<<10)
				} else {
					plan, err := m.Plan(all, all, nil, nil)
					if err != nil {
						b.Fatal(err)
					}
					stripes = splitPlan(plan, weights, 64<<10)
				}
				for i := range stripes {
					c := cursor{ranges: stripes[i : i+1], whole: true}
					for done := false; !done; {
						var err error
						if _, _, _, done, err = c.fill(writes, pieces, window, table, table, writeLimits{16, 1 << 20, 64 << 20}); err != nil {
							b.Fatal(err)
						}
					}
				}
			}
		})
	}
}
