package tcp

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// curves are rates by the number of streams, from 1 on; the last one is that of all numbers above.
var curves = map[string]struct {
	rates []float64
	found []int // any of them
}{
	"a slow link":              {[]float64{1}, []int{1}},
	"two processors":           {[]float64{1, 1.6, 1.5, 1.3, 1.1}, []int{2}},
	"a fast card":              {[]float64{1, 2, 2.9, 3.8, 4.6, 5.4, 6.1, 6.8, 6.8}, []int{7, 8}},
	"a long way with losses":   {[]float64{1, 2, 3, 4, 5, 6, 7, 8}, []int{8}},
	"little more by the third": {[]float64{1, 1.8, 1.85, 1.85}, []int{2}},
}

func rateOf(rates []float64, n int) float64 { return rates[min(n, len(rates))-1] }

// search is a breadth that measures a curve.
type search struct {
	breadth
	rnd        *rand.Rand
	open, most int // streams of D
}

func newSearch(first, most int) *search {
	return &search{newBreadth(first), rand.New(rand.NewPCG(1, 2)), first, most}
}

// goes has it measure a curve, with so much noise, and says how many measurements were of another number than the one found.
func (s *search) goes(t *testing.T, rates []float64, noise float64, measurements int) (others int) {
	t.Helper()
	for range measurements {
		if s.use > s.open {
			t.Fatalf("%d streams are used, and %d are open", s.use, s.open)
		}
		if s.use != s.found {
			others++
		}
		if _, ask := s.measured(rateOf(rates, s.use)*(1+noise*(2*s.rnd.Float64()-1)), s.open); ask && s.open < s.most {
			s.open++
			s.opened(s.open)
		}
	}
	return others
}

// TestBreadth: the number of streams that pays is found, though what is measured varies, and afterwards few measurements are
// of another number.
func TestBreadth(t *testing.T) {
	for name, c := range curves {
		t.Run(name, func(t *testing.T) {
			s := newSearch(FirstStreams, 8)
			s.goes(t, c.rates, 0.02, 2000)
			if !slices.Contains(c.found, s.found) {
				t.Errorf("%d streams are found, want one of %v", s.found, c.found)
			}
			if n := s.goes(t, c.rates, 0.02, 2000); n > 150 {
				t.Errorf("%d of 2000 measurements are of another number than the one that was found", n)
			}
		})
	}
	for most := 1; most <= 3; most++ {
		s := newSearch(most, most)
		if s.goes(t, []float64{1, 2, 3, 4, 5}, 0, 1000); s.found != most {
			t.Errorf("D opens %d streams, and %d are found", most, s.found)
		}
	}
}

// TestBreadthFollows: when the way between the hosts changes, so does the number.
func TestBreadthFollows(t *testing.T) {
	s := newSearch(FirstStreams, 8)
	for round, name := range []string{"a fast card", "a slow link", "two processors", "a fast card"} {
		c := curves[name]
		if s.goes(t, c.rates, 0.02, 6000); !slices.Contains(c.found, s.found) {
			t.Errorf("round %d, %s: %d streams, want one of %v", round, name, s.found, c.found)
		}
	}
}

// TestMeasurement: only the time counts in which all streams in use have a frame.
func TestMeasurement(t *testing.T) {
	b := newBreadth(2)
	now := time.Unix(0, 0)
	const frame = 1 << 20
	b.begins(now)
	now = now.Add(time.Hour) // the other has none
	if _, measured := b.ends(now, frame, measureTime); measured || b.bytes != 0 || b.took != 0 {
		t.Errorf("a frame by one of two streams: %d bytes in %v", b.bytes, b.took)
	}
	b.begins(now)
	b.begins(now)
	for i := range 2 * measureFrames {
		now = now.Add(10 * time.Millisecond)
		rate, measured := b.ends(now, frame, measureTime)
		if want := i == 2*measureFrames-1; measured != want || want && rate != frame*100 {
			t.Fatalf("frame %d: %v, %v", i, rate, measured)
		}
		now = now.Add(time.Hour) // until it takes the next one
		b.begins(now)
	}
	b.ends(now, frame, time.Hour)
	b.ends(now, frame, time.Hour)
	if b.writing != 0 || !b.since.IsZero() {
		t.Errorf("%d streams write, since %v", b.writing, b.since)
	}
}

// TestStreamsAreFound: P has D open streams for as long as they pay, and uses no others.
func TestStreamsAreFound(t *testing.T) {
	const most, best = 6, 4
	leaktest.Check(t)
	p, d := newAgent(t, Config{FrameBytes: 64 << 10, StallTimeout: time.Hour}), newAgent(t, Config{Streams: most, StallTimeout: time.Hour})
	s := &p.sender
	s.measure, s.rates = 0, func(use int) float64 { return float64(min(use, best)) }
	if err := d.Connect("p", p.Endpoint(), p.admit(t, "d")); err != nil {
		t.Fatal(err)
	}
	state := func() string {
		s.mu.Lock()
		defer s.mu.Unlock()
		out := s.peers["d"]
		return fmt.Sprintf("%d streams open, %d found", out.open, out.breadth.found)
	}
	for i := 0; state() != fmt.Sprintf("%d streams open, %d found", best+1, best); i++ {
		if i == 1000 {
			t.Fatal(state())
		}
		id := core.TransferID(fmt.Sprint(i))
		grant := d.expect(t, id, "p", allBlocks(testBlocks))
		p.Write(core.WriteOp{ID: id, Peer: "d", Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
		endsWell(t, id, p, d)
	}
}
