package natsbus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/wire"
)

// openJoin makes the server behind another agent's bootstrap port this agent's home,
// and waits for it.
func (b *Bus) openJoin() error {
	at, err := ParseAddress(b.opt.Join)
	if err != nil {
		return err
	}
	at.TLS = at.TLS || b.opt.OnlyTLS
	b.openHome = func() (*link, error) { return b.connectPort(joinLink, "", at, nil) }
	began := time.Now()
	for {
		if b.home, err = b.openHome(); err == nil {
			return nil
		}
		wait := b.opt.JoinTimeout - time.Since(began)
		if wait <= 0 || errors.Is(err, nats.ErrAuthorization) || tlsError(err) {
			return fmt.Errorf("joining the engine's first rank, %v after the first try: %w", time.Since(began).Round(time.Millisecond), err)
		}
		b.log.Sugar().Debugf("natsbus: waiting for the first rank: %v", err)
		_ = pause(b.ctx, min(wait, joinPause))
	}
}

// joinPause is between two tries to reach the server of a first rank.
const joinPause = 200 * time.Millisecond

// join asks the agent whose server this one uses to make, renew or end a registration.
func (b *Bus) join(ctx context.Context, reg *registration, j *wire.Join) error {
	j.Agent = new(wire.Agent)
	if err := wire.Decode(reg.value, j.Agent); err != nil {
		return err
	}
	rep, err := b.Request(ctx, "", hostID, &wire.Request{Kind: wire.KindJoin, From: string(b.opt.AgentID), Join: j})
	switch {
	case err != nil:
		return err
	case rep.Code != 0:
		return fmt.Errorf("the agent at that port does not register %s: %s", reg.name, rep.Reason)
	}
	reg.since = max(reg.since, rep.Since)
	return nil
}
