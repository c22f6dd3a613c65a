// An entry of the registry, as it is read and as this agent writes its own.

package natsbus

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

const (
	opHeader     = "KV-Operation"
	markerHeader = "Nats-Marker-Reason"
)

// mostAhead is more than one host's clock is ahead of another's.
const mostAhead = 365 * 24 * time.Hour

// record is the registry's entry under a key. If agent is nil, the entry has ended or
// never existed.
type record struct {
	agent *wire.Agent
	since int64
	seq   uint64
	ended time.Time // if the entry is of an nkey's engine and has ended, but is still there: when it ended
}

func recordOf(seq uint64, header nats.Header, data []byte, key string) (record, error) {
	r := record{seq: seq}
	if header.Get(opHeader) != "" || header.Get(markerHeader) != "" {
		return r, nil
	}
	// A time that cannot be read counts as older than any other. So does a time more than mostAhead in the future, since
	// no other could be newer.
	r.since, _ = strconv.ParseInt(header.Get(sinceHeader), 10, 64)
	if r.since > time.Now().Add(mostAhead).UnixNano() {
		r.since = 0
	}
	ended, err := attest(header, data, key)
	if err != nil {
		return record{seq: r.seq}, &unreadableError{err}
	}
	if !ended.IsZero() {
		return record{seq: r.seq, ended: ended}, nil
	}
	r.agent = new(wire.Agent)
	if err := wire.Decode(data, r.agent); err != nil {
		return record{seq: r.seq}, &unreadableError{fmt.Errorf("the entry of %s: %w", keyName(key), err)}
	}
	return r, nil
}

// unreadableError is the error of an entry that no agent of this version can have written. The owner of the entry's key overwrites it.
type unreadableError struct{ error }

func (e *unreadableError) Unwrap() error { return e.error }

func unreadable(err error) bool {
	var u *unreadableError
	return errors.As(err, &u)
}

// registration is this agent's entry in the registry.
type registration struct {
	id     core.AgentID
	name   string // of the rank, for logs and errors
	engine string
	key    string
	dp     int
	value  []byte
	since  int64
	seq    uint64       // sequence of the last known message under the key
	taken  core.AgentID // the agent that has taken the rank over
	joined bool         // another process's agent, which logs changes itself
	// unchecked counts the writes since the stream's settings were looked at and found right.
	unchecked int
	stop      context.CancelFunc
	done      chan struct{}
}

// registrationOf is an agent's entry, without its key: that is of the link.
func registrationOf(a *wire.Agent) (*registration, error) {
	value, err := a.MarshalMsg(nil)
	if err == nil {
		err = wire.Decode(value, new(wire.Agent)) // a peer must be able to read it
	}
	return &registration{id: core.AgentID(a.ID), name: nameOf(a), engine: a.EngineID, value: value, done: make(chan struct{}), dp: a.DPRank}, err
}

func rankName(engine string, dp, tp, pp int) string {
	return fmt.Sprintf("engine %q, rank dp %d tp %d pp %d", engine, dp, tp, pp)
}

func nameOf(a *wire.Agent) string { return rankName(a.EngineID, a.DPRank, a.TPRank, a.PPRank) }
