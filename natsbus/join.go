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

// hostID is the id under which a rank that joins asks the server's agent for its
// registration: the rank knows that agent's address only.
const hostID core.AgentID = "bootstrap"

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

// TTL is how long a registration outlives its last renewal.
func (b *Bus) TTL() time.Duration { return b.opt.TTL }

// Host makes or renews another agent's registration at this process's own server.
// since orders the agents of one rank, and the result replaces it. fresh says that the
// agent is new and takes the rank over.
func (b *Bus) Host(ctx context.Context, a *wire.Agent, fresh bool, since int64) (int64, error) {
	l, reg, err := b.guest(a, since)
	if err == nil {
		err = b.put(ctx, l, reg, fresh)
	}
	if err == nil && reg.taken != "" {
		err = fmt.Errorf("the newer agent %s has taken %s over from agent %s", reg.taken, reg.name, reg.id)
	}
	return reg.since, err
}

// Unhost ends another agent's registration at this process's own server, unless a
// newer agent has taken the rank over.
func (b *Bus) Unhost(ctx context.Context, a *wire.Agent) error {
	l, reg, err := b.guest(a, 0)
	if err != nil {
		return err
	}
	old, err := l.read(ctx, reg.key)
	if err == nil && old.agent != nil && old.agent.ID == a.ID {
		reg.seq = old.seq
		b.erase(ctx, l, reg)
	}
	return err
}

func (b *Bus) guest(a *wire.Agent, since int64) (*link, *registration, error) {
	reg, err := registrationOf(a)
	reg.guest, reg.since = true, since
	l := b.homeLink()
	switch {
	case err != nil:
	case l == nil || l.kind != homeLink:
		err = errors.New("this agent has no server of its own")
	case !legalID.MatchString(a.ID):
		err = fmt.Errorf("agent id %.100q is not 1 to 64 letters, digits, - and _", a.ID)
	}
	return l, reg, err
}
