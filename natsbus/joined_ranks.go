// This agent's server keeps the registrations of the ranks that have joined its port.

package natsbus

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// Host makes or renews another agent's registration at this process's own server.
// since orders the agents of one rank, and the result replaces it. fresh says that the
// agent is new and takes the rank over.
func (b *Bus) Host(ctx context.Context, a *wire.Agent, fresh bool, since int64) (int64, error) {
	l, reg, err := b.joinedRank(a, since)
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
	l, reg, err := b.joinedRank(a, 0)
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

// Listens asks this process's own server whether an agent is connected. A doubt counts as
// yes.
func (b *Bus) Listens(ctx context.Context, id core.AgentID) bool {
	_, err := b.Request(ctx, "", id, &wire.Request{Kind: wire.KindRenew, Renew: &wire.Renew{}})
	return !errors.Is(err, core.ErrAbsent)
}

func (b *Bus) joinedRank(a *wire.Agent, since int64) (*link, *registration, error) {
	l := b.homeLink()
	reg, err := registrationOf(a)
	reg.joined, reg.since, reg.key = true, since, rankKey(a.EngineID, a.TPRank, a.PPRank)
	switch {
	case err != nil:
	case l == nil || l.kind != homeLink:
		err = errors.New("this agent has no server of its own")
	case !legalID(a.ID):
		err = fmt.Errorf("agent id %.100q is not 1 to 64 letters, digits, - and _", a.ID)
	}
	return l, reg, err
}
