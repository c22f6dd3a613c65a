package rdma

import (
	"errors"
	"math"
	"time"
)

// A path's pauses: the first, and the longest.
const (
	firstPause = time.Second
	longPause  = 30 * time.Second
)

const (
	// sampleBytes is the least that a measurement of speed holds: less is latency.
	sampleBytes = 4 << 20
	// maxStray is by how much a sample may differ from the speed before it. Completions
	// come late and then many at once: such a sample is a thousand times too fast, and
	// would keep bytes from all other paths.
	maxStray = 4.0
	// speedFades is the time in which a measured speed counts half: a path that
	// was slow once must get bytes again to be measured again.
	speedFades = 10 * time.Minute
)

// path is a pair of ports, one here and one at the peer, that reach each other:
// how fast it is, what it carries now, and whether it is paused. It has no lock
// and no clock of its own.
type path struct {
	line float64 // bytes a second, as the ports say

	inFlight uint64 // bytes under way
	speed    float64
	measured time.Time // when speed was; zero: never
	busyFrom time.Time // of the sample that is being taken
	sample   uint64    // its bytes

	cause   error // why it is paused; nil: it is not
	pause   time.Duration
	retryAt time.Time
	trying  bool
	upSince time.Time
}

// newPath seeds a path's speed with the slower port's, in bytes a second.
func newPath(line float64) *path {
	if !(line >= 1 && line <= math.MaxFloat64) {
		line = 1
	}
	return &path{line: line, speed: line}
}

// begin says that bytes were given to the path.
func (r *path) begin(now time.Time, bytes uint64) {
	if r.inFlight == 0 {
		r.busyFrom, r.sample = now, 0
	}
	r.inFlight += bytes
}

// end says that bytes of begin have arrived. A sample ends with enough of them;
// time in which nothing is under way belongs to none.
func (r *path) end(now time.Time, bytes uint64) {
	r.inFlight -= min(bytes, r.inFlight)
	r.sample += bytes
	if busy := now.Sub(r.busyFrom); r.sample >= sampleBytes && busy > 0 {
		r.speed *= math.Sqrt(math.Sqrt(min(max(float64(r.sample)/busy.Seconds()/r.speed, 1/maxStray), maxStray)))
		r.measured = now
		r.busyFrom, r.sample = now, 0
	}
}

// lose says that bytes of begin will not arrive; what was being measured is void.
func (r *path) lose(now time.Time, bytes uint64) {
	r.inFlight -= min(bytes, r.inFlight)
	r.busyFrom, r.sample = now, 0
}

// rate is the path's speed in bytes a second as far as it is known: an average
// of what was measured, which fades into what the ports say.
func (r *path) rate(now time.Time) float64 {
	if r.measured.IsZero() {
		return r.line
	}
	age := max(now.Sub(r.measured), 0)
	return r.line + (r.speed-r.line)*math.Exp2(-float64(age)/float64(speedFades))
}

// usable says whether the path is not paused.
func (r *path) usable() bool { return r.cause == nil }

// fail pauses the path: 1 s first, twice as long each time up to 30 s, unless it
// has worked for so long in between. What else fails of a paused path, lane after
// lane, changes nothing, but a try that fails does.
func (r *path) fail(now time.Time, cause error) {
	if r.cause != nil && !r.trying {
		return
	}
	again := r.cause != nil || (r.pause > 0 && now.Sub(r.upSince) < longPause)
	r.pause = min(2*r.pause, longPause)
	if !again {
		r.pause = firstPause
	}
	if r.cause = cause; cause == nil {
		r.cause = errors.New("unknown")
	}
	r.trying = false
	r.retryAt = now.Add(r.pause)
}

// retry says whether a paused path is to be tried now. It says so once, then not
// before another pause, unless restored or fail tells the outcome.
func (r *path) retry(now time.Time) bool {
	if r.cause == nil || now.Before(r.retryAt) {
		return false
	}
	r.trying = true
	r.retryAt = now.Add(r.pause)
	return true
}

// resume has a paused path tried now: a port of it has come back. The pauses after that
// begin anew.
func (r *path) resume(now time.Time) {
	if r.cause != nil {
		r.retryAt, r.pause = now, firstPause/2 // if that fails it is firstPause
	}
}

// restored ends the pause.
func (r *path) restored(now time.Time) {
	if r.cause != nil {
		r.cause, r.trying, r.upSince = nil, false, now
	}
}

// candidate is a path that a transfer could take.
type candidate struct {
	path *path
	near distance // of the worse end to the transfer's memory
}

// stripeSizes says from which size on a transfer takes more than one path.
type stripeSizes struct {
	near uint64 // all of the nearest class
	far  uint64 // those of other classes too
}

// choosePaths says what each candidate should carry of a transfer: a weight for
// split, 0 for none. A small transfer takes the one of the nearest that will be
// done with it first; a larger one is spread so that all are done at the same
// time, with what they carry already. Nothing is returned when all paths are paused.
func choosePaths(paths []candidate, bytes uint64, s stripeSizes, now time.Time) []float64 {
	nearest, found := distance(0), false
	for _, c := range paths {
		if c.path.usable() && (!found || c.near < nearest) {
			nearest, found = c.near, true
		}
	}
	if !found {
		return nil
	}
	weights := make([]float64, len(paths))
	take := make([]int, 0, len(paths))
	for i, c := range paths {
		if c.path.usable() && (c.near == nearest || bytes >= s.far) {
			take = append(take, i)
		}
	}
	if bytes < s.near && bytes < s.far {
		best, soonest := take[0], math.Inf(1)
		for _, i := range take {
			r := paths[i].path
			if at := (float64(r.inFlight) + float64(bytes)) / r.rate(now); at < soonest {
				best, soonest = i, at
			}
		}
		weights[best] = 1
		return weights
	}
	// All are done at time t: rate·t = in flight + share. Those whose own bytes take
	// longer get none, which moves t.
	for {
		var queued, rate float64
		for _, i := range take {
			queued += float64(paths[i].path.inFlight)
			rate += paths[i].path.rate(now)
		}
		t := (float64(bytes) + queued) / rate
		early := make([]int, 0, len(take))
		for _, i := range take {
			r := paths[i].path
			if weights[i] = max(r.rate(now)*t-float64(r.inFlight), 0); weights[i] > 0 {
				early = append(early, i)
			}
		}
		switch len(early) {
		case 0: // nothing to carry
			weights[take[0]] = 1
			return weights
		case len(take):
			return weights
		}
		take = early
	}
}
