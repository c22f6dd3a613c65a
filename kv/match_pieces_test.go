package kv

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
)

// TestMatchPieces: cut plans have no more pieces than they must.
func TestMatchPieces(t *testing.T) {
	const item = 64
	side := func(order string, tokens, first, end uint32) someSide {
		return someSide{order: order, tokens: tokens, first: first, end: end}
	}
	for _, c := range []struct {
		name        string
		src, dst    someSide
		pairs, segs int // a block's last piece may be adjacent to the next one's first
	}{
		{"alike", side("NHD", 16, 0, 4), side("NHD", 16, 0, 4), 1, 1},
		{"alike, HND", side("HND", 16, 0, 4), side("HND", 16, 0, 4), 1, 1},
		{"head slice, HND", side("HND", 16, 0, 4), side("HND", 16, 2, 4), 6, 1},
		{"head slice, NHD", side("NHD", 16, 0, 4), side("NHD", 16, 2, 4), 6 * 16, 1},
		{"gathered, HND", side("HND", 16, 0, 2), side("HND", 16, 0, 4), 6, 6},
		{"gathered, NHD", side("NHD", 16, 0, 2), side("NHD", 16, 0, 4), 6 * 16, 6 * 16},
		{"smaller blocks at P", side("NHD", 16, 0, 4), side("NHD", 32, 0, 4), 1, 1},
		{"smaller blocks at D", side("NHD", 32, 0, 4), side("NHD", 16, 0, 4), 1, 1},
		{"smaller blocks at P, HND", side("HND", 16, 0, 4), side("HND", 32, 0, 4), 6*4 - 2, 1},
		{"smaller blocks at D, HND", side("HND", 32, 0, 4), side("HND", 16, 0, 4), 6*4 - 2, 1},
		{"one head", side("NHD", 16, 0, 1), side("HND", 16, 0, 1), 1, 1},
		{"other order", side("NHD", 16, 0, 4), side("HND", 16, 0, 4), 6*16*4 - 5, 1},
		{"one of several heads", side("NHD", 16, 0, 4), side("HND", 16, 1, 2), 6 * 16, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, d := mustLayout(t, c.src.regions("k", 0, 4096, item, 4, 12)...), mustLayout(t, c.dst.regions("k", 0, 4096, item, 4, 12)...)
			m, err := NewMatch(p.Shapes(), d.Shapes())
			if err != nil {
				t.Fatal(err)
			}
			src, dst := [][]BlockID{upTo(96 / c.src.tokens)}, [][]BlockID{upTo(96 / c.dst.tokens)}
			checkMatch(t, m, p.Shapes(), d.Shapes(), Selection{Blocks: src}, Selection{Blocks: dst})
			pairs, _ := m.Pairs(Selection{Blocks: src}, Selection{Blocks: dst})
			segments, _ := m.Segments(Selection{Blocks: dst})
			if len(pairs) != c.pairs || len(segments) != c.segs {
				t.Errorf("%d pairs and %d segments, want %d and %d", len(pairs), len(segments), c.pairs, c.segs)
			}
			if n := testing.AllocsPerRun(10, func() { _, _ = m.Pairs(Selection{Blocks: src}, Selection{Blocks: dst}) }); n > 1 {
				t.Errorf("a plan makes %v allocations", n)
			}
			if n := testing.AllocsPerRun(10, func() { _, _ = m.Segments(Selection{Blocks: dst}) }); n > 1 {
				t.Errorf("segments make %v allocations", n)
			}
		})
	}
}

// TestMatchWanted: a region that is asked for by name must be there.
func TestMatchWanted(t *testing.T) {
	p := mustLayout(t, region("a", 0, 1<<20, 64, 64, 4), region("c", 0, 2<<20, 64, 64, 4))
	d := mustLayout(t, region("a", 0, 1<<20, 64, 64, 4), region("b", 0, 2<<20, 64, 64, 4), region("c", 0, 3<<20, 64, 64, 4))
	m, err := NewMatch(p.Shapes(), d.Shapes())
	if err != nil {
		t.Fatal(err)
	}
	blocks := [][]BlockID{{1}}
	for _, regions := range [][]uint32{{1}, {0, 1}, {1, 2}, {0, 1, 2}} {
		_, err := m.Segments(Selection{Blocks: blocks, Regions: regions})
		checkError(t, err, []string{"region 1 of the decode engine"})
		_, err = m.Pairs(Selection{Blocks: blocks}, Selection{Blocks: blocks, Regions: regions})
		checkError(t, err, []string{"region 1 of the decode engine"})
	}
	checkMatch(t, m, p.Shapes(), d.Shapes(), Selection{Blocks: blocks}, Selection{Blocks: blocks, Regions: []uint32{0, 2}})
}

func TestNewMatchRefuses(t *testing.T) {
	base := func() []Shape {
		return mustLayout(t, shaped(region("k", 0, 1<<20, 1024, 1024, 4), "NHD", 16, 0, 4, 8), region("s", 1, 2<<20, 128, 32, 9)).Shapes()
	}
	for _, c := range []struct {
		name   string
		change func([]Shape) []Shape // of D's
		want   []string              // nil: they fit
	}{
		{"same", func(s []Shape) []Shape { return s }, nil},
		{"other stride and number of blocks", func(s []Shape) []Shape { s[0].BlockStride, s[0].NumBlocks = 4096, 1; return s }, nil},
		{"other order of regions", func(s []Shape) []Shape { s[0], s[1] = s[1], s[0]; return s }, nil},
		{"larger blocks", func(s []Shape) []Shape { s[0].Tokens, s[0].BlockBytes = 32, 2048; return s }, nil},
		{"blocks that do not divide", func(s []Shape) []Shape { s[0].Tokens, s[0].BlockBytes = 24, 1536; return s }, []string{`"k"`, "16 tokens", "24 tokens"}},
		{"item", func(s []Shape) []Shape { s[0].BlockBytes, s[0].TokenStride, s[0].HeadStride = 2048, 128, 32; return s }, []string{`"k"`, "16 bytes", "32 bytes"}},
		{"heads of the model", func(s []Shape) []Shape { s[0].TotalHeads = 4; return s }, []string{`"k"`, "of 8", "of 4"}},
		{"opaque at one side", func(s []Shape) []Shape {
			s[0].Tokens, s[0].Heads, s[0].TokenStride, s[0].HeadStride, s[0].TotalHeads = 0, 0, 0, 0, 0
			return s
		}, []string{`"k"`, "16 tokens", "opaque blocks of 1024 bytes"}},
		{"opaque bytes", func(s []Shape) []Shape { s[1].BlockBytes = 36; return s }, []string{`"s"`, "32 bytes", "36 bytes"}},
		{"strides", func(s []Shape) []Shape { s[0].TokenStride = 32; return s }, []string{"at the decode engine", `"k"`, "stride is 32 bytes", "64 and 16 (NHD)", "16 and 256 (HND)"}},
		{"heads beyond", func(s []Shape) []Shape { s[0].FirstHead = 5; return s }, []string{"at the decode engine", "4 heads from head 5 on", "8 heads in all"}},
		{"heads that wrap", func(s []Shape) []Shape { s[0].FirstHead = ^uint32(0); return s }, []string{"from head 4294967295 on"}},
		{"many heads", func(s []Shape) []Shape { s[0].Heads = 1 << 31; return s }, []string{"2147483648 heads"}},
		{"many tokens", func(s []Shape) []Shape { s[0].Tokens = 1 << 31; return s }, []string{"2147483648 tokens"}},
		{"no heads", func(s []Shape) []Shape { s[0].Heads = 0; return s }, []string{"0 heads"}},
		{"heads without tokens", func(s []Shape) []Shape { s[1].Heads = 2; return s }, []string{`"s"`, "0 tokens, but 2 heads"}},
		{"no bytes", func(s []Shape) []Shape { s[0].BlockBytes = 0; return s }, []string{`"k"`, "0 bytes"}},
		{"items that do not fit", func(s []Shape) []Shape { s[0].BlockBytes = 1020; return s }, []string{"1020 bytes", "16 tokens of 4 heads"}},
		{"group", func(s []Shape) []Shape { s[1].Group = 16; return s }, []string{`"s"`, "below 16"}},
		{"twice", func(s []Shape) []Shape { return append(s, s[0]) }, []string{"at the decode engine", `"k"`, "registered twice"}},
		{"heads twice", func(s []Shape) []Shape { s = append(s, s[0]); s[2].FirstHead = 3; return s }, []string{`"k"`, "registered twice", "heads 0 to 3", "heads 3 to 6"}},
		{"more heads", func(s []Shape) []Shape { s = append(s, s[0]); s[2].FirstHead = 4; return s }, nil},
		{"more heads of another length", func(s []Shape) []Shape {
			s = append(s, s[0])
			s[2].FirstHead, s[2].Tokens, s[2].BlockBytes = 4, 32, 2048
			return s
		}, []string{`"k"`, "of 16:", "32 tokens"}},
		{"opaque beside larger blocks", func(s []Shape) []Shape {
			s[0].Tokens, s[0].BlockBytes, s[1].Group = 32, 2048, 0
			return s
		}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := NewMatch(base(), c.change(base()))
			checkError(t, err, c.want)
		})
	}
	p := mustLayout(t, shaped(region("k", 0, 1<<20, 1024, 1024, 4), "NHD", 16, 0, 4, 4), region("s", 0, 2<<20, 32, 32, 4))
	d := mustLayout(t, shaped(region("k", 0, 1<<20, 2048, 2048, 4), "NHD", 32, 0, 4, 4), region("s", 0, 2<<20, 32, 32, 4))
	_, err := NewMatch(p.Shapes(), d.Shapes())
	checkError(t, err, []string{`"s"`, "opaque blocks of 32 bytes", "blocks of 16 tokens and of 32"})
}

func checkError(t *testing.T, err error, want []string) {
	t.Helper()
	if (err == nil) != (want == nil) {
		t.Fatalf("error %v, want one: %v", err, want != nil)
	}
	for _, part := range want {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q does not say %q", err, part)
		}
	}
}

// TestMatchWhole: regions of one side only are told, and do not stand in the way.
func TestMatchWhole(t *testing.T) {
	k := func(first, end uint32) Region {
		return shaped(region("k", 0, 1<<20, uint64(end-first)*256, uint64(end-first)*256, 4), "HND", 16, first, end, 8)
	}
	opaque := func(name string) Region { return region(name, 0, 1<<21, 32, 32, 4) }
	for _, c := range []struct {
		name     string
		src, dst []Region
		commons  []Common
		want     []string
	}{
		{"all", []Region{k(0, 4), opaque("s")}, []Region{k(0, 4), opaque("s")}, []Common{{0, 0, 0, 4}, {1, 1, 0, 1}}, nil},
		{"only at D", []Region{k(0, 4)}, []Region{k(0, 4), opaque("s")}, []Common{{0, 0, 0, 4}}, []string{"1 regions at the prefill", "2 at the decode", `"s"`, "0 of 1 heads"}},
		{"only at P", []Region{opaque("t"), k(0, 4)}, []Region{k(0, 4)}, []Common{{1, 0, 0, 4}}, []string{`"t"`, "only at the prefill engine"}},
		{"some heads", []Region{k(2, 4)}, []Region{k(0, 8)}, []Common{{0, 0, 2, 4}}, []string{`"k"`, "2 of 8 heads"}},
		{"more heads", []Region{k(0, 8)}, []Region{k(2, 4)}, []Common{{0, 0, 2, 4}}, nil},
		{"no head", []Region{k(0, 2)}, []Region{k(4, 8)}, []Common{}, []string{`"k"`, "0 of 4 heads"}},
		{"nothing", []Region{opaque("a")}, []Region{opaque("b")}, []Common{}, []string{`"a"`, `"b"`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, err := NewMatch(mustLayout(t, c.src...).Shapes(), mustLayout(t, c.dst...).Shapes())
			if err != nil {
				t.Fatal(err)
			}
			if got := m.Commons(); !reflect.DeepEqual(got, c.commons) {
				t.Errorf("in common: %v, want %v", got, c.commons)
			}
			checkError(t, m.Whole(), c.want)
		})
	}
}

// TestBothNamesAreTold: where all layers of two engines are named for another attention
// backend, the reason has room for one name of each.
func TestBothNamesAreTold(t *testing.T) {
	shapes := func(backend string) []Shape {
		var out []Region
		for n := range 32 {
			name := fmt.Sprintf("model.layers.%d.self_attn.attn[%s]", n, backend)
			out = append(out, shaped(region(name, 0, uint64(1+n)<<20, 1024, 1024, 4), "HND", 16, 0, 4, 4))
		}
		return mustLayout(t, out...).Shapes()
	}
	m, err := NewMatch(shapes("FLASH_ATTN,FP8_PER_TENSOR"), shapes("TRITON_ATTN,FP8_PER_TENSOR"))
	if err != nil {
		t.Fatal(err)
	}
	const room = 256 // of what a reason is carried in, less what stands before it
	said := m.Whole().Error()
	for _, name := range []string{"FLASH_ATTN", "TRITON_ATTN"} {
		if at := strings.Index(said, name); at < 0 || at+len(name) > room {
			t.Errorf("%s stands at %d of %q", name, at, said)
		}
	}
}

// TestMatchArguments: values that do not fit are refused, and the error names both.
func TestMatchArguments(t *testing.T) {
	p := mustLayout(t, shaped(region("k", 0, 1<<20, 1024, 1024, 9), "NHD", 16, 0, 4, 4))
	d := mustLayout(t, shaped(region("k", 0, 1<<20, 2048, 2048, 9), "NHD", 32, 0, 4, 4))
	m := matched(t, p, d)
	for _, c := range []struct {
		name       string
		regions    []uint32
		src        [][]BlockID
		srcFirst   []uint32
		dst        [][]BlockID
		dstFirst   []uint32
		tokens     []uint32
		want       []string
		wantPieces int
	}{
		{"whole", nil, [][]BlockID{{1, 2}}, nil, [][]BlockID{{5}}, nil, nil, nil, 1},
		{"half a block", nil, [][]BlockID{{1}}, nil, [][]BlockID{{5}}, nil, []uint32{16}, nil, 1},
		{"half a block is missing", nil, [][]BlockID{{1}}, nil, [][]BlockID{{5}}, nil, []uint32{17}, []string{"blocks 0 to 2 of group 0", "0 to 1"}, 0},
		{"before the first", nil, [][]BlockID{{3, 4}}, []uint32{2}, [][]BlockID{{5}}, nil, nil, []string{"blocks 0 to 2", "2 to 4"}, 0},
		{"from the first on", nil, [][]BlockID{{3, 4}}, []uint32{2}, [][]BlockID{{5}}, []uint32{1}, nil, nil, 1},
		{"behind the prompt", nil, nil, nil, [][]BlockID{{5}}, []uint32{1}, []uint32{20}, []string{"1 at the decode engine"}, 0},
		{"nothing of the prompt", nil, [][]BlockID{{}}, nil, [][]BlockID{{5}}, []uint32{1}, []uint32{20}, nil, 0},
		{"no such region", []uint32{1}, [][]BlockID{{1, 2}}, nil, [][]BlockID{{5}}, nil, nil, []string{"region 1", "below 1"}, 0},
		{"no region", []uint32{}, [][]BlockID{{1, 2}}, nil, [][]BlockID{{5}}, nil, nil, []string{"the list of regions is empty"}, 0},
		{"many groups", nil, make([][]BlockID, 17), nil, make([][]BlockID, 17), nil, nil, []string{"17 groups"}, 0},
		{"the largest position", nil, [][]BlockID{{1, 2}}, nil, [][]BlockID{{5}}, []uint32{^uint32(0)}, nil, []string{"blocks 8589934590 to 8589934592"}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			pairs, err := m.Pairs(Selection{First: c.srcFirst, Blocks: c.src}, Selection{First: c.dstFirst, Blocks: c.dst, Tokens: c.tokens, Regions: c.regions})
			checkError(t, err, c.want)
			if len(pairs) != c.wantPieces {
				t.Errorf("%d pairs, want %d", len(pairs), c.wantPieces)
			}
		})
	}
	wide := mustLayout(t, shaped(region("k", 0, 1<<20, 1<<20, 1<<20, 1<<16), "NHD", 1<<9, 0, 1<<9, 1<<9))
	deep := mustLayout(t, shaped(region("k", 0, 1<<20, 1<<20, 1<<20, 1<<16), "HND", 1<<9, 0, 1<<9, 1<<9))
	if _, err := matched(t, wide, deep).Pairs(Selection{Blocks: [][]BlockID{upTo(65)}}, Selection{Blocks: [][]BlockID{upTo(65)}}); err == nil || !strings.Contains(err.Error(), "more than 16777216 pieces") {
		t.Errorf("a plan of 17 million pieces: %v", err)
	}
}

// BenchmarkCut plans 20,000 block pairs that are cut by heads, half of them to each
// of two decode ranks, or go into blocks of another size.
func BenchmarkCut(b *testing.B) {
	const regions, blocks, limit = 40, 500, 4000
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, c := range []struct {
		name     string
		src, dst someSide
	}{
		{"heads HND", someSide{order: "HND", tokens: 16, end: 8}, someSide{order: "HND", tokens: 16, first: 4, end: 8}},
		{"heads NHD", someSide{order: "NHD", tokens: 16, end: 8}, someSide{order: "NHD", tokens: 16, first: 4, end: 8}},
		{"blocks 16 to 32", someSide{order: "NHD", tokens: 16, end: 8}, someSide{order: "NHD", tokens: 32, end: 8}},
		{"blocks 32 to 16 HND", someSide{order: "HND", tokens: 32, end: 8}, someSide{order: "HND", tokens: 16, end: 8}},
		{"NHD to HND", someSide{order: "NHD", tokens: 16, end: 8}, someSide{order: "HND", tokens: 16, end: 8}},
	} {
		var src, dst []Region
		for i := range regions {
			src = append(src, c.src.regions(fmt.Sprint("layer", i), 0, 1<<40+uint64(i)<<32, 128, 8, limit)...)
			dst = append(dst, c.dst.regions(fmt.Sprint("layer", i), 0, 1<<40+uint64(i)<<32, 128, 8, limit)...)
		}
		m, err := NewMatch(mustLayout(b, src...).Shapes(), mustLayout(b, dst...).Shapes())
		if err != nil {
			b.Fatal(err)
		}
		some := func(tokens uint32) [][]BlockID {
			ids := make([]BlockID, blocks*16/tokens)
			for i, p := range rnd.Perm(limit)[:len(ids)] {
				ids[i] = BlockID(p)
			}
			return [][]BlockID{ids}
		}
		from, to := some(c.src.tokens), some(c.dst.tokens)
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			n := 0
			for b.Loop() {
				pairs, err := m.Pairs(Selection{Blocks: from}, Selection{Blocks: to})
				if err != nil {
					b.Fatal(err)
				}
				n = len(pairs)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/piece")
			b.ReportMetric(float64(n), "pieces")
		})
	}
}
