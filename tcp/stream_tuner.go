// P sends the bytes for a D over as many of D's streams as pay between the two hosts. One stream fills a slow link, and several fill a
// fast one. If there are more streams than the processors can serve, they take from each other. P finds the number, since P knows
// when all streams have work. It compares the rate of the number in use with that of one more, or of one less, by measurements in
// turn, so that other work on the hosts slows both.
//
// The rate is that of the bytes that D's kernel has acknowledged on all streams, those that rest included. Bytes that P writes first
// go into P's socket buffers. A stream that has rested has empty buffers, which take bytes at the speed of memory. So by the
// bytes that P writes, one more stream would seem to pay on any link. D's socket buffers take bytes at that speed too, and D's
// kernel acknowledges them. So nothing counts until P has written as much as the buffers of all streams in use hold. That is so after
// another number came into use, after a stream has opened, ended or turned out to be of no use, and after a stream had nothing to send.

package tcp

import (
	"slices"
	"time"

	"go.uber.org/zap"
)

const (
	// settleFrames whole frames for each stream in use are written before anything counts: 10 MiB. That is what Linux gives a
	// connection's buffers at most by default, 4 MiB at P (tcp_wmem) and 6 MiB at D (tcp_rmem).
	settleFrames  = 5
	pieceFrames   = 2                     // so many whole frames for each stream in use are written between two readings of the acknowledged bytes
	measurePieces = 8                     // a measurement has at least so many of these pieces
	measureTime   = 50 * time.Millisecond // and takes at least so long
	comparisons   = 5                     // of two measurements each; their median decides
	worthOneMore  = 1.08                  // the least ratio of the rates for which a further stream is used
	worthOneLess  = 0.97                  // the least one for which a stream rests
	shortestPause = 4                     // measurements between two trials; a trial that changes nothing doubles it
	longestPause  = 256
)

// streamTuner is how many streams are used for one D, and the search for the number. sender.mu guards it.
type streamTuner struct {
	frame   uint64 // bytes of a whole frame
	use     int    // streams that take frames, if so many are open
	found   int    // the number that paid best
	tries   int    // the number that P compares with found; 0: no trial goes on
	most    int    // so many were open when D was asked for one more, and none above them was measured since; 0: D is to be asked
	missing int    // the number found before D had fewer streams; 0: a trial has found another since, or D has had as many
	less    bool   // the next trial is of one less
	pause   int    // measurements from one trial to the next
	wait    int    // how many measurements are left until the next trial
	asked   bool   // D was asked for a further stream just now
	rate    float64
	ratios  []float64

	// The measurement under way.
	round   int     // rises when what was written since the last reading does not count
	written uint64  // bytes since then
	settled bool    // the buffers are full, and last was read since
	reads   bool    // a reading is under way
	last    reading // where the next piece begins
	pieces  int
	took    time.Duration
	acked   uint64
}

// reading is how many bytes D's kernel has acknowledged in all, and when P read that.
type reading struct {
	at    time.Time
	acked uint64
}

func newStreamTuner(first int, frame uint64) streamTuner {
	return streamTuner{frame: frame, use: first, found: first, pause: shortestPause, wait: shortestPause}
}

// reset notes that the bytes written since the last reading do not count.
func (b *streamTuner) reset() {
	b.round++
	b.written, b.settled = 0, false
}

// wrote notes that a stream has written so many bytes. If it returns true, the caller takes a reading and hands it to read.
func (b *streamTuner) wrote(bytes uint64) (due bool) {
	b.written += bytes
	frames := settleFrames
	if b.settled {
		frames = pieceFrames
	}
	if b.reads || b.written < uint64(frames*b.use)*b.frame {
		return false
	}
	b.reads = true
	return true
}

// read takes a reading that began in a round, with so many streams open. If it ends a measurement, read returns the rate.
func (b *streamTuner) read(round int, r reading, open int) (rate float64, measured bool) {
	b.reads = false
	switch {
	case round != b.round:
		return 0, false
	case open < b.use:
		b.lostStreams(open)
		return 0, false
	case b.settled:
		b.took += r.at.Sub(b.last.at)
		b.acked += r.acked - b.last.acked
		b.pieces++
	}
	b.settled, b.written, b.last = true, 0, r
	if b.pieces < measurePieces || b.took < measureTime {
		return 0, false
	}
	rate = float64(b.acked) / b.took.Seconds()
	b.pieces, b.took, b.acked = 0, 0, 0
	return rate, true
}

// measured takes the rate of the streams in use. If another number is to be measured now, it says so. open is how many streams
// can be used; ask says that D is to open one more.
func (b *streamTuner) measured(rate float64, open int) (other, ask bool) {
	switch {
	case b.tries == 0:
		if b.wait--; b.wait > 0 {
			return false, false
		}
		return false, b.try(open)
	case b.use == b.found:
		b.rate = rate
		b.setUse(b.tries)
	default:
		b.ratios = append(b.ratios, rate/b.rate)
		b.setUse(b.found)
		if len(b.ratios) == comparisons {
			b.decide()
		}
	}
	return true, false
}

// try begins a trial, if another number can be tried. It says whether D must open a stream first.
func (b *streamTuner) try(open int) (ask bool) {
	more := !b.less || b.found == 1
	if more && b.found >= open {
		switch {
		case b.asked: // and D has opened none that lives
		case b.most == 0 || open < b.most:
			b.asked, b.most, b.wait = true, open, 1
			return true
		case b.pause == longestPause: // D is asked again one pause later: the word may have been lost
			b.most = 0
		}
		more = false
	}
	b.asked = false
	switch {
	case more:
		b.tries = b.found + 1
	case b.found > 1:
		b.tries = b.found - 1
	default: // one stream, and D opens no other
		b.pause = min(2*b.pause, longestPause)
	}
	b.wait = b.pause
	return false
}

func (b *streamTuner) decide() {
	slices.Sort(b.ratios)
	ratio, least := b.ratios[comparisons/2], worthOneMore
	if b.tries < b.found {
		least = worthOneLess
	}
	found := b.found
	if max(found, b.tries) > b.most { // D had more, and they lived
		b.most = 0
	}
	if b.less = b.tries < b.found; ratio >= least {
		found, b.pause = b.tries, shortestPause
	} else {
		b.less, b.pause = !b.less, min(2*b.pause, longestPause)
	}
	if found != b.found {
		b.missing = 0
	}
	b.setFound(found)
}

// finds ends a trial.
func (b *streamTuner) setFound(n int) {
	b.found, b.tries, b.wait, b.ratios = n, 0, b.pause, b.ratios[:0]
	b.setUse(n)
}

func (b *streamTuner) setUse(n int) {
	b.use = n
	b.pieces, b.took, b.acked = 0, 0, 0
	b.reset()
}

// lostStreams says that D has had fewer streams than are in use for as long as the others took to write what settles.
func (b *streamTuner) lostStreams(open int) {
	if open > 0 {
		b.missing, b.pause = max(b.missing, b.found), shortestPause
		b.setFound(open)
	}
}

// opened says that so many streams can be used now. Those that were missing are used again.
func (b *streamTuner) opened(open int) {
	if b.found < open && open <= b.missing {
		b.setFound(open)
	}
	if open >= b.missing {
		b.missing = 0
	}
	b.reset()
}

// meter reads how many bytes D's kernel has acknowledged on the streams of one D. It is called without sender.mu, since the kernel
// answers only while no call writes to the stream.
func meter(streams []*outStream) (r reading) {
	for _, st := range streams {
		if info := st.info(); info != nil { // else the stream has ended: the reading does not count then
			r.acked += info.Bytes_acked
		}
	}
	r.at = time.Now()
	return r
}

// able says whether a stream can take frames; sender.mu is held.
func (st *outStream) able() bool { return st != nil && !st.shut && !st.stalled }

// usable are the streams that can take frames; sender.mu is held.
func (p *outPeer) usable() (streams []*outStream) {
	for i := range p.slots {
		if st := p.slots[i].stream; st.able() {
			streams = append(streams, st)
		}
	}
	return streams
}

// uses says whether a stream is one of those that take frames: the first ones that can; sender.mu is held.
func (p *outPeer) uses(st *outStream) bool {
	before := 0
	for i := range p.slots[:st.number] {
		if p.slots[i].stream.able() {
			before++
		}
	}
	return st.able() && before < p.tuner.use
}

// unopened is the first number that has no open stream; -1 if all have one; sender.mu is held.
func (p *outPeer) unopened() int {
	return slices.IndexFunc(p.slots[:], func(s outSlot) bool { return s.stream == nil })
}

// applyFound begins the search for the number of a D's streams; sender.mu is held.
func (s *sender) applyFound(p *outPeer) {
	before := &p.tuner
	b := newStreamTuner(s.t.cfg.First, s.t.cfg.FrameBytes)
	b.round, b.reads = before.round+1, before.reads // a reading may be under way
	p.tuner, p.asks = b, false
}

// wrote counts bytes of a frame that a stream has written.
func (s *sender) wrote(p *outPeer, bytes uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := &p.tuner
	if !b.wrote(bytes) {
		return
	}
	round, streams := b.round, p.usable()
	s.mu.Unlock()
	r := s.meter(streams)
	s.mu.Lock()
	open, found := min(len(p.usable()), s.t.cfg.Streams), b.found
	use := b.use
	if rate, measured := b.read(round, r, open); measured {
		_, ask := b.measured(rate, open)
		// Streams that may not pay must keep out no agent that has none.
		p.asks = p.asks || ask && p.open < s.t.cfg.Streams && s.streams < s.t.cfg.MaxStreams/2
	}
	if b.use != use || p.asks {
		p.wake.Broadcast()
	}
	if b.found != found {
		s.t.cfg.Logger.Debug("streams in use", zap.String("peer", string(p.id)), zap.Int("streams", b.found), zap.Int("before", found))
	}
}
