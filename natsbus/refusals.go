package natsbus

import (
	"sync/atomic"

	"github.com/kvconn/kvconn/internal/ratelog"
)

// refusals counts the messages over a cluster that this agent has refused, by the reason.
type refusals struct {
	plain     atomic.Int64 // not sealed
	version   atomic.Int64 // a request that is sealed as another release does it
	forged    atomic.Int64 // a signature or tag is wrong
	repeated  atomic.Int64 // the message has come before, or may have
	foreign   atomic.Int64 // its session is another agent's
	unknown   atomic.Int64 // its session is not known here
	queueFull atomic.Int64 // it has no session, or is long, and too many such messages wait
	invalid   atomic.Int64 // it came as a request and is none, or as an answer and is not the agent's

	lines struct{ plain, version ratelog.Limit } // for the log
}

// counts returns how many messages were refused, by the reason.
func (r *refusals) counts() map[string]uint64 {
	counts := map[string]uint64{}
	for reason, n := range map[string]*atomic.Int64{"plain": &r.plain, "version": &r.version, "forged": &r.forged, "repeated": &r.repeated, "foreign": &r.foreign,
		"unknown": &r.unknown, "queue_full": &r.queueFull, "invalid": &r.invalid} {
		counts[reason] = uint64(n.Load())
	}
	return counts
}
