// Requests that come are answered in bounded numbers, and this agent's own are sent.

package natsbus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/wire"
)

// Serve implements core.Bus.
func (b *Bus) Serve(h core.Handler) {
	if !b.handler.CompareAndSwap(nil, &h) {
		b.log.Error("natsbus: Serve was called a second time; the first handler stays")
		return
	}
	if home := b.homeLink(); home != nil {
		if err := home.subscribe(); err != nil { // the link was closed, and is opened again with the subscription
			b.log.Sugar().Warnf("natsbus: no requests over %s yet: %v", home.name, err)
		}
	}
}

// arrived takes a request from nats.go's goroutine. Handlers return at once, so that
// a burst waits here and in nats.go's bounded queue.
func (b *Bus) arrived(l *link, m *nats.Msg) {
	from, err := senderOf(m.Subject, l.id) // no other agent may send there
	if err != nil || !ownInbox(m.Reply, from) && !fault.On("bus-answers-elsewhere") {
		b.log.Sugar().Debugf("natsbus: no answer over %s to a message at %.200q that wants it at %.200q", l.name, m.Subject, m.Reply)
		return
	}
	v := inboundRequest{link: l, from: from, m: m, long: l.kind == portLink && len(m.Data) > longMessage}
	if l.seals != nil {
		if !b.admit(&v) {
			return
		}
		if v.session == nil && kindOfSealed(m.Data) != 0 {
			b.enqueueSessionless(&v)
			return
		}
	}
	if l.waits(&v) {
		// It is unsealed, and its number taken, before it waits: meanwhile more short requests may overtake it than replays remembers.
		if l.seals == nil || b.unseal(&v) {
			b.enqueueLong(v)
		}
		return
	}
	if why := b.acquireHandlers(v.long); why != "" {
		b.answer(&v, refuse("agent %s %s", l.id, why))
		return
	}
	select {
	case b.handoff <- v: // a handler that has nothing to do
		return
	default:
	}
	if !b.spawn("natsbus.handler", func() { b.serve(v) }) {
		b.releaseHandlers(v.long)
		b.answer(&v, refuse("agent %s is closing", l.id))
	}
}

// serve answers a request, and further ones that come soon, since the stack of a new goroutine would grow anew
// for each request.
func (b *Bus) serve(v inboundRequest) {
	idle := time.NewTimer(handlerIdle)
	defer idle.Stop()
	for {
		func() {
			defer b.releaseHandlers(v.long)
			b.serveOne(&v)
		}()
		idle.Reset(handlerIdle)
		select {
		case v = <-b.handoff:
		case <-idle.C:
			return
		case <-b.ctx.Done():
			return
		}
	}
}

// waits says whether a request waits for other long ones.
func (l *link) waits(v *inboundRequest) bool {
	return l.kind != portLink && len(v.m.Data) > longMessage && !fault.On("bus-long-requests-at-once")
}

// enqueueLong queues a long request, which is unsealed already.
func (b *Bus) enqueueLong(v inboundRequest) {
	q := b.longQueue
	if strings.HasPrefix(v.m.Subject, joinRoot) {
		q = b.longJoinQueue
	}
	dropped, starts := q.put(&v)
	if dropped > 0 && v.link.seals != nil {
		v.link.seals.queueFull.Add(int64(dropped))
	}
	if dropped > 0 {
		b.log.Sugar().Debugf("natsbus: no answer over %s to long requests, of %s or of who asks more: too many wait", v.link.name, v.from)
	}
	if starts && !b.spawn("natsbus.longQueue", func() { b.answerLongRequests(q) }) {
		b.refuseLongRequests(q)
	}
}

// answerLongRequests answers the long requests that wait, one after the other, until none is left.
func (b *Bus) answerLongRequests(q *longQueue) {
	for b.ctx.Err() == nil {
		v, late := q.next()
		if v == nil {
			return
		}
		func() {
			defer safe.Recover("natsbus.longQueue")
			if late {
				b.answer(v, later("agent %s is overloaded: this request has waited for more than %v behind other long ones", v.link.id, q.timeout))
				return
			}
			b.answer(v, b.handle(v.link, v.from, v.m))
		}()
	}
	b.refuseLongRequests(q)
}

// refuseLongRequests tells all who wait that this agent is closing.
func (b *Bus) refuseLongRequests(q *longQueue) {
	for v, _ := q.next(); v != nil; v, _ = q.next() {
		b.answer(v, refuse("agent %s is closing", v.link.id))
	}
}

// serveOne answers one request.
func (b *Bus) serveOne(v *inboundRequest) {
	if v.link.seals != nil && !b.unseal(v) {
		return
	}
	b.answer(v, b.handle(v.link, v.from, v.m))
}

// acquireHandlers waits for the places that a request needs to be answered. While a long request waits for other
// long ones, it takes no place from the short ones.
func (b *Bus) acquireHandlers(long bool) (why string) {
	if long {
		if why := b.acquire(b.longSlots); why != "" {
			return why
		}
	}
	if why = b.acquire(b.requestSlots); why != "" && long {
		<-b.longSlots
	}
	return why
}

func (b *Bus) releaseHandlers(long bool) {
	if long {
		<-b.longSlots
	}
	<-b.requestSlots
}

// acquire waits for a place of one kind. If it gets none, it says why.
func (b *Bus) acquire(s chan struct{}) (why string) {
	select {
	case s <- struct{}{}:
		return ""
	default:
	}
	// It waits by steps, since this process may be stopped for longer than maxArrival: then a ticker counts all missed steps as one.
	step := time.NewTicker(arrivalStep)
	defer step.Stop()
	for range maxArrival / arrivalStep {
		select {
		case s <- struct{}{}:
			return ""
		case <-b.ctx.Done():
			return "is closing"
		case <-step.C:
		}
	}
	return fmt.Sprintf("is overloaded: %d requests are being answered", cap(s))
}

// handle answers a request of an agent.
func (b *Bus) handle(l *link, from core.AgentID, m *nats.Msg) (reply *wire.Reply) {
	req := new(wire.Request)
	if err := wire.Decode(m.Data, req); err != nil {
		return refuse("%v", err)
	}
	req.From, req.Account = string(from), string(b.accountOf(l, from))
	if req.Kind == wire.KindHello && fault.On("bus-from-believed") {
		req.From = req.Hello.ID
	}
	if joins := strings.HasPrefix(m.Subject, joinRoot); joins != (req.Kind == wire.KindJoin) && !fault.On("bus-joins-as-requester") {
		return refuse("a request of kind %d came on a subject for other kinds", req.Kind)
	}
	defer func() {
		if p := recover(); p != nil {
			safe.Report("natsbus.handler", p)
			reply = &wire.Reply{Code: int(core.Failed), Reason: fmt.Sprintf("agent %s: a fault while answering, see its log", l.id)}
		}
	}()
	if reply = (*b.handler.Load())(l.via, req); reply == nil {
		reply = &wire.Reply{Code: int(core.Failed), Reason: fmt.Sprintf("agent %s: the handler gave no reply", l.id)}
	}
	return reply
}

// accountOf is the account of an agent that asks over a link. The agent's places count under this account. In a cluster it is the nkey with
// which the requester's id begins. Agents without an nkey share one account, since it costs nothing to make many of them. If this agent is a rank
// at another's server, all who ask it share one account, since that server does not say where they come from. If the link is to the
// port of another agent's server, all who ask over it count under that server.
func (b *Bus) accountOf(l *link, id core.AgentID) core.Account {
	switch {
	case fault.On("bus-agents-are-accounts"):
		return core.Account(id)
	case l.kind == homeLink:
		return b.opt.Server.authenticator.accountOf(id)
	case l.kind == clusterLink:
		if key, _, keyed := strings.Cut(string(id), keySeparator); keyed {
			return core.Account(key)
		}
	case l.kind == portLink:
		return core.Account(l.via)
	}
	return ""
}

func (b *Bus) answer(v *inboundRequest, r *wire.Reply) {
	l := v.link
	if len(r.Reason) > maxReason {
		short := *r
		short.Reason = strings.ToValidUTF8(r.Reason[:maxReason], "")
		r = &short
	}
	buf := takeBuffer()
	defer buf.release()
	start, added := buf.bytes[:0], 0
	if v.session != nil {
		start, added = sealHeadroom(start), sealTag
	}
	data, err := r.MarshalMsg(start)
	buf.bytes = data
	if err != nil {
		b.log.Sugar().Errorf("natsbus: a reply cannot be encoded: %v", err)
		return
	}
	if _, ok := l.current(); !ok {
		return // the connection is broken, and so the peer knows that no answer comes
	}
	if limit := l.nc.MaxPayload(); int64(len(data)+added) > limit {
		data, _ = refuse("the reply has %d bytes, the server takes %d", len(data)+added, limit).MarshalMsg(start)
	}
	switch {
	case v.session != nil:
		data = v.session.sealAnswer(data, &v.requestTag)
		buf.bytes = data
	case l.seals != nil && kindOfSealed(v.m.Data) != 0: // it has no session here, so it is refused
		data = l.seals.self.notice(v.from, &v.requestTag, noticeRefused, r.Reason)
	}
	b.respond(v, data)
}

// Request implements core.Bus.
func (b *Bus) Request(ctx context.Context, via core.Via, to core.AgentID, req *wire.Request) (*wire.Reply, error) {
	l, err := b.known(via)
	if err != nil {
		return nil, err
	}
	if !legalID(string(to)) {
		return nil, fmt.Errorf("request over %s: agent id %q is not 1 to 64 letters, digits, - and _", l.name, string(to))
	}
	session, ok := l.current()
	if !ok {
		err := unreachable(l.name, l.why())
		if l.kind == portLink && errors.Is(err, syscall.ECONNREFUSED) { // agent and server are one process
			err = fmt.Errorf("%w: %w", core.ErrAbsent, err)
		}
		return nil, fmt.Errorf("request to agent %s: %w", to, err)
	}
	m, err := b.send(ctx, session, l, to, req)
	switch {
	case err == nil && noResponders(m):
		err = core.ErrAbsent
		if l.kind == clusterLink {
			err = fmt.Errorf("%w: %w", core.ErrAbsent, core.ErrAway)
		}
		return nil, fmt.Errorf("%w: agent %s does not listen at %s", err, to, l.name)
	case err == nil:
	case ctx.Err() != nil:
		if !errors.Is(err, ctx.Err()) {
			err = ctx.Err()
		}
		return nil, fmt.Errorf("request to agent %s over %s: no reply: %w", to, l.name, err)
	case session.Err() != nil, broken(err):
		return nil, fmt.Errorf("request to agent %s: %w", to, unreachable(l.name, either(l.why(), err)))
	default:
		return nil, fmt.Errorf("request to agent %s over %s: %w", to, l.name, err)
	}
	reply := new(wire.Reply)
	if err := wire.Decode(m.Data, reply); err != nil {
		return nil, fmt.Errorf("reply of agent %s over %s: %w", to, l.name, err)
	}
	return reply, nil
}

// send encodes a request and asks it.
func (b *Bus) send(ctx, session context.Context, l *link, to core.AgentID, req *wire.Request) (*nats.Msg, error) {
	buf := takeBuffer()
	defer buf.release()
	if l.seals != nil {
		return b.askSealed(ctx, session, l, to, req, buf)
	}
	data, err := l.encode(req, buf, buf.bytes, 0)
	if err != nil {
		return nil, err
	}
	return l.ask(ctx, session, subject(to, l.id), data, nil)
}
