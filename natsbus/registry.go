package natsbus

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/wire"
)

// ErrAmbiguous: a Lookup named no engine, and several have the rank.
var ErrAmbiguous = errors.New("several engines are registered")

const (
	bucket  = "kvconn_ranks"
	stream  = "KV_" + bucket
	subtree = "$KV." + bucket + "."

	// sinceHeader orders the agents that register one rank: the newest wins,
	// also when the bucket was lost and all of them come back at once.
	sinceHeader  = "Kvconn-Since"
	opHeader     = "KV-Operation"
	markerHeader = "Nats-Marker-Reason"

	// markerTTL is how long the registry remembers that a key has ended. All
	// agents must create the bucket alike.
	markerTTL = 10 * time.Second

	// attemptTime bounds one question to the registry of a cluster: while no
	// leader is elected nobody answers. Between attempts there is a pause.
	attemptTime  = time.Second
	attemptPause = 200 * time.Millisecond
	staleReads   = 10

	maxListed   = 16  // engines named in an error
	maxEngines  = 256 // engines of one registry that a Lookup without EngineID reads
	goodbyeWait = time.Second
)

// registration is this agent's entry in the registry.
type registration struct {
	id    core.AgentID
	what  string // for logs
	key   string
	dp    int
	value []byte
	since int64
	seq   uint64       // of the last message under the key that we know of
	taken core.AgentID // who has taken the rank over
	guest bool         // of another process, which tells of changes itself
	stop  context.CancelFunc
	done  chan struct{}
}

// record is what the registry holds under a key. Without an agent it is gone,
// or never was.
type record struct {
	agent *wire.Agent
	since int64
	seq   uint64
}

// rankKey encodes any engine id: a key has letters, digits and a few others. Each
// dp rank is an engine with an id of its own, so it is found by that alone.
func rankKey(engine string, tp, pp int) string {
	return subtree + "e" + base64.RawURLEncoding.EncodeToString([]byte(engine)) + rankSuffix(tp, pp)
}

func rankSuffix(tp, pp int) string {
	return fmt.Sprintf(".%d.%d", tp, pp)
}

func rankName(engine string, dp, tp, pp int) string {
	return fmt.Sprintf("engine %q, rank dp %d tp %d pp %d", engine, dp, tp, pp)
}

func nameOf(a *wire.Agent) string { return rankName(a.EngineID, a.DPRank, a.TPRank, a.PPRank) }

// keyName is a key as a reader wants it.
func keyName(key string) string {
	engine, rank, _ := strings.Cut(strings.TrimPrefix(key, subtree), ".")
	raw, err := base64.RawURLEncoding.DecodeString(strings.TrimPrefix(engine, "e"))
	if err != nil || strconv.Quote(rank) != `"`+rank+`"` { // a stranger's registry may say anything
		return fmt.Sprintf("%.300q", key)
	}
	return fmt.Sprintf("%q rank %s", raw, rank)
}

// Register implements core.Bus. When the rank has an entry already, the newest
// agent wins.
func (b *Bus) Register(ctx context.Context, a *wire.Agent) error {
	what := nameOf(a)
	reg, err := registrationOf(a)
	if err == nil && a.ID != string(b.opt.AgentID) {
		err = fmt.Errorf("it is of agent %q, this is %s", a.ID, b.opt.AgentID)
	}
	if err != nil {
		return fmt.Errorf("register %s: %w", what, err)
	}
	l := b.homeLink()
	if l == nil {
		return fmt.Errorf("register %s: this agent has no server or cluster of its own", what)
	}
	renewing, stop := context.WithCancel(b.ctx)
	reg.stop = stop
	b.mu.Lock()
	if b.closed != nil || b.reg != nil {
		err := errClosed
		if b.reg != nil {
			err = fmt.Errorf("this agent is registered already, as %s", b.reg.what)
		}
		b.mu.Unlock()
		stop()
		return fmt.Errorf("register %s: %w", what, err)
	}
	b.reg = reg
	b.wg.Add(1) // for the whole of it: Close ends it by stop
	b.mu.Unlock()

	regCtx, cancel := during(ctx, renewing)
	defer cancel()
	reg.since = time.Now().UnixNano()
	err = l.patiently(regCtx, func(ctx context.Context) error { return b.put(ctx, l, reg, true) })
	for l.kind == joinLink && err != nil && pause(regCtx, attemptPause) == nil { // that one may still be starting, or remember a rank that is gone
		if e := b.put(regCtx, l, reg, true); e == nil || regCtx.Err() == nil { // else the reason is the one before
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
		return fmt.Errorf("register %s at %s: %w", what, l.name, err)
	}
	safe.Go("natsbus.renew", func() {
		defer b.wg.Done()
		defer close(reg.done)
		b.renew(renewing, reg)
	})
	return nil
}

func registrationOf(a *wire.Agent) (*registration, error) {
	value, err := a.MarshalMsg(nil)
	if err == nil {
		err = wire.Decode(value, new(wire.Agent)) // what no peer would read
	}
	return &registration{id: core.AgentID(a.ID), what: nameOf(a), value: value, done: make(chan struct{}), dp: a.DPRank, key: rankKey(a.EngineID, a.TPRank, a.PPRank)}, err
}

// renewNow asks for a renewal before its time.
func (b *Bus) renewNow() {
	select {
	case b.kick <- struct{}{}:
	default:
	}
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
				b.log.Sugar().Warnf("natsbus: the registration of %s is not renewed, it ends %v after the last renewal: %v", reg.what, b.opt.TTL, err)
			}
		case failing:
			b.log.Sugar().Infof("natsbus: the registration of %s is renewed again", reg.what)
		}
		failing = err != nil
		timer.Reset(next)
	}
}

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
		if look {
			var old record
			if old, err = l.read(ctx, reg.key); err != nil {
				return l.failure(session, err)
			}
			if a := old.agent; a != nil && a.DPRank != reg.dp {
				return fmt.Errorf("engine_id %q is that of dp rank %d (agent %s) already: each dp rank is an engine with an engine_id of its own", a.EngineID, a.DPRank, a.ID)
			}
			if !b.mayTake(reg, old, isNew) {
				return nil
			}
			reg.seq = old.seq
		}
		m := nats.NewMsg(reg.key)
		m.Data = reg.value
		m.Header.Set(sinceHeader, strconv.FormatInt(reg.since, 10))
		var ack *jetstream.PubAck
		ack, err = l.js.PublishMsg(ctx, m, jetstream.WithMsgTTL(b.opt.TTL), jetstream.WithExpectStream(stream),
			jetstream.WithExpectLastSequencePerSubject(reg.seq), jetstream.WithRetryAttempts(0))
		switch {
		case err == nil:
			reg.seq = ack.Sequence
			return nil
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

// mayTake decides between this agent and what the registry holds, and tells of
// a change.
func (b *Bus) mayTake(reg *registration, old record, isNew bool) bool {
	if old.agent == nil || old.agent.ID == string(reg.id) {
		if reg.taken != "" {
			b.log.Sugar().Infof("natsbus: agent %s is gone from %s: agent %s has it again", reg.taken, reg.what, reg.id)
			reg.taken = ""
		}
		return true
	}
	other := core.AgentID(old.agent.ID)
	if isNew {
		reg.since = max(reg.since, old.since+1)
	}
	if reg.since > old.since || (reg.since == old.since && reg.id > other) {
		b.log.Sugar().Warnf("natsbus: %s was registered by agent %s; the newer agent %s takes it over", reg.what, other, reg.id)
		reg.taken = ""
		return true
	}
	if reg.taken != other {
		if !reg.guest {
			b.log.Sugar().Warnf("natsbus: the newer agent %s has taken %s over from agent %s", other, reg.what, reg.id)
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
			b.log.Sugar().Debugf("natsbus: the registration of %s is not withdrawn: %v", reg.what, err)
		}
		return
	}
	b.erase(ctx, l, reg)
}

// erase writes that an entry has ended, if it is as reg knows it.
func (b *Bus) erase(ctx context.Context, l *link, reg *registration) {
	m := nats.NewMsg(reg.key)
	m.Header.Set(opHeader, "DEL")
	_, err := l.js.PublishMsg(ctx, m, jetstream.WithMsgTTL(markerTTL), jetstream.WithExpectStream(stream),
		jetstream.WithExpectLastSequencePerSubject(reg.seq), jetstream.WithRetryAttempts(0))
	if err != nil && !wrongSequence(err) { // it ends by itself
		b.log.Sugar().Debugf("natsbus: the registration of %s is not withdrawn: %v", reg.what, err)
	}
}

func wrongSequence(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && (api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence ||
		api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequenceConstant)
}

// failure says what an error of the registry means.
func (l *link) failure(session context.Context, err error) error {
	switch {
	case session.Err() != nil, broken(err):
		return unreachable(l.name, either(l.why(), err))
	case errors.Is(err, nats.ErrNoResponders), errors.Is(err, jetstream.ErrNoStreamResponse), errors.Is(err, jetstream.ErrJetStreamNotEnabled):
		return fmt.Errorf("the registry at %s does not answer, is JetStream enabled (nats-server -js)? %w", l.name, err)
	}
	return fmt.Errorf("the registry at %s: %w", l.name, err)
}

// patiently repeats a question to a cluster's registry that nobody answered in
// time, or that has no leader at this moment, until ctx ends.
func (l *link) patiently(ctx context.Context, ask func(context.Context) error) error {
	if l.kind != clusterLink {
		return ask(ctx)
	}
	for {
		attempt, cancel := context.WithTimeout(ctx, attemptTime)
		err := ask(attempt)
		late := attempt.Err() != nil
		cancel()
		var api *jetstream.APIError
		if errors.As(err, &api) && (api.ErrorCode == errNotAvailable || api.ErrorCode == errNotLeader) ||
			errors.Is(err, nats.ErrNoResponders) || errors.Is(err, jetstream.ErrNoStreamResponse) {
			late = true // only a leader listens
		}
		if wrongSequence(err) {
			late = true // an earlier attempt is on its way into the log
		}
		if err == nil || !late && !errors.Is(err, core.ErrUnreachable) || l.over() {
			return err
		}
		if pause(ctx, attemptPause) != nil {
			return fmt.Errorf("%w: %s: its registry has no leader at this moment, or does not answer: %w", core.ErrUnreachable, l.name, err)
		}
	}
}

// over: the link will not come back.
func (l *link) over() bool {
	select {
	case <-l.gone:
		return true
	case <-l.bus.ctx.Done():
		return true
	default:
		return false
	}
}

// Error codes of a JetStream cluster that nats.go has no names for.
const (
	errNoPeers      jetstream.ErrorCode = 10005 // not as many servers as replicas
	errNotAvailable jetstream.ErrorCode = 10008 // no leader
	errNotLeader    jetstream.ErrorCode = 10009
	errResources    jetstream.ErrorCode = 10023 // as errNoPeers, of older servers
	errNoReplicas   jetstream.ErrorCode = 10074 // no cluster
)

func (l *link) createBucket(ctx context.Context) error {
	create := func(replicas int) error {
		_, err := l.js.CreateKeyValue(ctx, jetstream.KeyValueConfig{
			Bucket: bucket, Description: "kvconn: prefill ranks", History: 1, Replicas: replicas,
			Storage: jetstream.MemoryStorage, LimitMarkerTTL: markerTTL,
		})
		if errors.Is(err, jetstream.ErrBucketExists) {
			return nil // someone's of other settings; publishing tells whether it will do
		}
		return err
	}
	replicas := l.bus.opt.Replicas
	switch {
	case replicas > 0:
		if err := create(replicas); err != nil {
			return fmt.Errorf("a registry of %d replicas (nats_replicas): %w", replicas, err)
		}
		return nil
	case l.kind != clusterLink:
		return create(1)
	}
	err := create(clusterReplicas)
	var api *jetstream.APIError
	if !errors.As(err, &api) || api.ErrorCode != errNoPeers && api.ErrorCode != errNoReplicas && api.ErrorCode != errResources {
		return err
	}
	if known := len(l.nc.Servers()); known >= clusterReplicas {
		l.bus.log.Sugar().Warnf("natsbus: %s has %d servers, but not %d for the registry: it ends with one server; delete stream %s when all are up: %v",
			l.name, known, clusterReplicas, stream, err)
	}
	return create(1)
}

// clusterReplicas is how many servers hold the registry where they are there.
const clusterReplicas = 3

func (l *link) read(ctx context.Context, key string) (record, error) {
	r, err := l.readOnce(ctx, key)
	if err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) && ctx.Err() == nil && l.ranks.Swap(nil) != nil {
		r, err = l.readOnce(ctx, key) // the stream may be another than was found
	}
	if errors.Is(err, jetstream.ErrStreamNotFound) || errors.Is(err, jetstream.ErrMsgNotFound) {
		return record{}, nil
	}
	return r, err
}

func (l *link) readOnce(ctx context.Context, key string) (record, error) {
	if l.kind == clusterLink && l.ranks.Load() == nil {
		if r, err := l.readAny(ctx, key); err != nil || r.agent != nil {
			return r, err
		}
	}
	st, err := l.registry(ctx)
	if err != nil {
		return record{}, err
	}
	return readKey(ctx, st, key)
}

// readAny reads an entry from whichever replica has it, for a newcomer: to find
// the stream takes its leader. Without an agent the leader must be asked.
func (l *link) readAny(ctx context.Context, key string) (record, error) {
	m, err := l.nc.RequestWithContext(ctx, "$JS.API.DIRECT.GET."+stream+"."+key, nil)
	if errors.Is(err, nats.ErrNoResponders) {
		return record{}, nil
	}
	if err != nil {
		return record{}, err
	}
	seq, err := strconv.ParseUint(m.Header.Get(jetstream.SequenceHeader), 10, 64)
	if err != nil { // a status, like "not found"
		return record{}, nil
	}
	return recordOf(seq, m.Header, m.Data, key)
}

// registry returns the stream as it was found first.
func (l *link) registry(ctx context.Context) (jetstream.Stream, error) {
	if st := l.ranks.Load(); st != nil {
		return *st, nil
	}
	st, err := l.js.Stream(ctx, stream)
	if err != nil {
		return nil, err
	}
	l.ranks.Store(&st)
	return st, nil
}

func readKey(ctx context.Context, st jetstream.Stream, key string) (record, error) {
	m, err := st.GetLastMsgForSubject(ctx, key)
	if err != nil {
		return record{}, err
	}
	return recordOf(m.Sequence, m.Header, m.Data, key)
}

func recordOf(seq uint64, header nats.Header, data []byte, key string) (record, error) {
	r := record{seq: seq}
	if header.Get(opHeader) != "" || header.Get(markerHeader) != "" {
		return r, nil
	}
	// An unreadable time is that of another version: older than ours.
	r.since, _ = strconv.ParseInt(header.Get(sinceHeader), 10, 64)
	r.agent = new(wire.Agent)
	if err := wire.Decode(data, r.agent); err != nil {
		return record{}, fmt.Errorf("the entry of %s: %w", keyName(key), err)
	}
	return r, nil
}

// Lookup implements core.Bus.
func (b *Bus) Lookup(ctx context.Context, t core.Target) (*wire.Agent, core.Via, error) {
	l, err := b.link(ctx, t.Bootstrap)
	if err != nil {
		return nil, "", err
	}
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
		if err != nil {
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
			if err != nil {
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

// readChecked reads an entry that must be of the rank that its key says.
func (l *link) readChecked(ctx context.Context, key string) (record, error) {
	r, err := l.read(ctx, key)
	if a := r.agent; err == nil && a != nil && (rankKey(a.EngineID, a.TPRank, a.PPRank) != key || !legalID.MatchString(a.ID)) {
		return record{}, fmt.Errorf("the entry of %s is of agent %q, %s", keyName(key), a.ID, nameOf(a))
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

// list returns the keys under a filter, also those that have just ended. The
// stream's leader answers.
func (l *link) list(ctx context.Context, filter string) ([]string, error) {
	st, err := l.registry(ctx)
	var info *jetstream.StreamInfo
	if err == nil {
		info, err = st.Info(ctx, jetstream.WithSubjectFilter(filter))
	}
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	subjects := info.State.Subjects
	keys := make([]string, 0, len(subjects))
	for key := range subjects {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys, nil
}
