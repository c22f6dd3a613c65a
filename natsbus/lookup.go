package natsbus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// Bounds of a Lookup.
const (
	staleReads = 10
	maxListed  = 16  // engines named in an error
	maxEngines = 256 // engines of one registry that a Lookup without EngineID reads
)

// ErrAmbiguous: a Lookup named no engine, and several engines have the rank.
var ErrAmbiguous = errors.New("several engines are registered")

// Lookup implements core.Bus.
func (b *Bus) Lookup(ctx context.Context, t core.Target) (*wire.Agent, core.Via, error) {
	l, err := b.link(ctx, t.Bootstrap)
	if err != nil {
		return nil, "", err
	}
	l = b.first(l)
	for {
		var a *wire.Agent
		var session context.Context
		err := l.patiently(ctx, func(ctx context.Context) (err error) {
			if session, err = l.wait(ctx); err == nil {
				a, err = l.find(ctx, session, t)
			}
			return err
		})
		if err == nil {
			return a, l.via, nil
		}
		if ctx.Err() != nil || session == nil || session.Err() == nil && !errors.Is(err, core.ErrUnreachable) {
			return nil, "", err
		}
		// nats.go knows a broken connection a moment before its callback runs.
		select {
		case <-session.Done():
		case <-ctx.Done():
		}
	}
}

func (l *link) find(ctx, session context.Context, t core.Target) (*wire.Agent, error) {
	ctx, cancel := during(ctx, session)
	defer cancel()
	a, err := l.findIn(ctx, t)
	if err == nil || errors.Is(err, core.ErrNotRegistered) || errors.Is(err, ErrAmbiguous) {
		return a, err
	}
	return nil, l.failure(session, err)
}

func (l *link) findIn(ctx context.Context, t core.Target) (*wire.Agent, error) {
	keys := []string{rankKey(t.EngineID, t.TPRank, t.PPRank)}
	if t.EngineID == "" {
		var err error
		if keys, err = l.list(ctx, subtree+"*"+rankSuffix(t.TPRank, t.PPRank)); err != nil {
			return nil, err
		}
		if len(keys) > maxEngines {
			return nil, fmt.Errorf("%w at %s: %d; name one by its engine_id", ErrAmbiguous, l.name, len(keys))
		}
	}
	var found []*wire.Agent
	for _, key := range keys {
		r, err := l.readChecked(ctx, key)
		if err != nil && !(t.EngineID == "" && unreadable(err)) { // one engine's unreadable entry does not hide others
			return nil, err
		}
		if r.agent != nil && isRank(r.agent, t) {
			found = append(found, r.agent)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		all, err := l.list(ctx, subtree+">")
		if err != nil {
			return nil, err
		}
		if t.EngineID != "" && slices.Contains(all, keys[0]) {
			// The leader knows the rank. A replica that lags behind may not yet.
			for range staleReads {
				r, err := l.readChecked(ctx, keys[0])
				if err != nil || r.agent != nil && isRank(r.agent, t) {
					return r.agent, err
				}
				if r.seq != 0 || pause(ctx, absentAgain) != nil {
					break
				}
			}
		}
		var live []string
		for _, key := range all {
			if len(live) == maxListed {
				live = append(live, "and more")
				break
			}
			r, err := l.read(ctx, key)
			if err != nil && !unreadable(err) {
				return nil, err
			}
			if r.agent != nil {
				live = append(live, fmt.Sprintf("%.300s", nameOf(r.agent)))
			}
		}
		return nil, l.missing(t, live)
	}
	var names []string
	for _, a := range found[:min(len(found), maxListed)] {
		names = append(names, fmt.Sprintf("%q (agent %s)", a.EngineID, a.ID))
	}
	return nil, fmt.Errorf("%w at %s with %s: %s; name one by its engine_id",
		ErrAmbiguous, l.name, rankOf(t), strings.Join(names, ", "))
}

func isRank(a *wire.Agent, t core.Target) bool { return t.DPRank < 0 || a.DPRank == t.DPRank }

func rankOf(t core.Target) string {
	if t.DPRank < 0 {
		return fmt.Sprintf("rank tp %d pp %d", t.TPRank, t.PPRank)
	}
	return fmt.Sprintf("rank dp %d tp %d pp %d", t.DPRank, t.TPRank, t.PPRank)
}

// readChecked reads an entry whose agent must be of the rank in the key. One of another rank is
// as unreadable as one that cannot be decoded.
func (l *link) readChecked(ctx context.Context, key string) (record, error) {
	r, err := l.read(ctx, key)
	if a := r.agent; err == nil && a != nil && (rankKey(a.EngineID, a.TPRank, a.PPRank) != key || !legalID(a.ID)) {
		return record{seq: r.seq}, &unreadableError{fmt.Errorf("the registry's entry of %s describes agent %q, %s", keyName(key), a.ID, nameOf(a))}
	}
	return r, err
}

func (l *link) missing(t core.Target, live []string) error {
	there := "nothing is"
	if len(live) > 0 {
		there = "registered are " + strings.Join(live, ", ")
	}
	engine := "any engine"
	if t.EngineID != "" {
		engine = fmt.Sprintf("engine %q", t.EngineID)
	}
	return fmt.Errorf("%w: %s, %s at %s: %s", core.ErrNotRegistered, engine, rankOf(t), l.name, there)
}
