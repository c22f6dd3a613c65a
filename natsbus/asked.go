package natsbus

import (
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
)

// asked is a request that was let in.
type asked struct {
	link *link
	from core.AgentID
	m    *nats.Msg
	long bool
	// Of one that waits in longs: when it came, the round in which it is answered, and whether others of its owner waited before it.
	came  time.Time
	round int
	again bool
	// Of a sealed one: its session, nil if it has none here, and what its answer is bound to.
	session *held
	mark    mark
}
