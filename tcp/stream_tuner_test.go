package tcp

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// curves are rates by the number of streams, from 1 on; the last one is that of all numbers above.
var curves = map[string]struct {
	rates []float64
	found []int // any of them
}{
	"a slow link":              {[]float64{1}, []int{1}},
	"two processors":           {[]float64{1, 1.6, 1.5, 1.3, 1.1}, []int{2}},
	"a fast card":              {[]float64{1, 2, 2.9, 3.8, 4.6, 5.4, 6.1, 6.8, 6.8}, []int{7, 8}},
	"a long path with losses":  {[]float64{1, 2, 3, 4, 5, 6, 7, 8}, []int{8}},
	"little more by the third": {[]float64{1, 1.8, 1.85, 1.85}, []int{2}},
}

func rateOf(rates []float64, n int) float64 { return rates[min(n, len(rates))-1] }

const testFrame = 2 << 20

// search is a streamTuner that measures a curve.
type search struct {
	streamTuner
	rnd        *rand.Rand
	open, most int // streams of D
}

func newSearch(first, most int) *search {
	return &search{newStreamTuner(first, testFrame), rand.New(rand.NewPCG(1, 2)), first, most}
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

// TestStreamTuner: the number of streams that pays is found, though what is measured varies, and afterwards few measurements are
// of another number.
func TestStreamTuner(t *testing.T) {
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

// TestStreamTunerFollows: when the path between the hosts changes, so does the number.
func TestStreamTunerFollows(t *testing.T) {
	s := newSearch(FirstStreams, 8)
	for round, name := range []string{"a fast card", "a slow link", "two processors", "a fast card"} {
		c := curves[name]
		if s.goes(t, c.rates, 0.02, 6000); !slices.Contains(c.found, s.found) {
			t.Errorf("round %d, %s: %d streams, want one of %v", round, name, s.found, c.found)
		}
	}
}

// TestStreamTunerWithOneStream: if there is nothing to compare, D is asked ever less often.
func TestStreamTunerWithOneStream(t *testing.T) {
	s := newSearch(1, 1)
	asks := 0
	for range 4000 {
		if other, ask := s.measured(1, 1); other {
			t.Fatalf("%d streams are used, of one", s.use)
		} else if ask {
			asks++
		}
	}
	if asks < 2 || asks > 10 {
		t.Errorf("D was asked %d times in 4000 measurements", asks)
	}
}

// TestStreamThatDiesAtOnce: if each further stream of D's dies before it is measured, P asks for it ever less often, and finds out
// nevertheless that fewer streams pay as much.
func TestStreamThatDiesAtOnce(t *testing.T) {
	for when, dies := range map[string]func(*search) bool{
		"at once":         func(s *search) bool { return true },
		"in its trial":    func(s *search) bool { return s.use > 2 },
		"after its trial": func(s *search) bool { return s.wait == s.pause },
	} {
		s := newSearch(2, 2)
		asks := 0
		for range 4000 {
			if s.open > 2 && dies(s) {
				if s.open--; s.use > s.open {
					s.lostStreams(s.open)
				}
				s.reset()
			}
			if _, ask := s.measured(1, s.open); ask {
				asks++
				s.open++
				s.opened(s.open)
			}
		}
		if s.found != 1 || asks < 1 || asks > 40 {
			t.Errorf("%s: %d streams are found, and D was asked %d times in 4000 measurements", when, s.found, asks)
		}
	}
}

// TestStreamTunerWithMissingStreams: the streams that D has lost are used again when they come back, also if P has tried others meanwhile. They are
// not if P has found meanwhile that another number pays, or if D has had them since.
func TestStreamTunerWithMissingStreams(t *testing.T) {
	for what, c := range map[string]struct {
		rates []float64
		found int // of six
	}{"two pay": {[]float64{1, 2}, 6}, "one pays": {[]float64{1}, 1}} {
		s := newSearch(6, 2)
		s.open = 2
		s.lostStreams(s.open)
		s.goes(t, c.rates, 0, 100)
		if s.opened(6); s.found != c.found {
			t.Errorf("%s: %d streams are found, want %d", what, s.found, c.found)
		}
	}
	s := newSearch(6, 6)
	s.lostStreams(2)
	s.opened(6)
	s.setFound(3) // as a trial does
	if s.opened(6); s.found != 3 {
		t.Errorf("%d streams are found, want 3", s.found)
	}
}

// sees hands over a reading of the round.
func (b *streamTuner) sees(at time.Duration, acked uint64, open int) (rate float64, measured bool) {
	return b.read(b.round, reading{time.Unix(0, 0).Add(at), acked}, open)
}

// TestMeasurement: what is written first does not count, and what is written after a break does not.
func TestMeasurement(t *testing.T) {
	const use = 2
	b := newStreamTuner(use, testFrame)
	at, acked, frames := time.Duration(0), uint64(0), 0
	write := func() (due bool) {
		frames++
		at, acked = at+time.Second, acked+testFrame
		return b.wrote(testFrame)
	}
	writes := func(what string, n int) {
		t.Helper()
		for i := 1; ; i++ {
			if due := write(); due != (i == n) {
				t.Fatalf("%s: a reading is due after %d frames: %v", what, i, due)
			} else if due {
				return
			}
		}
	}
	settles := func(what string) {
		t.Helper()
		at, acked = at+time.Hour, acked+1<<50
		writes(what, use*settleFrames)
		if _, measured := b.sees(at, acked, use); measured {
			t.Fatalf("%s: that is measured", what)
		}
	}
	settles("at first")
	writes("the first piece", use*pieceFrames)
	if b.wrote(1 << 40) {
		t.Fatal("two readings at once")
	}
	b.sees(at, acked, use)
	b.wrote(testFrame)
	b.reset()
	settles("after a break")
	writes("a piece that breaks while it is read", use*pieceFrames)
	round := b.round
	b.reset()
	b.read(round, reading{time.Unix(0, 0).Add(time.Hour), 1 << 60}, use)
	settles("after that")
	for i := 1; i < measurePieces; i++ {
		writes("a piece", use*pieceFrames)
		rate, measured := b.sees(at, acked, use)
		if want := i == measurePieces-1; measured != want || want && rate != testFrame {
			t.Fatalf("piece %d: %v, %v", i, rate, measured)
		}
	}
}

// TestStreamTunerWithFewerStreams: D may come back with fewer streams than P has found. Those are used, and more are sought; those that come
// back are used again.
func TestStreamTunerWithFewerStreams(t *testing.T) {
	b := newStreamTuner(6, testFrame)
	settle := func(open int) {
		for !b.wrote(testFrame) {
		}
		b.sees(time.Hour, 0, open)
	}
	settle(6)
	if b.use != 6 {
		t.Fatalf("%d of 6 streams are used", b.use)
	}
	b.reset()
	settle(2)
	if b.use != 2 || b.found != 2 {
		t.Errorf("%d of 2 streams are used, %d found", b.use, b.found)
	}
	b.reset()
	settle(0)
	for open := 3; open <= 8; open++ {
		if b.opened(open); b.use != min(open, 6) {
			t.Errorf("%d of %d streams are used", b.use, open)
		}
	}
	b.reset()
	settle(4)
	s := search{b, rand.New(rand.NewPCG(1, 2)), 4, 8}
	if s.goes(t, []float64{1, 2, 3, 4, 5, 6, 7, 8}, 0, 1000); s.found != 8 {
		t.Errorf("%d streams are found, want 8", s.found)
	}
}

// link is a link of a fixed rate for all streams together, between buffers of each stream at P and at D.
type link struct {
	sends, takes float64   // bytes of the buffers
	held         []float64 // by the buffers of each stream
	went         float64
}

const linkRate = 1 << 30 // bytes a second

// passes is the link's work in a time.
func (l *link) passes(dt time.Duration) {
	for left := linkRate * dt.Seconds(); left > 1; {
		var busy []int
		for i, held := range l.held {
			if held > 0 {
				busy = append(busy, i)
			}
		}
		if len(busy) == 0 {
			return
		}
		share, took := left/float64(len(busy)), 0.0
		for _, i := range busy {
			n := min(share, l.held[i])
			l.held[i] -= n
			took += n
		}
		l.went += took
		left -= took
	}
}

// fills says how many bytes a stream takes at once.
func (l *link) fills(stream int) float64 {
	n := l.sends + l.takes - l.held[stream]
	l.held[stream] += n
	return n
}

// acked is what D's kernel has acknowledged: what has passed, and what is in D's buffers.
func (l *link) acked() uint64 {
	acked := l.went
	for _, held := range l.held {
		acked += min(held, l.takes)
	}
	return uint64(acked)
}

// TestBuffersDoNotPay: a link that one stream fills gets no second one, though the buffers of a stream that has rested take
// bytes at the speed of memory.
func TestBuffersDoNotPay(t *testing.T) {
	for name, l := range map[string]link{
		"buffers of Linux": {sends: 4 << 20, takes: 6 << 20},
		"buffers at P":     {sends: 10 << 20},
		"buffers at D":     {takes: 10 << 20},
		"small buffers":    {sends: 1 << 20, takes: 1 << 20},
	} {
		for what, transfer := range map[string]float64{"one transfer": 1 << 60, "200 MiB at a time": 200 << 20} { // with a rest between them
			t.Run(name+", "+what, func(t *testing.T) {
				l := l
				l.held = make([]float64, 9)
				s, now := newSearch(FirstStreams, 8), time.Duration(0)
				var frames, left float64
				for left = transfer; now < 20*time.Minute; now += time.Millisecond {
					for i := range s.use {
						n := l.fills(i)
						frames, left = frames+n, left-n
						for ; frames >= testFrame; frames -= testFrame {
							if !s.wrote(testFrame) {
								continue
							}
							rate, measured := s.sees(now, l.acked(), s.open)
							if !measured {
								continue
							}
							if _, ask := s.measured(rate, s.open); ask && s.open < s.most {
								s.open++
								s.opened(s.open)
							}
						}
					}
					l.passes(time.Millisecond)
					if s.found > FirstStreams {
						t.Fatalf("%d streams are found after %v", s.found, now)
					}
					if left <= 0 {
						s.reset()
						l.passes(time.Second)
						now, left = now+time.Second, transfer
					}
				}
				if s.found != 1 {
					t.Errorf("%d streams are found", s.found)
				}
			})
		}
	}
}
