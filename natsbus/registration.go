// This agent's entry is written, renewed and withdrawn. If the rank has an entry already, the newest agent wins.

package natsbus

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/wire"
)

// Register implements core.Bus. If the rank has an entry already, the newest agent
// wins.
func (b *Bus) Register(ctx context.Context, a *wire.Agent) error {
	name := nameOf(a)
	l := b.homeLink()
	reg, err := registrationOf(a)
	if err == nil && a.ID != string(b.opt.Identity.ID()) {
		err = fmt.Errorf("the registration names agent %q, but this is agent %s", a.ID, b.opt.Identity.ID())
	}
	if err != nil {
		return fmt.Errorf("register %s: %w", name, err)
	}
	if l == nil {
		return fmt.Errorf("register %s: this agent has no server or cluster of its own", name)
	}
	reg.key = l.kind.rankKey(a.EngineID, a.TPRank, a.PPRank)
	if err := b.opt.Identity.mayName(reg.key, a.EngineID); err != nil {
		return fmt.Errorf("register %s: %w", name, err)
	}
	renewing, stop := context.WithCancel(b.ctx)
	reg.stop = stop
	b.mu.Lock()
	if b.closed != nil || b.reg != nil {
		err := errClosed
		if b.reg != nil {
			err = fmt.Errorf("this agent is registered already, as %s", b.reg.name)
		}
		b.mu.Unlock()
		stop()
		return fmt.Errorf("register %s: %w", name, err)
	}
	b.reg = reg
	b.wg.Add(1) // until the renewals end: Close stops them
	b.mu.Unlock()

	regCtx, cancel := during(ctx, renewing)
	defer cancel()
	reg.since = time.Now().UnixNano()
	err = l.patiently(regCtx, func(ctx context.Context) error { return b.put(ctx, l, reg, true) })
	for l.kind == joinLink && err != nil && pause(regCtx, attemptPause) == nil { // the first rank may still be starting, or remember a rank that is gone
		if e := b.put(regCtx, l, reg, true); e == nil || regCtx.Err() == nil { // if the time is over, the error before is the reason
			err = e
		}
	}
	if err != nil {
		b.mu.Lock()
		b.reg = nil
		b.mu.Unlock()
		stop()
		close(reg.done)
		b.wg.Done()
		return fmt.Errorf("register %s at %s: %w", name, l.name, err)
	}
	safe.Go("natsbus.renew", func() {
		defer b.wg.Done()
		defer close(reg.done)
		b.renew(renewing, reg)
	})
	return nil
}

// renew keeps the entry alive until ctx ends.
func (b *Bus) renew(ctx context.Context, reg *registration) {
	every := b.opt.TTL / 3
	timer := time.NewTimer(every)
	defer timer.Stop()
	failing := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-b.kick:
		case <-timer.C:
		}
		next := every
		attempt, cancel := context.WithTimeout(ctx, min(max(every, time.Second), 2*time.Second))
		err := b.put(attempt, b.homeLink(), reg, false)
		cancel()
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			next = min(every, 500*time.Millisecond)
			if !failing {
				b.log.Sugar().Warnf("natsbus: the registration of %s could not be renewed and ends %v after its last renewal: %v", reg.name, b.opt.TTL, err)
			}
		case failing:
			b.log.Sugar().Infof("natsbus: the registration of %s is renewed again", reg.name)
		}
		failing = err != nil
		timer.Reset(next)
	}
}

// checkEvery is how many writes of an entry have one look at the stream's settings. A change of them changes no
// entry, so that nothing else leads there.
const checkEvery = 3

// put writes the entry with a new lease. An entry of another agent is
// overwritten when it is older, or in any case when this agent is new.
func (b *Bus) put(ctx context.Context, l *link, reg *registration, isNew bool) error {
	session, ok := l.current()
	if !ok {
		if isNew {
			var err error
			if session, err = l.wait(ctx); err != nil {
				return err
			}
		} else {
			return unreachable(l.name, l.why())
		}
	}
	ctx, cancel := during(ctx, session)
	defer cancel()
	if l.kind == joinLink {
		return b.join(ctx, reg, &wire.Join{New: isNew, Since: reg.since})
	}
	look := isNew || reg.seq == 0 || reg.taken != ""
	var err error
	for range 5 {
		if reg.unchecked++; l.kind == clusterLink && (look || reg.unchecked >= checkEvery && !fault.On("bus-registry-unwatched")) {
			if err := l.checkRegistry(ctx); err != nil {
				return l.failure(session, err)
			}
			reg.unchecked = 0
		}
		if look {
			var old record
			if old, err = l.readChecked(ctx, reg.key); err != nil && !unreadable(err) {
				return l.failure(session, err)
			}
			if a := old.agent; a != nil && a.DPRank != reg.dp {
				return fmt.Errorf("dp rank %d (agent %s) has engine_id %q already: give each dp rank an engine_id of its own", a.DPRank, a.ID, a.EngineID)
			}
			if !b.mayTake(reg, old, isNew) {
				return nil
			}
			reg.seq = old.seq
		}
		m := nats.NewMsg(reg.key)
		m.Data = reg.value
		m.Header.Set(sinceHeader, strconv.FormatInt(reg.since, 10))
		b.opt.Identity.signEntry(m, time.Now().Add(b.opt.TTL+clocksApart))
		var ack *jetstream.PubAck
		writing, written := l.write(ctx, reg.key)
		ack, err = l.js.PublishMsg(writing, m, jetstream.WithMsgTTL(b.opt.TTL), jetstream.WithExpectStream(stream),
			jetstream.WithExpectLastSequencePerSubject(reg.seq), jetstream.WithRetryAttempts(0))
		denied := context.Cause(writing)
		written()
		var not *deniedError
		switch {
		case err == nil:
			reg.seq = ack.Sequence
			return nil
		case errors.As(denied, &not):
			return b.opt.Identity.mayNotWrite(l.name, reg.key, reg.engine, not)
		case errors.Is(err, jetstream.ErrNoStreamResponse), errors.Is(err, nats.ErrNoResponders):
			if err := l.createBucket(ctx); err != nil {
				return l.failure(session, err)
			}
			look = true
		case wrongSequence(err):
			look = true
			if l.kind == clusterLink && pause(ctx, absentAgain) != nil { // a replica that lags behind is read again
				return l.failure(session, err)
			}
		default:
			return l.failure(session, err)
		}
	}
	return l.failure(session, err)
}

// write returns a context for a write under a key. It ends with ctx, and when the server says that this agent may not publish there, since
// then no answer comes.
func (l *link) write(ctx context.Context, key string) (context.Context, context.CancelFunc) {
	ctx, deny := context.WithCancelCause(ctx)
	w := &writing{key, deny}
	l.mu.Lock()
	l.writing = w
	l.mu.Unlock()
	return ctx, func() {
		deny(nil)
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.writing == w {
			l.writing = nil
		}
	}
}

// mayTake says whether this agent may take its rank from the agent in the registry, and logs a change.
func (b *Bus) mayTake(reg *registration, old record, isNew bool) bool {
	if old.agent == nil || old.agent.ID == string(reg.id) {
		if reg.taken != "" {
			b.log.Sugar().Infof("natsbus: agent %s is gone from %s: agent %s has it again", reg.taken, reg.name, reg.id)
			reg.taken = ""
		}
		return true
	}
	other := core.AgentID(old.agent.ID)
	if isNew {
		reg.since = max(reg.since, old.since+1)
	}
	if reg.since > old.since || (reg.since == old.since && reg.id > other) {
		b.log.Sugar().Warnf("natsbus: %s was registered by agent %s; the newer agent %s takes it over", reg.name, other, reg.id)
		reg.taken = ""
		return true
	}
	if reg.taken != other {
		if !reg.joined {
			b.log.Sugar().Warnf("natsbus: the newer agent %s has taken %s over from agent %s", other, reg.name, reg.id)
		}
		reg.taken = other
	}
	return false
}

// withdraw ends the entry if it is still ours.
func (b *Bus) withdraw(ctx context.Context, l *link, reg *registration) {
	if reg == nil {
		return
	}
	reg.stop()
	<-reg.done
	session, ok := l.current()
	if !ok || reg.taken != "" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, goodbyeWait)
	defer cancel()
	ctx, cancel = during(ctx, session)
	defer cancel()
	if l.kind == joinLink {
		if err := b.join(ctx, reg, &wire.Join{Leave: true, Since: reg.since}); err != nil {
			b.log.Sugar().Debugf("natsbus: the registration of %s is not withdrawn: %v", reg.name, err)
		}
		return
	}
	b.erase(ctx, l, reg)
}

// erase writes that an entry has ended, unless the entry has changed since reg.seq.
func (b *Bus) erase(ctx context.Context, l *link, reg *registration) {
	m := nats.NewMsg(reg.key)
	m.Header.Set(opHeader, "DEL")
	_, err := l.js.PublishMsg(ctx, m, jetstream.WithMsgTTL(markerTTL), jetstream.WithExpectStream(stream),
		jetstream.WithExpectLastSequencePerSubject(reg.seq), jetstream.WithRetryAttempts(0))
	if err != nil && !wrongSequence(err) { // it ends by itself
		b.log.Sugar().Debugf("natsbus: the registration of %s is not withdrawn: %v", reg.name, err)
	}
}
