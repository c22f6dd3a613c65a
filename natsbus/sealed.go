// A bus of a cluster opens what comes sealed, refuses what does not, and opens sessions for what it asks itself.

package natsbus

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/wire"
)

// admit looks at what came over a link to a cluster before it takes a place. It is false of what
// gets nothing more.
func (b *Bus) admit(v *inboundRequest) bool {
	seals, m := v.link.seals, v.m
	drop := func(n *atomic.Int64, why string) bool {
		n.Add(1)
		b.log.Sugar().Debugf("natsbus: no answer over %s to a message of %s: %s", v.link.name, v.from, why)
		return false
	}
	switch kindOfSealed(m.Data) {
	case sealOpen:
		if seals.responder.repeated(m.Data) {
			return drop(&seals.repeated, "its session is open already")
		}
	case sealRequest:
		v.requestTag = requestTagOf(m.Data)
		s, number := seals.responder.find(sessionOf(m.Data), numberOf(m.Data), time.Now())
		switch {
		case s != nil && s.peer != v.from && !fault.On("seal-ids-free"):
			return drop(&seals.foreign, "its session is another's")
		case number == arrivalSeen:
			return drop(&seals.repeated, "it has come before")
		case number == arrivalOld: // nobody may be told so: its requester may await the answer, and would ask again
			return drop(&seals.repeated, "it may have come before")
		case number == arrivalNew:
			v.session = s
		}
	default:
		if len(m.Data) > 0 && m.Data[0] == sealMagic {
			if version, other := otherVersion(m.Data); other {
				b.warnVersion(v, version)
				return drop(&seals.version, "it is sealed by another version")
			}
			return drop(&seals.invalid, "it is no request")
		}
		if fault.On("seal-none") {
			return true
		}
		refusal, err := refuse("agent %s takes sealed messages only, and this one is plain: agents of one NATS cluster need the same release of kvconn", v.link.id).MarshalMsg(nil)
		if err == nil {
			b.respond(v, refusal)
		}
		b.warnPlain(v)
		return drop(&seals.plain, "it is not sealed")
	}
	return true
}

// unseal opens a request in its place. It is false if that was all to do.
func (b *Bus) unseal(v *inboundRequest) bool {
	seals, m := v.link.seals, v.m
	drop := func(n *atomic.Int64, why error) bool {
		n.Add(1)
		b.log.Sugar().Debugf("natsbus: no answer over %s to a message of %s: %v", v.link.name, v.from, why)
		return false
	}
	switch {
	case kindOfSealed(m.Data) == sealOpen:
		if seals.responder.repeated(m.Data) { // it has waited more than once
			return drop(&seals.repeated, errors.New("its session is open already"))
		}
		s, answer, err := seals.self.accept(v.from, m.Data, seals.responder.number())
		if err != nil {
			return drop(&seals.forged, err)
		}
		if !seals.responder.add(newResponderSession(seals.self, s, m.Data)) {
			return drop(&seals.repeated, errors.New("its session is open already"))
		}
		seals.accepted.Add(1)
		seals.startSweeper()
		b.respond(v, answer)
		return false
	case kindOfSealed(m.Data) == 0: // only where a defect is tried
		return true
	case v.session == nil:
		seals.unknown.Add(1)
		b.respond(v, seals.self.notice(v.from, &v.requestTag, noticeAgain, ""))
		return false
	}
	number := numberOf(m.Data)
	plain, err := v.session.requests.unseal(m.Data, nil)
	if err != nil {
		return drop(&seals.forged, err)
	}
	switch seals.responder.use(v.session, number) {
	case arrivalSeen:
		return drop(&seals.repeated, errors.New("it has come before"))
	case arrivalOld:
		return drop(&seals.repeated, errors.New("it may have come before"))
	}
	m.Data = plain
	return true
}

// warnPlain logs which agent, by its own word, does not seal its messages, and what to do.
func (b *Bus) warnPlain(v *inboundRequest) {
	v.link.seals.lines.plain.Do(func(note string) {
		b.log.Sugar().Warnf("natsbus: a message in the name of agent %s came over %s without a seal, and was refused: give all engines of one NATS cluster the same release of kvconn%s", v.from, v.link.name, note)
	})
}

// warnVersion logs which agent, by its own word, seals with another version. The agent gets no answer: no release knows how another
// release reads an answer.
func (b *Bus) warnVersion(v *inboundRequest, version byte) {
	v.link.seals.lines.version.Do(func(note string) {
		b.log.Sugar().Warnf("natsbus: a message in the name of agent %s came over %s with a seal of version %d, and this agent knows version %d only: give all engines of one NATS cluster the same release of kvconn%s", v.from, v.link.name, version, sealVersion, note)
	})
}

// Refused counts the messages over a NATS cluster that this agent has refused, by the reason. It is nil without a cluster.
func (b *Bus) Refused() map[string]uint64 {
	if b.seals == nil {
		return nil
	}
	return b.seals.counts()
}

// enqueueSessionless queues a message that has no session. If too many wait, the message gets no answer: to refuse it would cost a
// signature too. The requester of an open sends another one after openAgain; the requester of a request waits until its context ends.
func (b *Bus) enqueueSessionless(v *inboundRequest) {
	if unanswered := b.sessionless.put(v); unanswered != nil {
		unanswered.link.seals.queueFull.Add(1)
	}
	b.answerSessionless()
}

// answerSessionless answers the messages that wait, on a goroutine that ends when none is left.
func (b *Bus) answerSessionless() {
	s := b.sessionless
	select {
	case s.responders <- struct{}{}:
	default: // it runs
		return
	}
	if !b.spawn("natsbus.sessionless", func() {
		defer func() {
			<-s.responders
			if s.len() > 0 { // a message came after the goroutine's last look, or the message before it made the goroutine panic
				b.answerSessionless()
			}
		}()
		for b.ctx.Err() == nil {
			v := s.take()
			if v == nil {
				return
			}
			b.unseal(v)
		}
	}) {
		<-s.responders // the bus closes: nobody is at the requester's next one
	}
}

// respond sends the answer to a request.
func (b *Bus) respond(v *inboundRequest, data []byte) {
	if err := v.m.Respond(data); err != nil {
		b.log.Sugar().Debugf("natsbus: a reply over %s is lost: %v", v.link.name, err)
	}
}

// unopened is a message that came in place of the answer to an open: a refusal, or the notice that nobody listens.
type unopened struct{ m *nats.Msg }

func (*unopened) Error() string { return "no session was opened" }

// sessionWith returns the session by which to ask an agent. If there is none, or only the one that is stale, it opens one.
func (b *Bus) sessionWith(ctx, connected context.Context, l *link, to core.AgentID, stale *sealSession) (*sealSession, error) {
	for {
		s, a, first := l.seals.requester.get(to, stale, time.Now())
		if first && !b.spawn("natsbus.seal", func() { b.openSession(connected, l, to, a) }) {
			l.seals.requester.ended(to, a, nil, errClosed)
		}
		if s != nil {
			return s, nil
		}
		select {
		case <-a.done:
		case <-ctx.Done():
			select {
			case <-a.done: // just now
				return a.session, a.err
			default:
			}
			if m := a.noResponders.Load(); m != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) { // as await does
				return nil, &unopened{m}
			}
			return nil, a.failed(ctx.Err())
		}
		if !errors.Is(a.err, context.DeadlineExceeded) || ctx.Err() != nil {
			return a.session, a.err
		}
	}
}

var errFault = errors.New("a fault while opening a session, see the log")

// openAgain is how long a requester waits before it sends another open, since the first one, or its answer, may be lost.
const openAgain = time.Second

// openSession makes an attempt to open a session. It sends one open after the other, and takes the answer to any of them.
func (b *Bus) openSession(connected context.Context, l *link, to core.AgentID, a *attempt) {
	s, err := (*sealSession)(nil), errFault
	defer func() { // also after a panic
		l.seals.requester.ended(to, a, s, err)
		l.seals.startSweeper()
	}()
	ctx, cancel := context.WithTimeout(b.ctx, b.opt.ConnectTimeout)
	defer cancel()
	type outcome struct {
		session *sealSession
		err     error
	}
	came := make(chan outcome, 1)
	send := func() {
		o := outcome{err: errFault}
		defer func() {
			select {
			case came <- o:
			case <-ctx.Done():
			}
		}()
		o.session, o.err = b.openOnce(ctx, connected, l, to, a)
	}
	again := time.NewTicker(openAgain)
	defer again.Stop()
	for {
		if !b.spawn("natsbus.open", send) {
			err = errClosed
			return
		}
		select {
		case o := <-came:
			s, err = o.session, o.err
			return
		case <-ctx.Done():
			err = a.failed(ctx.Err())
			return
		case <-again.C:
		}
	}
}

// openOnce sends an open and waits for its answer.
func (b *Bus) openOnce(ctx, connected context.Context, l *link, to core.AgentID, of *attempt) (*sealSession, error) {
	o, err := l.seals.self.open(to)
	if err != nil {
		return nil, err
	}
	a := l.seals.pending(to, requestTagOf(o.message))
	a.opening, a.attempt = o, of
	m, err := l.ask(ctx, connected, subject(to, l.id), o.message, a)
	switch {
	case err != nil:
		return nil, a.failed(err)
	case noResponders(m): // here a.opened is not read: a.right may be looking at another message. Below it has accepted this one
		return nil, &unopened{m}
	case a.opened == nil:
		return nil, &unopened{m}
	}
	return a.opened, nil
}

// unknownSessionError says that the agent has forgotten a session. The connection to the agent is in order, and asking again may help.
// So a caller treats the agent like one that cannot be reached for a while.
type unknownSessionError string

func (e unknownSessionError) Error() string { return string(e) }

// Is makes it core.ErrUnreachable.
func (e unknownSessionError) Is(target error) bool { return target == core.ErrUnreachable }

// errUnknownSession says that the agent forgets sessions as soon as they are open, since it has too many.
const errUnknownSession = unknownSessionError("it does not know the session that it has opened a moment ago")

// errUncertain says that the agent has forgotten the session either before or after the request came: the requester cannot know which.
// The agent may have handled the request, and somebody who has overheard the request may have sent it again.
const errUncertain = unknownSessionError("it does not know the session of the request any more, and may have handled the request before")

// repeatable says whether a request may be handled twice. Requests of these kinds may, since their requester itself asks again if no
// answer comes. A signal may not, since only its transport knows what it means.
func repeatable(kind wire.Kind) bool {
	switch kind {
	case wire.KindHello, wire.KindLoad, wire.KindRenew, wire.KindFinish, wire.KindJoin:
		return true
	}
	return false
}

// askSealed is ask over a link to a cluster.
func (b *Bus) askSealed(ctx, connected context.Context, l *link, to core.AgentID, req *wire.Request, buf *buffer) (*nats.Msg, error) {
	var stale *sealSession
	for range 2 {
		s, err := b.sessionWith(ctx, connected, l, to, stale)
		if err != nil {
			var u *unopened
			if errors.As(err, &u) {
				return u.m, nil
			}
			return nil, err
		}
		data, err := l.encode(req, buf, sealHeadroom(buf.bytes[:0]), sealTag)
		if err != nil {
			return nil, err
		}
		data = s.sealRequest(data)
		buf.bytes = data
		a := l.seals.pending(to, requestTagOf(data))
		a.session = s
		m, err := l.ask(ctx, connected, subject(to, l.id), data, a)
		if err != nil {
			return nil, a.failed(err)
		}
		switch {
		case noResponders(m): // as in openOnce
			return m, nil
		case !a.forgotten:
			return m, nil
		case !repeatable(req.Kind) && !fault.On("seal-repeats-all"):
			l.seals.requester.forget(to, s)
			return nil, errUncertain
		}
		stale = s
	}
	return nil, errUnknownSession
}
