package kv

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
)

func TestMeetings(t *testing.T) {
	for _, c := range []struct {
		p, d Ranks
		want []string // of each D rank, stage after stage: rank@stage k/of source
	}{
		{One, One, []string{"0@0 0/1 s0"}},
		{Ranks{2, 1}, Ranks{2, 1}, []string{"0@0 0/1 s0", "1@0 0/1 s1"}},
		{Ranks{1, 1}, Ranks{2, 1}, []string{"0@0 0/2 s0", "0@0 1/2 s0"}},
		{Ranks{2, 1}, Ranks{1, 1}, []string{"0@0 0/1 s0, 1@0 0/1 s1"}},
		{Ranks{4, 1}, Ranks{1, 1}, []string{"0@0 0/1 s0, 1@0 0/1 s1, 2@0 0/1 s2, 3@0 0/1 s3"}},
		{Ranks{2, 1}, Ranks{3, 1}, []string{"0@0 0/2 s0", "0@0 1/2 s0, 1@0 0/2 s1", "1@0 1/2 s1"}},
		{Ranks{3, 1}, Ranks{2, 1}, []string{"0@0 0/1 s0, 1@0 0/2 s1", "1@0 1/2 s1, 2@0 0/1 s2"}},
		{Ranks{2, 1}, Ranks{4, 1}, []string{"0@0 0/2 s0", "0@0 1/2 s0", "1@0 0/2 s1", "1@0 1/2 s1"}},
		{Ranks{1, 2}, Ranks{1, 1}, []string{"0@0 0/1 s0, 0@1 0/1 s1"}},
		{Ranks{1, 1}, Ranks{1, 2}, []string{"0@0 0/2 s0", "0@0 1/2 s0"}},
		{Ranks{2, 2}, Ranks{4, 1}, []string{"0@0 0/2 s0, 0@1 0/2 s2", "0@0 1/2 s0, 0@1 1/2 s2", "1@0 0/2 s1, 1@1 0/2 s3", "1@0 1/2 s1, 1@1 1/2 s3"}},
		{Ranks{1, 2}, Ranks{2, 2}, []string{"0@0 0/4 s0, 0@1 0/4 s1", "0@0 2/4 s0, 0@1 2/4 s1", "0@0 1/4 s0, 0@1 1/4 s1", "0@0 3/4 s0, 0@1 3/4 s1"}},
	} {
		var got []string
		for pp := range c.d.PP {
			for tp := range c.d.TP {
				list, err := Meetings(c.p, c.d, Rank{tp, pp})
				if err != nil {
					t.Fatal(err)
				}
				var text []string
				for _, m := range list {
					text = append(text, fmt.Sprintf("%d@%d %d/%d s%d", m.Rank.TP, m.Rank.PP, m.Share.K, m.Share.Of, m.Share.Source))
				}
				got = append(got, strings.Join(text, ", "))
			}
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("from %v to %v:\ngot  %q\nwant %q", c.p, c.d, got, c.want)
		}
	}
}

func TestMeetingsRefused(t *testing.T) {
	for _, c := range []struct {
		p, d Ranks
		r    Rank
		says string
	}{
		{Ranks{0, 1}, One, Rank{}, "tp_size 0"},
		{Ranks{1, -1}, One, Rank{}, "pp_size -1"},
		{Ranks{MaxRanks, MaxRanks}, One, Rank{}, "65536 ranks at most"},
		{Ranks{1 << 40, 1}, One, Rank{}, "tp_size"},
		{One, Ranks{2, 1}, Rank{2, 0}, "want 0 to 1"},
		{One, Ranks{2, 1}, Rank{0, 1}, "rank tp 0 pp 1"},
		{One, Ranks{2, 1}, Rank{-1, 0}, "rank tp -1"},
		{Ranks{65, 1}, One, Rank{}, "from 65 ranks"},
		{Ranks{8, 9}, One, Rank{}, "from 72 ranks"},
		{One, Ranks{65, 1}, Rank{}, "by 65 ranks"},
		{One, Ranks{8, 16}, Rank{}, "by 128 ranks"},
	} {
		if list, err := Meetings(c.p, c.d, c.r); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("rank %v of %v from %v: %v, %v, want an error with %q", c.r, c.d, c.p, list, err, c.says)
		}
	}
}

// modelLayer is a layer's cache at one rank: heads of the model in one region, or
// each in a region of its own, or a latent that all ranks hold.
type modelLayer struct{ heads int } // 0: a latent

// held is the part of a model that a rank holds, as frameworks deal it out: heads evenly
// or, with fewer heads than ranks, one of them to each.
func held(model []modelLayer, n Ranks, r Rank) (out []Shape) {
	for layer, m := range model {
		if layer*n.PP/len(model) != r.PP {
			continue
		}
		if m.heads == 0 {
			out = append(out, Shape{Name: fmt.Sprint("L", layer), BlockBytes: 64})
			continue
		}
		first, end := r.TP*m.heads/n.TP, (r.TP+1)*m.heads/n.TP
		for h := first; h < max(end, first+1); h++ {
			out = append(out, Shape{Name: fmt.Sprintf("L%d#h%d", layer, h), BlockBytes: 64})
		}
	}
	return out
}

// TestMeetingsCover: in any two engines each region of every D rank is from one P
// rank, each P rank hears from the same D ranks as those say, and no share twice.
func TestMeetingsCover(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	pick := func(from ...int) int { return from[rnd.IntN(len(from))] }
	several, replicated := 0, 0
	for n := range 1500 {
		p, d := Ranks{pick(1, 2, 3, 4, 6, 8), pick(1, 1, 2, 3)}, Ranks{pick(1, 2, 3, 4, 6, 8), pick(1, 1, 2, 4)}
		model := make([]modelLayer, 4+rnd.IntN(8))
		for i := range model {
			// As frameworks have it: heads divide among the ranks, or ranks among the heads.
			if heads := pick(1, 2, 4, 8, 24, 48); (heads%p.TP == 0 || p.TP%heads == 0) && (heads%d.TP == 0 || d.TP%heads == 0) {
				model[i].heads = heads
			}
		}
		shares := map[Rank]map[int]bool{}
		for pp := range d.PP {
			for tp := range d.TP {
				list, err := Meetings(p, d, Rank{tp, pp})
				if err != nil {
					t.Fatal(err)
				}
				mine := held(model, d, Rank{tp, pp})
				sources := make([]Source, len(list))
				for i, m := range list {
					sources[i] = Source{Name: m.Rank.String(), Shapes: held(model, p, m.Rank)}
					if m.Share.Check() != nil || m.Share.Source != m.Rank.PP*p.TP+m.Rank.TP || i > 0 && list[i-1].Share.Source >= m.Share.Source {
						t.Fatalf("%v to %v: meeting %d is %+v", p, d, i, m)
					}
					of := shares[m.Rank]
					if of == nil {
						of = map[int]bool{}
						shares[m.Rank] = of
					}
					if of[m.Share.K] {
						t.Fatalf("%v to %v: share %d of rank %v is given twice", p, d, m.Share.K, m.Rank)
					}
					of[m.Share.K] = true
					if i > 0 {
						several++
					}
				}
				regions, err := Cover(mine, sources)
				if err != nil {
					t.Fatalf("run %d, %v to %v rank tp %d pp %d of %v: %v", n, p, d, tp, pp, model, err)
				}
				from := make([]int, len(mine))
				for _, list := range regions {
					for _, r := range list {
						from[r]++
					}
					if len(list) == 0 {
						replicated++
					}
				}
				for r, k := range from {
					if k != 1 {
						t.Fatalf("%v to %v: region %q of rank tp %d pp %d is from %d ranks", p, d, mine[r].Name, tp, pp, k)
					}
				}
			}
		}
		// Every P rank hears from as many D ranks as each of these D ranks tells it.
		for pp := range p.PP {
			for tp := range p.TP {
				of := shares[Rank{tp, pp}]
				if len(of) == 0 {
					t.Fatalf("%v to %v: nobody meets rank tp %d pp %d", p, d, tp, pp)
				}
				for dpp := range d.PP {
					for dtp := range d.TP {
						list, _ := Meetings(p, d, Rank{dtp, dpp})
						for _, m := range list {
							if m.Rank == (Rank{tp, pp}) && m.Share.Of != len(of) {
								t.Fatalf("%v to %v: rank %v hears from %d, is told of %d", p, d, m.Rank, len(of), m.Share.Of)
							}
						}
					}
				}
			}
		}
	}
	if several == 0 || replicated == 0 {
		t.Fatalf("%d meetings of several, %d of which nothing is needed", several, replicated)
	}
}

func TestCover(t *testing.T) {
	shape := func(names ...string) (out []Shape) {
		for _, n := range names {
			out = append(out, Shape{Name: n, BlockBytes: 64})
		}
		return out
	}
	for _, c := range []struct {
		mine []Shape
		from [][]Shape
		want string
	}{
		{shape("a", "b"), [][]Shape{shape("a", "b")}, "[[0 1]]"},
		{shape("a", "b"), [][]Shape{shape("b", "a", "x")}, "[[0 1]]"},
		{shape("a", "b", "c"), [][]Shape{shape("c"), shape("a", "b")}, "[[2] [0 1]]"},
		{shape("a", "b"), [][]Shape{shape("a", "b"), shape("a", "b")}, "[[0 1] []]"},
		{shape("a", "b"), [][]Shape{shape("x"), shape("a"), shape("a", "b")}, "[[] [0] [1]]"},
		{shape("a", "b"), [][]Shape{shape("a"), shape("x")}, `no rank of the prefill engine has region "b" of group 0; its ranks that this rank loads from are r0, r1`},
		{shape("layer.1[X]"), [][]Shape{shape("layer.0[Y]", "layer.1[Y]", "layer.11[Y]")}, `no rank of the prefill engine has region "layer.1[X]" of group 0, but "layer.1[Y]"; its ranks that this rank loads from are r0`},
		{append(shape("a"), Shape{Name: "a", Group: 1}), [][]Shape{shape("a")}, `no rank of the prefill engine has region "a" of group 1; its ranks that this rank loads from are r0`},
	} {
		var sources []Source
		for i, s := range c.from {
			sources = append(sources, Source{fmt.Sprint("r", i), s})
		}
		got, err := Cover(c.mine, sources)
		text := fmt.Sprint(got)
		if err != nil {
			text = err.Error()
		}
		if text != c.want {
			t.Errorf("%v from %v: %s, want %s", c.mine, c.from, text, c.want)
		}
	}
}
