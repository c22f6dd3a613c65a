// The registry is a key-value bucket of JetStream: it is made, and refused if it does more than to keep the registry.

package natsbus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvconn/kvconn/core"
)

const (
	// markerTTL is how long the registry remembers that a key has ended. All
	// agents must create the bucket with the same value.
	markerTTL = 10 * time.Second

	// attemptTime bounds one request to the registry of a cluster: the registry does not
	// answer while it has no leader. attemptPause is the pause between two requests.
	attemptTime  = time.Second
	attemptPause = 200 * time.Millisecond

	absentAgain = 50 * time.Millisecond // a replica that lags behind is read again
)

func wrongSequence(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && (api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence ||
		api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequenceConstant)
}

// failure explains an error of the registry.
func (l *link) failure(session context.Context, err error) error {
	switch {
	case session.Err() != nil, broken(err):
		return unreachable(l.name, either(l.why(), err))
	case errors.Is(err, nats.ErrNoResponders), errors.Is(err, jetstream.ErrNoStreamResponse), errors.Is(err, jetstream.ErrJetStreamNotEnabled):
		return fmt.Errorf("the registry at %s does not answer, is JetStream enabled (nats-server -js)? %w", l.name, err)
	}
	return fmt.Errorf("the registry at %s: %w", l.name, err)
}

// patiently makes a request to a registry. As long as a cluster's registry does not answer in
// time, or has no leader, it repeats the request until ctx ends.
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

// over says whether the link will not come back.
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
			return nil // the bucket has other settings; publishing tells whether they will do
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
		l.bus.log.Sugar().Warnf("natsbus: %s has %d servers, but not %d for the registry: if the registry's one server ends, so does the registry; delete stream %s when all servers are up: %v",
			l.name, known, clusterReplicas, stream, err)
	}
	return create(1)
}

// clusterReplicas is how many servers hold the registry of a cluster that has as many.
const clusterReplicas = 3

// checkRegistry refuses a stream that does more than to keep the registry. Whoever may create or change
// the stream could have it keep what agents say to each other, or say it again elsewhere.
func (l *link) checkRegistry(ctx context.Context) error {
	st, err := l.js.Stream(ctx, stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	c, wrong := st.CachedInfo().Config, ""
	switch {
	case c.Mirror != nil:
		wrong = fmt.Sprintf("is a mirror of stream %.300q (mirror)", c.Mirror.Name)
	case len(c.Sources) > 0:
		wrong = fmt.Sprintf("takes what stream %.300q has (sources)", c.Sources[0].Name)
	case c.AllowMsgSchedules:
		wrong = "lets a message have the server write others' entries (allow_msg_schedules)"
	case len(c.Subjects) != 1 || c.Subjects[0] != subtree+">":
		wrong = fmt.Sprintf("has the subjects %.300q, want only %q (subjects)", c.Subjects, subtree+">")
	case c.RePublish != nil:
		wrong = fmt.Sprintf("publishes what it keeps again, at %.300q (republish)", c.RePublish.Destination)
	case c.SubjectTransform != nil:
		wrong = fmt.Sprintf("keeps %.300q as %.300q (subject_transform)", c.SubjectTransform.Source, c.SubjectTransform.Destination)
	default:
		return nil
	}
	return fmt.Errorf("stream %s %s: no kvconn agent made it so; delete it, and let nobody create it whom you do not trust", stream, wrong)
}
