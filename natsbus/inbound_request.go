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
	// If it waits in a longQueue: when it came, the round in which it is answered, and whether its owner had requests waiting then.
	came  time.Time
	round int
	again bool
	// If it is sealed: its session (nil if this agent has none for it), and the requestTag that its answer is bound to.
	session    *responderSession
	requestTag requestTag
}
