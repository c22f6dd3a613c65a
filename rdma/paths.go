// A path's speed is measured and its failures are followed by pauses. By these a transfer chooses its paths.

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

// path is a pair of ports, one here and one at the peer, that reach each other. It says
// how fast the path is, what it carries now, and whether it is paused. It has no lock
// and no clock of its own.
type path struct {
	line float64 // bytes a second, as the ports say

	inFlight uint64 // bytes under way
	speed    float64
	measured time.Time // when speed was measured; zero: never
	busyFrom time.Time // when the sample began that is being taken
	sample   uint64    // that sample's bytes

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
func (p *path) begin(now time.Time, bytes uint64) {
	if p.inFlight == 0 {
		p.busyFrom, p.sample = now, 0
	}
	p.inFlight += bytes
}

// end says that bytes of begin have arrived. A sample ends when it has enough bytes.
// Time in which nothing is under way belongs to no sample.
func (p *path) end(now time.Time, bytes uint64) {
	p.inFlight -= min(bytes, p.inFlight)
	p.sample += bytes
	if busy := now.Sub(p.busyFrom); p.sample >= sampleBytes && busy > 0 {
		p.speed *= math.Sqrt(math.Sqrt(min(max(float64(p.sample)/busy.Seconds()/p.speed, 1/maxStray), maxStray)))
		p.measured = now
		p.busyFrom, p.sample = now, 0
	}
}

// lose says that bytes of begin will not arrive. The measurement under way is void.
func (p *path) lose(now time.Time, bytes uint64) {
	p.inFlight -= min(bytes, p.inFlight)
	p.busyFrom, p.sample = now, 0
}

// rate is the path's speed in bytes a second as far as it is known: an average
// of what was measured, which fades into what the ports say.
func (p *path) rate(now time.Time) float64 {
	if p.measured.IsZero() {
		return p.line
	}
	age := max(now.Sub(p.measured), 0)
	return p.line + (p.speed-p.line)*math.Exp2(-float64(age)/float64(speedFades))
}

// usable says whether the path is not paused.
func (p *path) usable() bool { return p.cause == nil }

// fail pauses the path: 1 s first, twice as long each time up to 30 s, unless the path
// has worked for so long in between. If further lanes of a paused path fail, that
// changes nothing. A try that fails does.
func (p *path) fail(now time.Time, cause error) {
	if p.cause != nil && !p.trying {
		return
	}
	again := p.cause != nil || (p.pause > 0 && now.Sub(p.upSince) < longPause)
	p.pause = min(2*p.pause, longPause)
	if !again {
		p.pause = firstPause
	}
	if p.cause = cause; cause == nil {
		p.cause = errors.New("unknown")
	}
	p.trying = false
	p.retryAt = now.Add(p.pause)
}

// retry says whether to try a paused path now. It says yes once. Then it says no for another
// pause, unless restored or fail has told the outcome before.
func (p *path) retry(now time.Time) bool {
	if p.cause == nil || now.Before(p.retryAt) {
		return false
	}
	p.trying = true
	p.retryAt = now.Add(p.pause)
	return true
}

// resume is called when a port of a path has come back. If the path is paused, it is due now, and
// the pauses after that begin anew with the shortest.
func (p *path) resume(now time.Time) {
	if p.cause != nil {
		p.retryAt, p.pause = now, firstPause/2 // if the try fails, the pause is firstPause
	}
}

// restored notes that the path works again: it ends the pause.
func (p *path) restored(now time.Time) {
	if p.cause != nil {
		p.cause, p.trying, p.upSince = nil, false, now
	}
}

// candidate is a path that a transfer could take.
type candidate struct {
	path *path
	near distance // how near the path's port at this host is to the transfer's memory
}

// stripeSizes are the sizes from which on a transfer takes more than one path.
type stripeSizes struct {
	near uint64 // from here on: all paths of the nearest class
	far  uint64 // from here on: also the paths of other classes
}

// choosePaths says what each candidate should carry of a transfer: a weight for
// split, 0 for none. A small transfer takes one path: the one of the nearest paths that
// will be done with it first. A larger transfer is spread so that all paths are done at
// the same time, counting what they carry already. If all paths are paused, choosePaths
// returns nil.
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
			p := paths[i].path
			if at := (float64(p.inFlight) + float64(bytes)) / p.rate(now); at < soonest {
				best, soonest = i, at
			}
		}
		weights[best] = 1
		return weights
	}
	// All paths are done at time t: rate·t = in flight + share. A path whose own bytes
	// take longer gets none, which moves t.
	for {
		var queued, rate float64
		for _, i := range take {
			queued += float64(paths[i].path.inFlight)
			rate += paths[i].path.rate(now)
		}
		t := (float64(bytes) + queued) / rate
		early := make([]int, 0, len(take))
		for _, i := range take {
			p := paths[i].path
			if weights[i] = max(p.rate(now)*t-float64(p.inFlight), 0); weights[i] > 0 {
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
