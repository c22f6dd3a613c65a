// D connects to a P agent and meets it. When their link has ended, a transfer has D connect anew.

package local

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// source is one connection to a P agent, or the attempt to make one. When it has ended, the next
// connection is another source.
type source struct {
	r        *receiver
	id       core.AgentID
	endpoint string
	place    place
	ticket   random
	ctx      context.Context
	cancel   context.CancelCauseFunc
	settled  chan struct{} // closed when the state is another than sourceMeeting
	settle   func()

	// Guarded by receiver.mu.
	tries   int // the attempts before this one that made no connection
	state   sourceState
	err     error // why it is down
	ended   time.Time
	anew    bool          // P has asked D to meet it anew
	again   int           // how often D has met P anew without redialAfter between; if not 0, transfers that begin meanwhile wait for that
	begun   time.Time     // when it was dialled
	left    func()        // from this call on Close does not wait for its reader
	link    *link         // nil: there was none
	owed    int           // runs that D has copied, and has not given P credit for yet
	unpaid  int           // runs that P has said beyond the credit that D gave
	flying  int           // copies under way, without those that hang
	quiet   chan struct{} // closed when no copy is under way
	methods methodSet     // see How

	access peerAccess // made by the meeting
}

type sourceState uint8

const (
	sourceMeeting sourceState = iota
	sourceUp
	sourceDown
)

// mostAgain is how often D meets an agent anew that asks for it, without redialAfter between. Without this bound the agent could ask for
// ever. An engine sleeps and wakes less often than that.
const mostAgain = 8

// redialAfter is the least time from the end of a link to the next attempt. A transfer causes the attempt,
// and itself goes another way. Each attempt that fails doubles this time, at most mostDoubled times.
const (
	redialAfter = time.Second
	mostDoubled = 6
)

// Connect implements core.Transport.
func (t *Transport) Connect(peer core.AgentID, endpoint string, ticket []byte) error {
	where, err := parsePlace(endpoint)
	if err == nil && !fault.On("local-any-place") {
		err = where.reachable(t.here)
	}
	if err != nil {
		return fmt.Errorf("local: prefill agent %s: %w", peer, err)
	}
	if len(ticket) != len(random{}) {
		return fmt.Errorf("local: prefill agent %s gave a ticket of %d bytes, want %d: run the same kvconn on both", peer, len(ticket), len(random{}))
	}
	r := &t.receiver
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return errClosed
	}
	if r.hangs(peer) {
		return fmt.Errorf("local: prefill agent %s: %w", peer, errHung)
	}
	old := r.sources[peer]
	if old != nil && old.state != sourceDown && old.endpoint == endpoint && old.ticket == random(ticket) {
		return nil
	}
	r.dial(&source{id: peer, endpoint: endpoint, place: where, ticket: random(ticket)})
	if old != nil {
		t.goRun("local leave", func() { old.leave(errRenewed) })
	}
	return nil
}

var errRenewed = errors.New("the prefill agent has been met anew")

// dial makes a source the current one of its agent, and starts it; r.mu is held.
func (r *receiver) dial(src *source) {
	src.r, src.begun = r, time.Now()
	src.ctx, src.cancel = context.WithCancelCause(r.t.ctx)
	src.settled = make(chan struct{})
	src.settle = sync.OnceFunc(func() { close(src.settled) })
	r.sources[src.id] = src
	r.t.goLeft("local receive", src.run)
}

// again tries anew to reach an agent whose link has ended; r.mu is held.
func (r *receiver) again(src *source) {
	tries := 0
	if src.link == nil {
		tries = min(src.tries+1, mostDoubled)
	}
	if !r.closed && r.sources[src.id] == src && !r.hangs(src.id) && time.Since(src.ended) >= r.redial<<tries {
		r.dial(&source{id: src.id, endpoint: src.endpoint, place: src.place, ticket: src.ticket, tries: tries})
	}
}

// leave ends a source from this side.
func (src *source) leave(err error) {
	src.cancel(err)
	src.r.mu.Lock()
	link := src.link
	src.r.mu.Unlock()
	if link != nil && link.fail(err) {
		_ = link.conn.CloseRead()
	}
}

// run is the life of a source.
func (src *source) run(leave func()) {
	defer src.cancel(nil)
	r := src.r
	src.left = leave
	l, err := src.connect()
	if err != nil && core.WhyOf(err) == core.OtherWhy {
		err = core.Setup.Mark(err)
	}
	if err == nil {
		l.broke = func(err error) { src.leave(clearer(err)) }
		r.mu.Lock()
		if src.link = l; src.ctx.Err() != nil {
			err = context.Cause(src.ctx)
		} else {
			src.state, src.methods = sourceUp, src.access.begin()
		}
		r.mu.Unlock()
	}
	if err == nil {
		src.settle()
		err = clearer(l.serve(func(h header, body []byte) error { return r.hear(src, h, body) }))
		err = l.ends(err)
	}
	r.linkEnded(src, src.lost(err))
}

// connect opens a socket, on which both sides have proved themselves.
func (src *source) connect() (*link, error) {
	t := src.r.t
	ctx, cancel := context.WithTimeout(src.ctx, t.cfg.ConnectTimeout)
	defer cancel()
	var conn net.Conn
	for {
		var d net.Dialer
		var err error
		if conn, err = d.DialContext(ctx, "unix", "@"+src.place.name); err == nil {
			break
		}
		if !errors.Is(err, syscall.EAGAIN) { // as many others wait to be accepted as the kernel lets
			if errors.Is(err, syscall.ECONNREFUSED) {
				err = core.Lost.Mark(fmt.Errorf("nobody listens at its socket: it has ended, or runs on another host with the same boot id (a restored snapshot?): %w", err))
			}
			return nil, err
		}
		if !t.pause(10 * time.Millisecond) {
			return nil, errClosed
		}
	}
	c := conn.(*net.UnixConn)
	done := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	l, err := t.newLink(c)
	if err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("its socket is refused: %w", err)
	}
	if !fault.On("local-unwatched-prefill") {
		l.watch(src.leave)
	}
	if err = src.meet(ctx, l); err == nil && !done() {
		err = context.Cause(ctx)
	}
	if dead := l.lives(); dead != nil {
		err = errors.Join(dead, err)
	}
	if err != nil {
		switch cause := context.Cause(ctx); {
		case errors.Is(err, errDead):
		case errors.Is(cause, errDead):
			err = cause
		case cause != nil:
			err = fmt.Errorf("it has not answered in time: %w", cause)
		}
		l.close()
		src.access.close()
		return nil, err
	}
	return l, nil
}

// meet has both sides prove themselves, as hello.go tells.
func (src *source) meet(ctx context.Context, l *link) error {
	k, ticket := src.r.t.kernel, src.ticket
	h := hello{name: ticket.name(), salt: newRandom()}
	_, _ = l.conn.Write(h.bytes()) // if this fails, a refusal may still be read
	b, err := read(l.conn, challengeSize)
	if err != nil {
		return fmt.Errorf("process %d has not answered the hello: %w", l.pid, clearer(err))
	}
	w, err := parseChallenge(b)
	switch {
	case err != nil:
		return err
	case w.refused == refusedUser:
		return core.NotPermitted.Mark(w.refused)
	case w.refused != 0:
		return w.refused
	case !fault.On("local-unproved-prefill") && !w.proof.equals(w.proofOf(ticket, h)):
		return fmt.Errorf("process %d listens at its socket, and does not prove that it has the ticket: it is another program", l.pid)
	}
	tries, barredBy := 2, error(nil)
	for ; tries > 0; tries-- {
		c := response{kind: responseRead}
		if c.read, c.errno = src.readRandom(ctx, l.pid, w.address); l.pid == 0 {
			c.errno = syscall.ESRCH
		}
		if c.errno != 0 {
			if barredBy = src.r.t.blind; barredBy == nil {
				barredBy = refusedRead(k, l.pid, c.errno, src.place, src.r.t.here)
			}
			c.kind, c.read = responseGiveUp, random{}
			if c.errno == syscall.EPERM && tries == 2 && k.yama() == "1" {
				c.kind = responseBarred
			}
		}
		c.prove(ticket, h, &w)
		if _, err := l.conn.Write(c.bytes()); err != nil {
			return errors.Join(barredBy, clearer(err))
		}
		if b, err = read(l.conn, verdictSize); err != nil {
			return errors.Join(barredBy, clearer(err))
		}
		switch v, value := parseVerdict(b); {
		case v == verdictReady:
			src.access.process, src.access.of = c.kind == responseRead, prefill{src.id, l.pid, src.place.pids}
			if err := src.access.open(src.r.t, l.conn); err != nil {
				return errors.Join(err, barredBy)
			}
			return nil
		case v == verdictAgain && c.kind == responseBarred:
		case c.kind == responseRead:
			return fmt.Errorf("process %d does not take the value that was read out of it: another process listens at its socket", l.pid)
		case c.kind == responseGiveUp:
			return barredBy
		default:
			return barred(v, value, l.pid, barredBy)
		}
	}
	return barredBy
}
