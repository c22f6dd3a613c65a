// A prefill rank is looked up in the registry, and an entry is believed only of the rank that its key names.

package natsbus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/wire"
)

// Bounds of a Lookup.
const (
	staleReads  = 10
	maxListed   = 16  // engines named in an error
	maxNamed    = 64  // keys that are looked at to name them: some have just ended
	maxEngineID = 256 // bytes; node refuses longer ones
	maxEngines  = 256 // engines of one registry that a Lookup without EngineID reads
)

// ErrAmbiguous: a Lookup named no engine, and several engines have the rank.
var ErrAmbiguous = errors.New("several engines are registered")

// Lookup implements core.Bus.
func (b *Bus) Lookup(ctx context.Context, t core.Target) (*wire.Agent, core.Via, error) {
	l, err := b.link(ctx, t.Bootstrap)
	if err != nil {
		return nil, "", err
	}
	l = b.oldestLink(l)
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
	if err == nil {
		err = l.mayBelieve(ctx, session, a)
	}
	if err == nil || errors.Is(err, core.ErrNotRegistered) || errors.Is(err, ErrAmbiguous) {
		return a, err
	}
	return nil, l.failure(session, err)
}

// mayBelieve looks at the stream's settings, once in a session: whoever may create the stream could have it keep his entry as that of
// another engine. The entry of an nkey's engine is signed, so that it can be believed while no leader tells the settings.
func (l *link) mayBelieve(ctx, session context.Context, a *wire.Agent) error {
	if owner, _ := engineOwner(a.EngineID); l.kind != clusterLink || owner != "" || fault.On("bus-registry-believed") {
		return nil
	}
	l.mu.Lock()
	right := l.right == session
	l.mu.Unlock()
	if right {
		return nil
	}
	if err := l.checkRegistry(ctx); err != nil {
		return fmt.Errorf("engine %.300q is not believed, since its engine_id begins with no nkey: %w", a.EngineID, err)
	}
	l.mu.Lock()
	l.right = session
	l.mu.Unlock()
	return nil
}

func (l *link) findIn(ctx context.Context, t core.Target) (*wire.Agent, error) {
	if len(t.EngineID) > maxEngineID {
		return nil, fmt.Errorf("%w at %s: an engine_id of %d bytes, and no engine has one of more than %d", core.ErrNotRegistered, l.name, len(t.EngineID), maxEngineID)
	}
	keys := []string{l.kind.rankKey(t.EngineID, t.TPRank, t.PPRank)}
	if t.EngineID == "" {
		var err error
		if keys, err = l.list(ctx, subtree+"*"+rankSuffix(t.TPRank, t.PPRank), maxEngines+1); err != nil {
			return nil, err
		}
		if l.kind == clusterLink { // engines of nkeys
			owned, err := l.list(ctx, subtree+"*.*"+rankSuffix(t.TPRank, t.PPRank), maxEngines+1)
			if err != nil {
				return nil, err
			}
			keys = append(keys, owned...)
		}
		if len(keys) > maxEngines {
			return nil, fmt.Errorf("%w at %s: more than %d; name one by its engine_id", ErrAmbiguous, l.name, maxEngines)
		}
	}
	var found *wire.Agent // the first: a host may have many, with descriptions of megabytes
	var names []string
	var ended time.Time
	for _, key := range keys {
		r, err := l.readChecked(ctx, key)
		if err != nil && !(t.EngineID == "" && unreadable(err)) { // one engine's unreadable entry does not hide others
			return nil, err
		}
		ended = r.ended
		if r.agent != nil && isRank(r.agent, t) {
			if found == nil {
				found = r.agent
			}
			if names = append(names, fmt.Sprintf("%.300q (agent %s)", r.agent.EngineID, r.agent.ID)); len(names) == maxListed {
				break // they are enough for an error
			}
		}
	}
	switch len(names) {
	case 1:
		return found, nil
	case 0:
		if t.EngineID != "" {
			if a, err := l.findLagging(ctx, t, keys[0]); a != nil || err != nil {
				return a, err
			}
		}
		all, err := l.list(ctx, subtree+">", maxNamed)
		if err != nil {
			return nil, err
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
		if len(all) == maxNamed && len(live) <= maxListed {
			live = append(live, "and perhaps more")
		}
		if t.EngineID == "" {
			ended = time.Time{}
		}
		return nil, l.missing(t, live, ended)
	}
	return nil, fmt.Errorf("%w at %s with %s: %s; name one by its engine_id",
		ErrAmbiguous, l.name, rankOf(t), strings.Join(names, ", "))
}

// findLagging finds a rank that the stream's leader knows, and the replica that was asked does not know yet. It
// returns nil if there is none.
func (l *link) findLagging(ctx context.Context, t core.Target, key string) (*wire.Agent, error) {
	known, err := l.list(ctx, key, 1)
	if err != nil || len(known) == 0 {
		return nil, err
	}
	for range staleReads {
		r, err := l.readChecked(ctx, key)
		if err != nil || r.agent != nil && isRank(r.agent, t) {
			return r.agent, err
		}
		if r.seq != 0 || pause(ctx, absentAgain) != nil {
			break
		}
	}
	return nil, nil
}

func isRank(a *wire.Agent, t core.Target) bool { return t.DPRank < 0 || a.DPRank == t.DPRank }

func rankOf(t core.Target) string {
	if t.DPRank < 0 {
		return fmt.Sprintf("rank tp %d pp %d", t.TPRank, t.PPRank)
	}
	return fmt.Sprintf("rank dp %d tp %d pp %d", t.DPRank, t.TPRank, t.PPRank)
}

func (l *link) readChecked(ctx context.Context, key string) (record, error) {
	r, err := l.read(ctx, key)
	return checked(key, l.kind, r, err)
}

// checked makes sure that the agent of an entry is of the rank in the entry's key. An entry of another rank counts
// as unreadable, like an entry that cannot be decoded.
func checked(key string, kind linkKind, r record, err error) (record, error) {
	a := r.agent
	if err != nil || a == nil {
		return r, err
	}
	if kind.rankKey(a.EngineID, a.TPRank, a.PPRank) != key || !legalID(a.ID) {
		return record{seq: r.seq}, &unreadableError{fmt.Errorf("the registry's entry of %s describes agent %q, %s", keyName(key), a.ID, nameOf(a))}
	}
	if owner := keyOwner(key); owner != "" && ownerOf(core.AgentID(a.ID)) != owner && !fault.On("bus-entry-unsigned") {
		return record{seq: r.seq}, &unreadableError{fmt.Errorf("the registry's entry of %s describes agent %q, which is of another key", keyName(key), a.ID)}
	}
	return r, nil
}

func (l *link) missing(t core.Target, live []string, ended time.Time) error {
	there := "nothing is"
	if len(live) > 0 {
		there = "registered are " + strings.Join(live, ", ")
	}
	engine := "any engine"
	if t.EngineID != "" {
		engine = fmt.Sprintf("engine %q", t.EngineID)
	}
	if !ended.IsZero() {
		there += fmt.Sprintf("; its last entry has ended %v ago by this host's clock, which must be right", time.Since(ended).Round(time.Second))
	}
	return fmt.Errorf("%w: %s, %s at %s: %s", core.ErrNotRegistered, engine, rankOf(t), l.name, there)
}
