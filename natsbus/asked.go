package natsbus

import (
	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
)

// asked is a request that was let in.
type asked struct {
	link *link
	from core.AgentID
	m    *nats.Msg
	long bool
	// In which round of longs it is answered.
	round int
	// Of a sealed one: its session, nil if it has none here, and what its answer is bound to.
	session *held
	mark    mark
}
