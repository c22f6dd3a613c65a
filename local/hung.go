// The kernel may not end a copy out of P's process. Before it can read a page of P's, another program may have to bring the page (a
// file system in user space, a network's, userfaultfd), and that program may be stopped. The bytes of such a copy may land at any time.
// So nobody hears of an end of the transfer until the kernel ends the copy. But everything else goes on: other transfers, the end of
// the link, and Close. The same holds for a look at the validity page that P has named (look in copy.go).

package local

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/safe"
)

var errHung = errors.New("the kernel has not ended a copy out of its memory: what brings that memory, a file system perhaps, does not answer")

// stint is the time in which a goroutine copies a batch. Its fields are guarded by receiver.mu.
type stint struct {
	lasts  time.Duration
	hung   bool    // the copy was given up
	reader *source // the source whose reader copies; nil: a worker copies
	leave  func()  // from this call on Close does not wait for the goroutine
}

// watch notes a copy out of P's process that begins; r.mu is held.
func (r *receiver) watch(b *batch) {
	r.copies[b] = struct{}{}
	if r.watchdog == nil {
		r.armed = time.Now()
		r.watchdog = r.t.after(step, "local watchdog", r.look)
	}
}

// unwatch notes that a copy has ended; r.mu is held.
func (r *receiver) unwatch(b *batch) {
	delete(r.copies, b)
	r.rest()
}

// rest stops the looks if the receiver is closed and no copy is left, so that Close need not wait for the next look; r.mu is held.
func (r *receiver) rest() {
	if r.closed && len(r.copies) == 0 {
		r.watchdog.stop()
		r.watchdog = nil
	}
}

// look gives up the copies that last too long. A look that comes late does not count, since this process was stopped.
func (r *receiver) look() {
	r.mu.Lock()
	var hung []*batch
	limit, onTime := r.t.cfg.StallTimeout, time.Since(r.armed) < 2*step
	if r.closed {
		limit = r.t.cfg.CloseGrace
	}
	if r.t.places.any() {
		limit *= 4 // devices may take a part of the time; how long they take is bounded elsewhere
	}
	r.watchdog = nil
	for b := range r.copies {
		if onTime {
			b.on.lasts += step
		}
		if b.on.lasts >= limit {
			hung = append(hung, b)
		}
	}
	for _, b := range hung {
		r.giveUp(b)
	}
	if len(r.copies) > 0 || fault.On("local-restless-decode") {
		r.armed = time.Now()
		r.watchdog = r.t.after(step, "local watchdog", r.look)
	}
	r.mu.Unlock()
	for _, b := range hung {
		src := b.in.source
		src.link.say((&ending{cause: overFailed, text: errHung.Error()}).bytes(b.in.grant))
		src.link.flush()
		r.t.cfg.Logger.Error("the blocks of a transfer may be written until the kernel ends a copy", zap.String("transfer_id", string(b.in.id)), zap.Error(errHung))
		src.leave(errHung)
		if b.on.reader != nil { // which copies, and hears nothing
			b.on.reader.leave(errHung)
			r.t.goRun("local hung", func() { r.linkEnded(b.on.reader, b.on.reader.lost(errHung)) })
		}
		b.on.leave()
	}
}

// giveUp takes a copy for one that does not end; r.mu is held.
func (r *receiver) giveUp(b *batch) {
	delete(r.copies, b)
	b.on.hung = true
	in, src := b.in, b.in.source
	in.hung++
	r.hung[src.id]++
	src.flying--
	src.owe(b.finished)
	for _, other := range r.byID {
		if other.source == src { // lost with the link, and no worker is to try
			r.halt(other)
		}
	}
	r.halt(in)
	src.calm()
	if b.on.reader == nil {
		r.workers--
		r.crew(0)
	}
}

// wasHung notes the end of a copy, and says whether the copy was given up before. If it was, the goroutine that has copied has
// nothing more to do.
func (r *receiver) wasHung(b *batch, err error) bool {
	r.mu.Lock()
	if !b.on.hung {
		r.mu.Unlock()
		return false
	}
	in := b.in
	if in.hung--; errors.Is(err, core.ErrMayLand) {
		in.stuck = true
	} else {
		in.flying--
		r.flying--
	}
	less(r.hung, in.source.id)
	r.bury(in)
	var told chan struct{}
	if in.flying == 0 {
		if in.quiet != nil {
			close(in.quiet)
			in.quiet = nil
		}
		if told = in.untold; told == nil {
			told = r.ends(in)
		}
		in.untold = nil
	}
	closed := r.closed
	if told != nil && !closed {
		r.t.wg.Add(1) // Close waits for the outcome that is told below
		defer r.t.wg.Done()
	}
	r.mu.Unlock()
	switch {
	case told != nil && closed:
		close(told)
	case told != nil:
		r.tell(in, told, core.TransferStats{}, in.source.lost(errHung))
	}
	return true
}

// less takes 1 from a peer's count.
func less(of map[core.AgentID]int, peer core.AgentID) {
	if of[peer]--; of[peer] == 0 {
		delete(of, peer)
	}
}

// hangs says whether the kernel still does something in P's memory that it does not end. While it does, the two do not meet again;
// r.mu is held.
func (r *receiver) hangs(peer core.AgentID) bool { return r.hung[peer]+r.unread[peer] > 0 }

// after is what Close has to say of copies that hang. A value that is still being read is no copy: Close may meet one that has just
// begun, and it goes where nobody looks.
func (r *receiver) after() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for peer := range r.hung {
		return fmt.Errorf("local: closed, but %w: prefill agent %s: %w", core.ErrMayLand, peer, errHung)
	}
	if r.flying > 0 { // no goroutine is left that could end one
		return fmt.Errorf("local: closed, but %w", core.MayLandIn(r.mayLand))
	}
	return nil
}

// readRandom reads what P has put there, on a goroutine of its own.
func (src *source) readRandom(ctx context.Context, pid int, address uint64) (read random, errno syscall.Errno) {
	r, ended := src.r, make(chan struct{})
	got := new(struct {
		read  random
		errno syscall.Errno
	})
	safe.Go("local random", func() {
		defer close(ended)
		got.read, got.errno = readRandom(r.t.kernel, pid, address)
	})
	select {
	case <-ended:
		return got.read, got.errno
	case <-ctx.Done():
	}
	r.mu.Lock()
	r.unread[src.id]++
	r.mu.Unlock()
	safe.Go("local random", func() {
		<-ended
		r.mu.Lock()
		defer r.mu.Unlock()
		less(r.unread, src.id)
	})
	return read, syscall.ETIMEDOUT
}

// lost adds to an error of a link which agent the link is to.
func (src *source) lost(err error) error {
	return fmt.Errorf("local: prefill agent %s: %w: %w", src.id, core.ErrConnectionLost, err)
}
