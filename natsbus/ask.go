// A request goes out over a link, and its answer is awaited. In a cluster the word that nobody listens is believed only
// late.

package natsbus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// encode appends a request to start. It returns an error if the request would be too long for the servers, with the added bytes that
// the caller still puts around it.
func (l *link) encode(req *wire.Request, buf *buffer, start []byte, added int) ([]byte, error) {
	data, err := req.MarshalMsg(start)
	if buf.bytes = data; err != nil {
		return nil, err
	}
	if n, limit := int64(len(data)-len(start)), l.nc.MaxPayload(); n > wire.MaxMessage || int64(len(data)+added) > limit {
		return nil, fmt.Errorf("%w: %d bytes, at most %d are carried (max_payload of the NATS servers)", core.ErrTooLarge, n, min(limit-int64(len(start)+added), wire.MaxMessage))
	}
	return data, nil
}

// ask sends a request and waits for its answer, until ctx ends or the session breaks. If a is not nil, it says which message is the
// answer.
func (l *link) ask(ctx, session context.Context, subj string, data []byte, a *pendingAnswer) (*nats.Msg, error) {
	if err := either(ctx.Err(), session.Err()); err != nil {
		return nil, err
	}
	var right func(*nats.Msg) bool
	var absent <-chan *nats.Msg
	if a != nil {
		right, absent = a.right, a.absent
	}
	reply, answer := l.answers.expect(right)
	defer l.answers.forget(reply, answer)
	if err := l.nc.PublishRequest(subj, reply, data); err != nil {
		return nil, err
	}
	return await(ctx, session, answer, absent)
}

// absentGrace is how long a requester in a cluster still waits after the word that nobody listens. It waits by steps, since this
// process may be stopped for longer while the answer is on its way: then a ticker counts all missed steps as one.
const (
	absentGrace = absentSteps * absentStep
	absentSteps = 5
	absentStep  = 10 * time.Millisecond
)

// await waits for the answer. In a cluster the word that nobody listens comes by absent. Anybody who hears the request can
// say this word, so it counts only if the agent itself does not answer within absentGrace, or by the end of ctx.
func await(ctx, session context.Context, answer, absent <-chan *nats.Msg) (*nats.Msg, error) {
	var absence *nats.Msg
	var step <-chan time.Time
	last := func(m *nats.Msg, err error) (*nats.Msg, error) { // if the answer has come meanwhile, it counts
		select {
		case m := <-answer:
			return m, nil
		default:
			return m, err
		}
	}
	for steps := 0; ; {
		select {
		case m := <-answer:
			return m, nil
		case absence = <-absent:
			grace := time.NewTicker(absentStep)
			defer grace.Stop()
			step, absent = grace.C, nil // the first word counts
		case <-step:
			if steps++; steps >= absentSteps {
				return last(absence, nil)
			}
		case <-ctx.Done():
			if absence != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return last(absence, nil)
			}
			return last(nil, ctx.Err())
		case <-session.Done():
			return nil, session.Err()
		}
	}
}
