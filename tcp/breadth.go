package tcp

import (
	"slices"
	"time"
)

// The bytes for a D go by as many of its streams as pay between these two hosts. One stream fills a slow link, several fill a
// fast one, and more than the processors can serve take from each other. P finds the number, since P knows when all streams
// have work. It compares the rate of the number in use with that of one more, or of one less, by measurements in turn: what
// else goes on then meets both.

const (
	measureFrames = 16                    // of each stream in use: the least of a measurement
	measureTime   = 50 * time.Millisecond // likewise
	comparisons   = 5                     // of two measurements each; their median decides
	worthOneMore  = 1.08                  // the least ratio of the rates for which a further stream is used
	worthOneLess  = 0.97                  // the least one for which a stream rests
	shortestPause = 4                     // measurements between two trials; a trial that changes nothing doubles it
	longestPause  = 256
)

// breadth is how many streams are used for one D, and the search for the number. sender.mu guards it.
type breadth struct {
	use    int  // streams that take frames, if so many are open
	found  int  // the number that paid best
	tries  int  // the number that is compared with it; 0: no trial goes on
	most   int  // D opens no more, as far as is known; 0: not known
	less   bool // the next trial is of one less
	pause  int  // measurements from one trial to the next
	wait   int  // those that are left of it
	asked  bool // D was asked for a further stream
	rate   float64
	ratios []float64

	// The measurement under way.
	writing int       // streams that have a frame
	since   time.Time // all in use have had one since; zero: they do not
	took    time.Duration
	frames  int
	bytes   uint64
}

func newBreadth(first int) breadth {
	return breadth{use: first, found: first, pause: shortestPause, wait: shortestPause}
}

// begins says that a stream has taken a frame.
func (b *breadth) begins(now time.Time) {
	if b.writing++; b.writing == b.use {
		b.since = now
	}
}

// ends says that a stream's frame has gone, with so many bytes. If that ends a measurement, ends returns the rate.
func (b *breadth) ends(now time.Time, bytes uint64, least time.Duration) (rate float64, measured bool) {
	if !b.since.IsZero() {
		b.took += now.Sub(b.since)
		b.frames++
		b.bytes += bytes
		b.since = now
	}
	if b.writing--; b.writing < b.use {
		b.since = time.Time{}
	}
	if b.frames < measureFrames*b.use || b.took < least {
		return 0, false
	}
	rate = float64(b.bytes) / max(b.took.Seconds(), 1e-9)
	b.took, b.frames, b.bytes = 0, 0, 0
	return rate, true
}

// measured takes the rate of the streams in use. If another number is to be measured now, it says so. open is how many streams
// D has opened; ask says that D is to open one more.
func (b *breadth) measured(rate float64, open int) (other, ask bool) {
	switch {
	case b.tries == 0:
		if b.wait--; b.wait > 0 {
			return false, false
		}
		return false, b.try(open)
	case b.use == b.found:
		b.rate = rate
		b.uses(b.tries)
	default:
		b.ratios = append(b.ratios, rate/b.rate)
		b.uses(b.found)
		if len(b.ratios) == comparisons {
			b.decide()
		}
	}
	return true, false
}

// try begins a trial, if another number can be tried. It says whether D must open a stream first.
func (b *breadth) try(open int) (ask bool) {
	b.wait = b.pause
	more := !b.less || b.found == 1
	if more && b.found >= open {
		switch {
		case b.asked: // and D has opened none
			b.asked, b.most = false, open
		case b.most == 0 || open < b.most:
			b.asked, b.wait = true, 1
			return true
		case b.pause == longestPause: // D is asked again one pause later: the word may have been lost
			b.most = 0
		}
		more = false
	}
	switch {
	case more:
		b.tries = b.found + 1
	case b.found > 1:
		b.tries = b.found - 1
	}
	return false
}

func (b *breadth) decide() {
	slices.Sort(b.ratios)
	ratio, least := b.ratios[comparisons/2], worthOneMore
	if b.tries < b.found {
		least = worthOneLess
	}
	if b.less = b.tries < b.found; ratio >= least {
		b.found, b.pause = b.tries, shortestPause
	} else {
		b.less, b.pause = !b.less, min(2*b.pause, longestPause)
	}
	b.tries, b.wait, b.ratios = 0, b.pause, b.ratios[:0]
	b.uses(b.found)
}

func (b *breadth) uses(n int) {
	if b.use = n; b.writing < n {
		b.since = time.Time{}
	}
	b.took, b.frames, b.bytes = 0, 0, 0
}

// opened says that D has so many streams now.
func (b *breadth) opened(open int) {
	if b.asked = false; open > b.most {
		b.most = 0
	}
}
