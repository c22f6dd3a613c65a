package rdma

import (
	"errors"
	"math"
	"reflect"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/seed"
)

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func at(d time.Duration) time.Time { return epoch.Add(d) }

// paused is a path that failed at the epoch.
func paused(name string) *path {
	r := newPath(1e9)
	r.fail(epoch, errors.New("cable of "+name))
	return r
}

func TestPathSpeed(t *testing.T) {
	const mb = 1 << 20
	r := newPath(1000 * mb)
	near := func(want float64) {
		t.Helper()
		if got := r.rate(r.measured) / mb; math.Abs(got-want) > want/100 {
			t.Errorf("%.1f MiB/s, want %.1f", got, want)
		}
	}
	near(1000)
	// 400 MiB in a second: a quarter of the difference counts, as a factor.
	r.begin(at(0), 300*mb)
	r.begin(at(50*time.Millisecond), 100*mb)
	r.end(at(time.Second), 400*mb)
	near(1000 * math.Pow(0.4, 0.25))
	// A sample far from the others, whose completions came all at once, changes little.
	r = newPath(1000 * mb)
	r.begin(at(0), 400*mb)
	r.end(at(time.Microsecond), 400*mb)
	near(1000 * math.Pow(maxStray, 0.25))
	r.begin(at(time.Second), 5*mb)
	r.end(at(time.Hour), 5*mb)
	near(1000)
	// Few bytes are no measurement, nor is idle time.
	r = newPath(1000 * mb)
	r.begin(at(0), 3*mb)
	r.end(at(time.Second), 3*mb)
	r.begin(at(2*time.Second), 3*mb)
	r.end(at(3*time.Second), 3*mb)
	near(1000)
	// In the middle of a stream samples follow each other.
	r = newPath(1000 * mb)
	r.begin(at(0), 100*mb)
	for i := range 100 {
		r.end(at(time.Duration(i+1)*10*time.Millisecond), mb)
	}
	near(100)
	if r.inFlight != 0 {
		t.Errorf("%d bytes are left", r.inFlight)
	}
	// Lost bytes are no measurement, nor is time that stands still.
	r = newPath(1000 * mb)
	r.begin(at(0), 100*mb)
	r.lose(at(time.Second), 90*mb)
	r.end(at(time.Second), 10*mb)
	near(1000)
	if r.end(at(time.Second), 1<<60); r.inFlight != 0 {
		t.Errorf("%d bytes are left", r.inFlight)
	}
}

func TestPathSpeedFades(t *testing.T) {
	r := newPath(1000)
	r.speed, r.measured = 200, epoch
	for after, want := range map[time.Duration]float64{-time.Second: 200, 0: 200, 10 * time.Minute: 600, 20 * time.Minute: 800, 24 * time.Hour: 1000} {
		if got := r.rate(at(after)); math.Abs(got-want) > 1e-6 {
			t.Errorf("after %v: %v, want %v", after, got, want)
		}
	}
	for _, link := range []float64{0, -5, math.NaN(), math.Inf(1)} {
		if got := newPath(link).rate(epoch); got != 1 {
			t.Errorf("a link of %v has speed %v", link, got)
		}
	}
}

func TestPathPauses(t *testing.T) {
	boom := errors.New("boom")
	r := newPath(1)
	now := epoch
	if !r.usable() || r.retry(now) {
		t.Fatal("a new path is paused")
	}
	// It fails each time that it is tried.
	r.fail(now, boom)
	for _, want := range []time.Duration{1, 2, 4, 8, 16, 30, 30} {
		want *= time.Second
		r.fail(now.Add(want/2), errors.New("its other lane"))
		if r.usable() || r.retry(now.Add(want-1)) {
			t.Fatalf("it is tried before %v", want)
		}
		if now = now.Add(want); !r.retry(now) {
			t.Fatalf("it is not tried after %v", want)
		}
		if r.usable() || r.retry(now) || r.retry(now.Add(want-1)) {
			t.Fatal("it is tried twice")
		}
		r.fail(now, boom)
	}
	// If nothing is heard of a try, it is made again.
	if now = now.Add(longPause); !r.retry(now) || r.retry(now) {
		t.Fatal("not tried once")
	}
	if now = now.Add(longPause); !r.retry(now) {
		t.Fatal("not tried again")
	}
	r.restored(now)
	if !r.usable() || r.retry(now.Add(time.Hour)) {
		t.Fatal("restored, and yet paused")
	}
	// If the path fails again soon, that is the same trouble. If it fails late, that is another.
	r.fail(now.Add(longPause-1), boom)
	now = now.Add(longPause - 1)
	if r.retry(now.Add(29*time.Second)) || !r.retry(now.Add(longPause)) {
		t.Fatal("the pause was not the longest")
	}
	now = now.Add(longPause)
	r.restored(now)
	now = now.Add(longPause)
	r.fail(now, nil)
	if r.usable() || r.retry(now.Add(time.Second-1)) || !r.retry(now.Add(time.Second)) {
		t.Fatal("the pause was not the first")
	}
	r.restored(now.Add(2 * time.Second))
	r.fail(now.Add(3*time.Second), boom)
	if now = now.Add(3 * time.Second); r.retry(now.Add(2*time.Second-1)) || !r.retry(now.Add(2*time.Second)) {
		t.Fatal("the pause was not twice the first")
	}
}

func TestChoosePaths(t *testing.T) {
	up := func(rate float64, inFlight uint64, near distance) candidate {
		r := newPath(rate)
		r.inFlight = inFlight
		return candidate{r, near}
	}
	down := candidate{paused("down"), sameSwitch}
	s := stripeSizes{near: 1000, far: 100000}
	for _, c := range []struct {
		name  string
		paths []candidate
		bytes uint64
		want  []float64 // in proportion
	}{
		{"small: the first", []candidate{up(100, 0, sameNode), up(100, 0, sameNode)}, 999, []float64{1, 0}},
		{"small: the faster", []candidate{up(100, 0, sameNode), up(101, 0, sameNode)}, 999, []float64{0, 1}},
		{"small: the one with less to do", []candidate{up(100, 500, sameNode), up(100, 499, sameNode)}, 999, []float64{0, 1}},
		{"small: done first, although it has more to do", []candidate{up(100, 100, sameNode), up(1000, 500, sameNode)}, 999, []float64{0, 1}},
		{"small: the nearest, although it is slow", []candidate{up(1e6, 0, otherNode), up(100, 1e6, sameRoot)}, 999, []float64{0, 1}},
		{"small: the nearest is down", []candidate{down, up(100, 0, otherNode), up(100, 0, farUnknown)}, 999, []float64{0, 1, 0}},
		{"larger: all of the nearest", []candidate{up(100, 0, sameNode), up(300, 0, sameNode), up(100, 0, otherNode)}, 1000, []float64{1, 3, 0}},
		{"larger: all done at the same time", []candidate{up(100, 1000, sameNode), up(300, 0, sameNode)}, 7000, []float64{1, 6}},
		{"larger: one has too much to do", []candidate{up(100, 1e6, sameNode), up(300, 0, sameNode), up(100, 0, sameNode)}, 4000, []float64{0, 3, 1}},
		{"large: all that are up", []candidate{up(100, 0, sameNode), up(100, 0, otherNode), down}, 100000, []float64{1, 1, 0}},
		{"nothing", []candidate{up(100, 0, sameNode), up(100, 0, sameNode)}, 0, []float64{1, 0}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := choosePaths(c.paths, c.bytes, s, epoch)
			norm := func(w []float64) []float64 {
				sum := 0.0
				for _, x := range w {
					sum += x
				}
				out := make([]float64, len(w))
				for i, x := range w {
					out[i] = math.Round(x/sum*1e6) / 1e6
				}
				return out
			}
			if !reflect.DeepEqual(norm(got), norm(c.want)) {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
	if w := choosePaths([]candidate{up(1, 7, sameNode), up(1, 7, sameNode)}, 0, stripeSizes{}, epoch); w == nil || w[0]+w[1] <= 0 {
		t.Errorf("nothing, over all paths: %v", w)
	}
}

func TestChoosePathsRefuses(t *testing.T) {
	if w := choosePaths(nil, 1, stripeSizes{}, epoch); w != nil {
		t.Errorf("no paths: %v", w)
	}
	a, b := paused("a:1 > b:1"), paused("a:2 > b:2")
	if w := choosePaths([]candidate{{a, sameNode}, {b, sameNode}}, 1, stripeSizes{}, at(250*time.Millisecond)); w != nil {
		t.Errorf("all paths are paused: %v", w)
	}
}

// However the paths are, their shares add up to the transfer, and a paused path gets
// none. All paths that get a share end at the same time. If a path that is not paused gets none,
// the bytes that it has already keep it busy for longer.
func TestChoosePathsRandom(t *testing.T) {
	rnd := seed.Rand(t)
	for range 2000 {
		paths := make([]candidate, 1+rnd.IntN(8))
		up := 0
		for i := range paths {
			r := newPath(1 + rnd.Float64()*1e9)
			r.inFlight = uint64(rnd.IntN(1 << 30))
			if rnd.IntN(4) == 0 {
				r.fail(epoch, errors.New("x"))
			} else {
				up++
			}
			paths[i] = candidate{r, distance(rnd.IntN(4))}
		}
		bytes := 1 + uint64(rnd.IntN(1<<30))
		w := choosePaths(paths, bytes, stripeSizes{}, epoch)
		if (w != nil) != (up > 0) {
			t.Fatalf("%d paths are up: %v", up, w)
		}
		if w == nil {
			continue
		}
		sum, done := 0.0, 0.0
		for i, c := range paths {
			if sum += w[i]; w[i] > 0 {
				done = (w[i] + float64(c.path.inFlight)) / c.path.rate(epoch)
			}
		}
		if math.Abs(sum/float64(bytes)-1) > 1e-6 {
			t.Fatalf("%v adds up to %v, not to %d", w, sum, bytes)
		}
		for i, c := range paths {
			mine := (w[i] + float64(c.path.inFlight)) / c.path.rate(epoch)
			switch {
			case !c.path.usable() && w[i] != 0:
				t.Fatalf("path %d is paused and gets %v", i, w[i])
			case w[i] > 0 && math.Abs(mine/done-1) > 1e-6, c.path.usable() && w[i] == 0 && mine < done*(1-1e-9):
				t.Fatalf("path %d is done after %v, others after %v: %v", i, mine, done, w)
			}
		}
	}
}
