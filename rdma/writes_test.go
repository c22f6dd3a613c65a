package rdma

import (
	"math"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

func pr(src, dst uint32, srcOffset, dstOffset, length uint64) kv.Pair {
	return kv.Pair{SrcRegion: src, DstRegion: dst, SrcOffset: srcOffset, DstOffset: dstOffset, Length: length}
}

func sge(addr uint64, length, key uint32) verbs.SGE {
	return verbs.SGE{Addr: addr, Length: length, Key: key}
}

func TestFill(t *testing.T) {
	local := mustTable(t, "here", []memRange{{0x10000, 0x4000}, {0x14000, 0x4000}}, key(0x10000, 0x2000, 1), key(0x12000, 0x6000, 2))
	remote := mustTable(t, "at the peer", []memRange{{0x80000, 0x4000}, {0x84000, 0x4000}}, key(0x80000, 0x7000, 8), key(0x87000, 0x1000, 9))
	lim := writeLimits{maxPieces: 2, maxWrite: 0x1000, maxBytes: 1 << 40}
	const imm = verbs.WithImm
	for _, c := range []struct {
		name   string
		pairs  []kv.Pair
		writes []verbs.Write
		pieces []verbs.SGE
	}{
		{"nothing", nil, []verbs.Write{{Imm: 5, Flags: imm}}, []verbs.SGE{}},
		{"one pair", []kv.Pair{pr(0, 1, 0x100, 0x200, 0x40)},
			[]verbs.Write{{RemoteAddr: 0x84200, RemoteKey: 8, Pieces: 1, Imm: 5, Flags: imm}},
			[]verbs.SGE{sge(0x10100, 0x40, 1)}},
		{"scattered on both sides", []kv.Pair{pr(0, 0, 0, 0x40, 0x40), pr(0, 0, 0x100, 0, 0x40)},
			[]verbs.Write{{RemoteAddr: 0x80040, RemoteKey: 8, Pieces: 1}, {RemoteAddr: 0x80000, RemoteKey: 8, First: 1, Pieces: 1, Imm: 5, Flags: imm}},
			[]verbs.SGE{sge(0x10000, 0x40, 1), sge(0x10100, 0x40, 1)}},
		{"adjacent at the peer: at most two pieces", []kv.Pair{pr(0, 0, 0x40, 0, 0x10), pr(0, 0, 0, 0x10, 0x10), pr(0, 0, 0x80, 0x20, 0x10)},
			[]verbs.Write{{RemoteAddr: 0x80000, RemoteKey: 8, Pieces: 2}, {RemoteAddr: 0x80020, RemoteKey: 8, First: 2, Pieces: 1, Imm: 5, Flags: imm}},
			[]verbs.SGE{sge(0x10040, 0x10, 1), sge(0x10000, 0x10, 1), sge(0x10080, 0x10, 1)}},
		{"adjacent on both sides over regions", []kv.Pair{pr(0, 0, 0x3ff0, 0x3ff0, 0x10), pr(1, 1, 0, 0, 0x20)},
			[]verbs.Write{{RemoteAddr: 0x83ff0, RemoteKey: 8, Pieces: 1, Imm: 5, Flags: imm}},
			[]verbs.SGE{sge(0x13ff0, 0x30, 2)}},
		{"empty pairs between", []kv.Pair{pr(0, 0, 0, 0, 0), pr(0, 0, 0, 0, 0x10), pr(1, 1, 9, 9, 0), pr(0, 0, 0x10, 0x10, 0x10)},
			[]verbs.Write{{RemoteAddr: 0x80000, RemoteKey: 8, Pieces: 1, Imm: 5, Flags: imm}},
			[]verbs.SGE{sge(0x10000, 0x20, 1)}},
		{"over a local key", []kv.Pair{pr(0, 0, 0x1f00, 0, 0x200)},
			[]verbs.Write{{RemoteAddr: 0x80000, RemoteKey: 8, Pieces: 2, Imm: 5, Flags: imm}},
			[]verbs.SGE{sge(0x11f00, 0x100, 1), sge(0x12000, 0x100, 2)}},
		{"over a remote key", []kv.Pair{pr(0, 1, 0, 0x2f00, 0x200)},
			[]verbs.Write{{RemoteAddr: 0x86f00, RemoteKey: 8, Pieces: 1}, {RemoteAddr: 0x87000, RemoteKey: 9, First: 1, Pieces: 1, Imm: 5, Flags: imm}},
			[]verbs.SGE{sge(0x10000, 0x100, 1), sge(0x10100, 0x100, 1)}},
		{"longer than a write", []kv.Pair{pr(0, 0, 0, 0, 0x1800)},
			[]verbs.Write{{RemoteAddr: 0x80000, RemoteKey: 8, Pieces: 1}, {RemoteAddr: 0x81000, RemoteKey: 8, First: 1, Pieces: 1, Imm: 5, Flags: imm}},
			[]verbs.SGE{sge(0x10000, 0x1000, 1), sge(0x11000, 0x800, 1)}},
		{"a write is filled up", []kv.Pair{pr(0, 0, 0, 0, 0xc00), pr(0, 0, 0x1000, 0xc00, 0xc00)},
			[]verbs.Write{{RemoteAddr: 0x80000, RemoteKey: 8, Pieces: 2}, {RemoteAddr: 0x81000, RemoteKey: 8, First: 2, Pieces: 1, Imm: 5, Flags: imm}},
			[]verbs.SGE{sge(0x10000, 0xc00, 1), sge(0x11000, 0x400, 1), sge(0x11400, 0x800, 1)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			cur := cursor{ranges: split(c.pairs, []float64{1}, 1), whole: true, imm: 5}
			writes, pieces := make([]verbs.Write, 8), make([]verbs.SGE, 8)
			for range 2 { // again after a rewind
				nw, np, bytes, done, err := cur.fill(writes, pieces, nil, local, remote, lim)
				if !done || err != nil || bytes != pairBytes(c.pairs) {
					t.Fatalf("%d bytes, done %v, %v", bytes, done, err)
				}
				if !reflect.DeepEqual(writes[:nw], c.writes) || !reflect.DeepEqual(pieces[:np], c.pieces) {
					t.Errorf("got  %+v %x\nwant %+v %x", writes[:nw], pieces[:np], c.writes, c.pieces)
				}
				if nw, np, bytes, done, err = cur.fill(writes, pieces, nil, local, remote, lim); nw+np != 0 || bytes != 0 || !done || err != nil {
					t.Errorf("after its end: %d writes, %d pieces, %d bytes, done %v, %v", nw, np, bytes, done, err)
				}
				cur.rewind()
			}
		})
	}
}

func TestFillRefuses(t *testing.T) {
	local := mustTable(t, "here", []memRange{{0x10000, 0x4000}, {0x20000, 0x4000}}, key(0x10000, 0x20000, 1))
	remote := mustTable(t, "at the peer", []memRange{{0x80000, 0x1000}}, key(0x80000, 0x1000, 8))
	for _, c := range []struct {
		pair kv.Pair
		want string
	}{
		{kv.Pair{SrcRegion: 0, DstRegion: 0, DstOffset: 0xfff, Length: 2}, "pair 1 (2 bytes), its destination: region 0: 2 bytes from offset 4095 leave it: it has 4096 bytes at the peer"},
		{kv.Pair{SrcRegion: 1, DstRegion: 1, Length: 2}, "destination: region 1: there are 1 at the peer"},
		{kv.Pair{DstOffset: math.MaxUint64 - 1, Length: 8}, "destination: region 0: 8 bytes from"},
		{kv.Pair{SrcOffset: 0x4000, Length: 8}, "source: region 0: 8 bytes from offset 16384 leave it: it has 16384 bytes here"},
		{kv.Pair{SrcRegion: 2, Length: 8}, "source: region 2: there are 2 here"},
	} {
		pairs := []kv.Pair{{Length: 64}, c.pair}
		cur := cursor{ranges: split(pairs, nil, 1), whole: true}
		nw, np, n, done, err := cur.fill(make([]verbs.Write, 8), make([]verbs.SGE, 8), nil, local, remote, writeLimits{4, 1 << 20, 1 << 40})
		if err == nil || !strings.Contains(err.Error(), c.want) || nw+np != 0 || n != 0 || done {
			t.Errorf("%+v: %d writes, %d pieces, done %v, %v; want %q", c.pair, nw, np, done, err, c.want)
		}
	}
}

// Each fill stays within its room, and a copy goes on from where it was taken.
func TestFillBounds(t *testing.T) {
	local := mustTable(t, "here", []memRange{{0x100000, 1 << 20}}, key(0x100000, 1<<20, 1))
	pairs := make([]kv.Pair, 64)
	for i := range pairs {
		pairs[i] = kv.Pair{SrcOffset: uint64(i) * 8192, DstOffset: uint64(i) * 8192, Length: 4096}
	}
	for _, c := range []struct {
		writes, pieces int
		maxBytes       uint64
		want           int
	}{
		{10, 100, 1 << 40, 10}, {100, 7, 1 << 40, 7}, {100, 100, 5 * 4096, 5}, {100, 100, 5*4096 + 1, 6}, {100, 100, 0, 1}, {0, 10, 1 << 40, 0}, {10, 0, 1 << 40, 0},
	} {
		cur := cursor{ranges: split(pairs, nil, 1), whole: true}
		fill := func(cur *cursor) (int, []verbs.Write) {
			writes := make([]verbs.Write, c.writes)
			nw, np, n, done, err := cur.fill(writes, make([]verbs.SGE, c.pieces), nil, local, local, writeLimits{8, 1 << 20, c.maxBytes})
			if nw != np || n != uint64(nw)*4096 || done || err != nil {
				t.Fatalf("%+v: %d writes, %d pieces, %d bytes, done %v, %v", c, nw, np, n, done, err)
			}
			return nw, writes[:nw]
		}
		if n, _ := fill(&cur); n != c.want {
			t.Errorf("%+v: %d writes, want %d", c, n, c.want)
		}
		twin := cur
		_, a := fill(&cur)
		if _, b := fill(&twin); !reflect.DeepEqual(a, b) {
			t.Errorf("%+v: a copy fills\n%+v, the cursor\n%+v", c, b, a)
		}
	}
}

func benchmarkSetup(b testing.TB, blocks int, blockBytes uint64) ([]kv.Pair, *keyTable, *keyTable) {
	rnd := rand.New(rand.NewPCG(1, 2))
	const regions = 40
	per := uint64(blocks/regions) * 4 * blockBytes
	var at []memRange
	var keys []keyRange
	for i := range uint64(regions) {
		at = append(at, memRange{1<<40 + i*per, per})
		keys = append(keys, key(1<<40+i*per, per, uint32(i)))
	}
	pairs := make([]kv.Pair, 0, blocks)
	for r := range regions {
		src, dst := rnd.Perm(blocks/regions*4), rnd.Perm(blocks/regions*4)
		for i := range blocks / regions {
			pairs = append(pairs, kv.Pair{SrcRegion: uint32(r), DstRegion: uint32(r), SrcOffset: uint64(src[i]) * blockBytes, DstOffset: uint64(dst[i]) * blockBytes, Length: blockBytes})
		}
	}
	return pairs, mustTable(b, "here", at, keys...), mustTable(b, "at the peer", at, keys...)
}

// BenchmarkFill is what 20,000 scattered blocks of 4 KiB cost from the plan to
// requests in Go memory: cut for 4 lanes, filled in chains of 32.
func BenchmarkFill(b *testing.B) {
	pairs, local, remote := benchmarkSetup(b, 20000, 4096)
	writes, pieces := make([]verbs.Write, 32), make([]verbs.SGE, 128)
	lim := writeLimits{maxPieces: 16, maxWrite: 1 << 20, maxBytes: 64 << 20}
	stripes := split(pairs, []float64{1, 1, 1, 1}, 256<<10)
	b.ReportAllocs()
	for b.Loop() {
		for i := range stripes {
			c := cursor{ranges: stripes[i : i+1], whole: true, imm: uint32(i)}
			for done := false; !done; {
				var err error
				if _, _, _, done, err = c.fill(writes, pieces, nil, local, remote, lim); err != nil {
					b.Fatal(err)
				}
			}
		}
	}
}

// TestFillAllocatesNothing: posting a transfer allocates nothing.
func TestFillAllocatesNothing(t *testing.T) {
	pairs, local, remote := benchmarkSetup(t, 2000, 4096)
	writes, pieces := make([]verbs.Write, 32), make([]verbs.SGE, 64)
	c := cursor{ranges: split(pairs, nil, 1), whole: true}
	if n := testing.AllocsPerRun(10, func() {
		c.rewind()
		for done := false; !done; {
			_, _, _, done, _ = c.fill(writes, pieces, nil, local, remote, writeLimits{16, 1 << 20, 1 << 20})
		}
	}); n != 0 {
		t.Errorf("%v allocations for 2000 pairs", n)
	}
}
