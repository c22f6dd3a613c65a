// What P says on a link, and what D does: copy these runs, report what P has kept, or stop.

package local

import (
	"fmt"
	"time"
)

// hear takes a frame of P's.
func (r *receiver) hear(src *source, h header, body []byte) error {
	switch h.kind {
	case frameRuns:
		f, err := parseSpoken(body)
		if err == nil {
			err = src.access.check(&f)
		}
		if err != nil {
			return err
		}
		return r.heardRuns(src, h.grant, &f)
	case frameKept:
		return r.heardKept(src, h.grant)
	case frameStop:
		r.heardStop(src, h.grant)
		return nil
	}
	if h.kind == frameAnew {
		r.mu.Lock()
		src.anew = true
		r.mu.Unlock()
		return nil // P ends the link
	}
	return fmt.Errorf("a frame of kind %d, which only decode agents say", h.kind)
}

// owe notes that D has done with so many runs; r.mu is held.
func (src *source) owe(runs int) { src.owed += runs }

// pay gives P credit, a good part of the window at a time, or when P has said nothing more; r.mu is
// held.
func (src *source) pay() {
	if src.owed >= window/8 || src.owed > 0 && src.owed == src.unpaid {
		src.link.say(credit(uint32(src.owed)))
		src.unpaid -= src.owed
		src.owed = 0
	}
}

// heardRuns has what P says copied.
func (r *receiver) heardRuns(src *source, grant random, f *spoken) error {
	n := f.bytes()
	r.mu.Lock()
	if src.unpaid += len(f.runs); src.unpaid > window {
		r.mu.Unlock()
		return fmt.Errorf("%d runs beyond what it was given credit for", src.unpaid-window)
	}
	in := r.byGrant[grant]
	var wrong error
	switch {
	case in == nil || in.source != src:
		in = nil
		src.link.say((&ending{cause: overUnexpected}).bytes(grant))
	case in.over:
	case f.total != in.into.total:
		wrong = fmt.Errorf("local: transfer %q has %d bytes at prefill agent %s, %d here", in.id.Name(), f.total, src.id, in.into.total)
	case !in.covered.Add(f.position, f.position+n):
		wrong = fmt.Errorf("local: transfer %q: bytes %d to %d came twice", in.id.Name(), f.position, f.position+n)
	case len(in.covered) > in.mostIntervals():
		wrong = fmt.Errorf("local: transfer %q: its runs leave more than %d holes", in.id.Name(), in.mostIntervals())
	}
	if in == nil || in.over || wrong != nil {
		src.owe(len(f.runs))
		src.pay()
		r.mu.Unlock()
		if wrong != nil {
			r.breaks(in, wrong)
		}
		src.link.flush()
		return nil
	}
	if in.first.IsZero() {
		in.first, in.validity, in.proof = time.Now(), f.validity, f.proof
	}
	if in.into.total == 0 && !in.done {
		in.done = true
		src.link.say(word(frameDone, grant))
	}
	inline := false
	if len(f.runs) > 0 {
		in.todo = append(in.todo, f.piece)
		in.paces()
		r.enqueue(in)
		// A small transfer is copied at once: to wake a worker takes longer. A device may take its time.
		if inline = n <= copyAtOnce && r.workers == 0 && !r.t.places.any(); !inline {
			r.crew(n)
		}
	}
	r.mu.Unlock()
	if inline {
		r.once(src)
	}
	src.link.flush()
	return nil
}

// copyAtOnce is the most that the reader of a link copies itself.
const copyAtOnce = 128 << 10

// heardKept reports a transfer: P has kept the blocks until all was copied.
func (r *receiver) heardKept(src *source, grant random) error {
	r.mu.Lock()
	in := r.byGrant[grant]
	if in == nil || in.source != src || in.gone {
		r.mu.Unlock()
		return nil // revoked meanwhile, as P is told
	}
	if !in.done {
		r.mu.Unlock()
		return fmt.Errorf("transfer %q is called kept, and was not called done", in.id.Name())
	}
	told, link := r.takes(in), src.link
	r.mu.Unlock()
	r.tell(in, told, in.stats(), nil)
	link.flush()
	return nil
}

// takes ends a transfer well, and tells P so, before anything that is said of the transfer later. The caller must tell the
// outcome if it gets a channel, and flush the link; r.mu is held.
func (r *receiver) takes(in *inbound) chan struct{} {
	told := r.ends(in)
	if told != nil {
		in.source.link.say(word(frameTaken, in.grant))
	}
	return told
}

// heardStop ends the copies of a transfer. It stays expected: the control plane says why P has
// stopped, and what comes of it.
func (r *receiver) heardStop(src *source, grant random) {
	r.mu.Lock()
	in := r.byGrant[grant]
	said := in == nil || in.source != src
	if !said {
		r.halt(in)
		in.stopped = true
		said = in.flying == 0
	}
	if said {
		src.link.say((&ending{cause: overStopped}).bytes(grant))
	}
	src.pay()
	r.mu.Unlock()
	src.link.flush()
}
