package natsbus

import (
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
)

// inboundRequest is a request that was let in.
type inboundRequest struct {
	link *link
	from core.AgentID
	m    *nats.Msg
	long bool
	// Of one that waits in a longQueue: when it came, the round in which it is answered, and whether others of its owner waited before it.
	came  time.Time
	round int
	again bool
	// Of a sealed one: its session, nil if it has none here, and what its answer is bound to.
	session *responderSession
	mark    mark
}
