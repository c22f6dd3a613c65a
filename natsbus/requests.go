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
	if m.Reply == "" {
		return // not a request
	}
	select {
	case b.slots <- struct{}{}:
	default:
		full := time.NewTimer(maxArrival)
		defer full.Stop()
		select {
		case b.slots <- struct{}{}:
		case <-b.ctx.Done():
			b.answer(l, m, refuse("agent %s is closing", l.id))
			return
		case <-full.C:
			b.answer(l, m, refuse("overloaded: %d requests are being answered", maxHandlers))
			return
		}
	}
	if !b.spawn("natsbus.handler", func() {
		defer func() { <-b.slots }()
		b.answer(l, m, b.handle(l, m))
	}) {
		<-b.slots
		b.answer(l, m, refuse("agent %s is closing", l.id))
	}
}

func refuse(format string, args ...any) *wire.Reply {
	return &wire.Reply{Code: int(core.Refused), Reason: fmt.Sprintf(format, args...)}
}

// handle answers a request. The subject names its sender: no other agent may send there.
func (b *Bus) handle(l *link, m *nats.Msg) (reply *wire.Reply) {
	req := new(wire.Request)
	if err := wire.Decode(m.Data, req); err != nil {
		return refuse("%v", err)
	}
	req.From = string(senderOf(m.Subject))
	if joins := strings.HasPrefix(m.Subject, joinRoot); joins != (req.Kind == wire.KindJoin) {
		return refuse("a request of kind %d does not belong here", req.Kind)
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

func (b *Bus) answer(l *link, m *nats.Msg, r *wire.Reply) {
	if len(r.Reason) > maxReason {
		short := *r
		short.Reason = strings.ToValidUTF8(r.Reason[:maxReason], "")
		r = &short
	}
	data, err := r.MarshalMsg(nil)
	if err != nil {
		b.log.Sugar().Errorf("natsbus: a reply cannot be encoded: %v", err)
		return
	}
	if _, ok := l.current(); !ok {
		return // the broken connection has told the peer
	}
	if limit := l.nc.MaxPayload(); int64(len(data)) > limit {
		data, _ = refuse("the reply has %d bytes, the server takes %d", len(data), limit).MarshalMsg(nil)
	}
	if err := m.Respond(data); err != nil {
		b.log.Sugar().Debugf("natsbus: a reply over %s is lost: %v", l.name, err)
	}
}

// Request implements core.Bus.
func (b *Bus) Request(ctx context.Context, via core.Via, to core.AgentID, req *wire.Request) (*wire.Reply, error) {
	l, err := b.known(via)
	if err != nil {
		return nil, err
	}
	if !legalID.MatchString(string(to)) {
		return nil, fmt.Errorf("request over %s: agent id %q is not 1 to 64 letters, digits, - and _", l.name, string(to))
	}
	data, err := req.MarshalMsg(nil)
	if err != nil {
		return nil, fmt.Errorf("request to agent %s over %s: %w", to, l.name, err)
	}
	session, ok := l.current()
	if !ok {
		err := unreachable(l.name, l.why())
		if l.kind == portLink && errors.Is(err, syscall.ECONNREFUSED) { // agent and server are one process
			err = fmt.Errorf("%w: %w", core.ErrAbsent, err)
		}
		return nil, fmt.Errorf("request to agent %s: %w", to, err)
	}
	if limit := min(l.nc.MaxPayload(), wire.MaxMessage); int64(len(data)) > limit {
		return nil, fmt.Errorf("request to agent %s over %s: %w: %d bytes, at most %d are carried (max_payload of the NATS servers)",
			to, l.name, core.ErrTooLarge, len(data), limit)
	}
	both, cancel := during(ctx, session)
	defer cancel()
	m, err := l.nc.RequestWithContext(both, subject(to, l.id), data)
	switch {
	case err == nil:
	case errors.Is(err, nats.ErrNoResponders):
		err = core.ErrAbsent
		if l.kind == clusterLink {
			err = fmt.Errorf("%w: %w", core.ErrAbsent, core.ErrAway)
		}
		return nil, fmt.Errorf("%w: nobody listens as agent %s at %s", err, to, l.name)
	case ctx.Err() != nil:
		return nil, fmt.Errorf("request to agent %s over %s: no reply: %w", to, l.name, ctx.Err())
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
