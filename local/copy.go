// D copies in batches: a few workers take a batch of one transfer after the other.

package local

import (
	"errors"
	"fmt"
	"syscall"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/hostmem"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/kv"
)

// maxVector is how many runs one copy has at most on either side, so that a copy is short also when
// runs are. The kernel's own limit is 1024.
const maxVector = 512

// batch is a part of a transfer that is copied at once.
type batch struct {
	in       *inbound
	into     *destination
	position uint64
	bytes    uint64
	space    uint32 // of the runs
	runs     []run  // of P's
	off      uint64 // bytes of the first that come before
	finished int    // runs whose last byte it has
	validity uint64 // where P says that the page is
	proof    uint64
	pid      int
	access   memoryAccess // nil: P's process is read
	looks    bool         // at the page, when it has copied by that access
	proven   bool         // it found the proof there
	past     uint64       // bytes that have passed the caches, see copyOf
	on       *stint
}

// copier is the memory of one worker.
type copier struct {
	t          *Transport
	passed     [1]byte // a validity page's byte is copied here
	found      uint64  // and its word, after the blocks
	into, from []iovec
	pairs      []kv.Pair // room for those of plans
}

// copier takes one that nobody uses. It must be given back.
func (r *receiver) copier() *copier {
	if c, ok := r.copiers.Get().(*copier); ok {
		return c
	}
	return &copier{t: r.t, into: make([]iovec, 0, maxVector), from: make([]iovec, 0, maxVector+2), pairs: make([]kv.Pair, 0, maxVector)}
}

// work copies until there is nothing to copy.
func (r *receiver) work(leave func()) {
	c := r.copier()
	defer r.copiers.Put(c)
	defer held(c)()
	for {
		r.mu.Lock()
		b := r.take()
		if b == nil {
			r.workers--
		} else {
			b.on.leave = leave
		}
		r.mu.Unlock()
		if b == nil {
			return
		}
		n, err := c.copy(b)
		if r.wasHung(b, err) {
			return
		}
		if errors.Is(err, core.ErrMayLand) {
			r.stuck(b, err)
			continue
		}
		r.copied(b, n, err)
	}
}

// once copies one batch on the goroutine of a link's reader.
func (r *receiver) once(reader *source) {
	c := r.copier()
	defer r.copiers.Put(c)
	r.mu.Lock()
	b := r.take()
	if b != nil {
		b.on.reader, b.on.leave = reader, reader.left
	}
	r.mu.Unlock()
	if b == nil {
		return
	}
	n, err := c.copy(b)
	if r.wasHung(b, err) {
		return
	}
	r.copied(b, n, err)
	r.mu.Lock()
	r.crew(0)
	r.mu.Unlock()
}

// take gives the next batch, of the transfers in turn; r.mu is held.
func (r *receiver) take() *batch {
	for len(r.ready) > 0 {
		in := r.ready[0]
		r.ready = r.ready[1:]
		in.queued = false
		if len(in.todo) == 0 {
			continue
		}
		access, most := in.source.access.to(in.todo[0].space), r.t.cfg.BatchBytes
		if _, device := access.(*opened); device {
			most *= deviceBatch
		}
		b := in.cut(most)
		b.pid, b.access = in.source.link.pid, access
		_, mapped := access.(*views)
		b.looks = mapped && in.source.access.process && b.proof != 0
		in.flying++
		r.flying++
		in.source.flying++
		if access == nil {
			r.watch(b)
		}
		r.enqueue(in)
		return b
	}
	return nil
}

// enqueue has a transfer's runs copied; r.mu is held.
func (r *receiver) enqueue(in *inbound) {
	if !in.queued && len(in.todo) > 0 {
		in.queued = true
		r.ready = append(r.ready, in)
	}
}

// cut takes the next batch of a transfer.
func (in *inbound) cut(most uint64) *batch {
	p := &in.todo[0]
	b := &batch{in: in, into: &in.into, on: new(stint), position: p.position, space: p.space, off: in.off, validity: in.validity, proof: in.proof}
	for b.bytes < most && b.finished < len(p.runs) && b.finished < maxVector-1 {
		left := p.runs[b.finished].len - in.off
		if n := most - b.bytes; n < left {
			b.bytes += n
			in.off += n
			break
		}
		b.bytes += left
		b.finished++
		in.off = 0
	}
	b.runs = p.runs[:min(b.finished+1, len(p.runs))]
	p.position += b.bytes
	if p.runs = p.runs[b.finished:]; len(p.runs) == 0 {
		in.todo = in.todo[1:]
	}
	return b
}

// crew starts as many workers as there is work for; r.mu is held.
func (r *receiver) crew(bytes uint64) {
	want := int(min(uint64(r.t.cfg.Workers), uint64(len(r.ready))+bytes/r.t.cfg.BatchBytes))
	for r.workers < want {
		r.workers++
		r.t.goLeft("local copy", r.work)
	}
}

// The ends of a copy that are no fault of a region's.
var (
	errInvalidated = errors.New("the prefill agent has invalidated the transfer's validity page")
	errOver        = errors.New("the transfer is over")
	errGone        = errors.New("the prefill agent's process has ended")
	errNoMay       = errors.New("the kernel does not let this process read the prefill agent's any more")
)

// unreadable is memory of P's that the kernel does not read.
type unreadable struct {
	address  uint64
	position uint64 // in the transfer
}

func (e *unreadable) Error() string {
	return fmt.Sprintf("memory at %#x: %v", e.address, syscall.EFAULT)
}

// copy copies a batch, and says how many bytes it did before an error.
func (c *copier) copy(b *batch) (done uint64, err error) {
	if _, device := b.access.(*opened); c.t.places.any() && !device {
		return c.stage(b)
	}
	return c.read(b)
}

// read copies a batch by its own method.
func (c *copier) read(b *batch) (done uint64, err error) {
	if b.access != nil {
		if done, err = b.access.copy(c, b); err == nil && b.looks {
			err = c.look(b)
		}
		return done, err
	}
	into, from := b.into, cursor{b.runs, b.off}
	page, proved := iovec{uintptr(b.validity), 1}, false
	for done < b.bytes {
		c.into = append(c.into[:0], iovec{uintptr(unsafe.Pointer(&c.passed)), 1})
		blocks, want := into.cut(c.into[:1:maxVector-1], b.position+done, b.bytes-done, c.pairs)
		c.into = append(c.into[:len(blocks)], iovec{uintptr(unsafe.Pointer(&c.found)), proofSize})
		c.from = append(from.cut(append(c.from[:0], page), want), iovec{page.base, proofSize})
		if fault.On("local-page-not-first") {
			c.from[0].base = c.from[1].base
		}
		got, errno := c.t.kernel.readv(b.pid, c.into, c.from)
		switch {
		case errno == syscall.ESRCH:
			return done, errGone
		case errno == syscall.EPERM || errno == syscall.EACCES:
			return done, fmt.Errorf("%w: %w", errNoMay, errno)
		case errno == syscall.EFAULT:
			return done, errInvalidated
		case errno != 0:
			return done, fmt.Errorf("process_vm_readv: %w", errno)
		case got <= 1:
			return done, c.whose(b, done, from, c.into[1:len(blocks)])
		}
		proved = got == 1+want+proofSize && c.found == b.proof
		got = min(got-1, want)
		done += got
		from.advance(got)
	}
	if b.proof != 0 && !proved && !fault.On("local-unlooked") {
		return done, errInvalidated
	}
	return done, nil
}

// proofSize is the size of a validity page's word.
const proofSize = 8

// look finds at the validity page whether P had the blocks of a batch that came out of a mapping. If the kernel does not
// let it, D asks P. The watchdog watches it: the memory where P says that the page is may be such that the kernel does not end the call.
func (c *copier) look(b *batch) error {
	r := &c.t.receiver
	if !fault.On("local-unwatched-look") {
		r.mu.Lock()
		b.on.lasts = 0
		r.watch(b)
		r.mu.Unlock()
		defer func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.unwatch(b)
		}()
	}
	n, errno := c.t.kernel.readv(b.pid, []iovec{{uintptr(unsafe.Pointer(&c.found)), proofSize}}, []iovec{{uintptr(b.validity), proofSize}})
	b.proven = errno == 0 && n == proofSize && c.found == b.proof || fault.On("local-unlooked")
	if !b.proven && (errno == 0 || errno == syscall.EFAULT) {
		return errInvalidated
	}
	return nil
}

// whose says on which side the memory is that the kernel could not read or write. It reads one byte
// of P's memory to find that out.
func (c *copier) whose(b *batch, done uint64, from cursor, into []iovec) error {
	at := from.cut(nil, 1)
	if n, errno := c.t.kernel.readv(b.pid, []iovec{{uintptr(unsafe.Pointer(&c.passed)), 1}}, at); n != 1 || errno != 0 {
		return &unreadable{uint64(at[0].base), b.position + done}
	}
	list := make([]hostmem.Span, len(into))
	for i := range into {
		list[i] = hostmem.Span{Base: uint64(into[i].base), Length: uint64(into[i].len)}
	}
	return hostmem.Fault(c.t.layout.Regions, list, true, syscall.EFAULT)
}

// copied notes that a copy has ended.
func (r *receiver) copied(b *batch, n uint64, err error) {
	in, src := b.in, b.in.source
	r.mu.Lock()
	r.unwatch(b)
	in.flying--
	r.flying--
	src.flying--
	in.copied += n
	if w := methodOf(b.access); n > 0 {
		r.came[w] += n
		r.past += b.past
		src.methods[w] = true
	}
	r.bury(in)
	src.owe(b.finished)
	in.asks = in.asks || b.proof == 0 || b.access != nil && !b.proven
	finished := err == nil && in.copied == in.into.total && !in.over && !in.done
	var told chan struct{}
	switch {
	case !finished:
	case in.asks && !fault.On("local-unasked"):
		in.done = true
		src.link.say(word(frameDone, in.grant))
	default:
		told = r.takes(in)
	}
	in.paces()
	if err != nil {
		r.halt(in)
	}
	if in.flying == 0 && in.quiet != nil {
		close(in.quiet)
		in.quiet = nil
	}
	if in.stopped && in.flying == 0 {
		src.link.say((&ending{cause: overStopped}).bytes(in.grant))
	}
	src.calm()
	src.pay()
	link := src.link
	r.mu.Unlock()
	if told != nil {
		r.tell(in, told, in.stats(), nil)
	}
	link.flush()
	if err != nil {
		r.breaks(in, err)
	}
}

// breaks calls broken for callers that must not wait. If other copies of the transfer are under way, broken waits for them, maybe
// for ever: then breaks calls it on a goroutine.
func (r *receiver) breaks(in *inbound, err error) {
	r.mu.Lock()
	waits := r.halt(in) != nil
	r.mu.Unlock()
	if waits {
		r.t.goRun("local broken", func() { r.broken(in, err) })
		return
	}
	r.broken(in, err)
}

// calm tells that no copy from a source is under way; receiver.mu is held.
func (src *source) calm() {
	if src.flying == 0 && src.quiet != nil {
		close(src.quiet)
		src.quiet = nil
	}
}

// broken ends a transfer that cannot be copied, or its link. If P has invalidated the transfer's validity
// page, broken does nothing: D hears the rest from P.
func (r *receiver) broken(in *inbound, err error) {
	src := in.source
	var bad *unreadable
	switch {
	case errors.Is(err, errInvalidated), errors.Is(err, errOver):
		return
	case errors.Is(err, errGone), errors.Is(err, errNoMay):
		src.leave(err)
		return
	case errors.As(err, &bad):
		at, _ := in.into.cut(make([]iovec, 0, 1), bad.position, 1, make([]kv.Pair, 0, 1)) // P's region has the name of the one that it goes to
		err = fmt.Errorf("local: region %q of prefill agent %s cannot be read: %w; its memory is not mapped any more?", regionAt(r.t.layout, uint64(at[0].base)), src.id, err)
		r.fail(in, err)
		src.link.say((&ending{cause: overUnreadable, address: bad.address}).bytes(in.grant))
	default:
		err = fmt.Errorf("local: %w", err)
		r.fail(in, err)
		src.link.say((&ending{cause: overFailed, text: err.Error()}).bytes(in.grant))
	}
	src.link.flush()
}

// stats are those of a transfer that has arrived.
func (in *inbound) stats() core.TransferStats {
	return core.TransferStats{Bytes: in.copied, Segments: in.into.pieces(), Nanos: in.moves.Sum(time.Now()).Nanoseconds()}
}
