package natsbus

import (
	"sync/atomic"

	"github.com/kvconn/kvconn/internal/ratelog"
)

// refusals are the messages over a cluster that were not taken, by the reason.
type refusals struct {
	plain    atomic.Int64 // not sealed
	version  atomic.Int64 // a request that is sealed as another release does it
	forged   atomic.Int64 // a signature or tag is wrong
	repeated atomic.Int64 // it has come before, or may have
	foreign  atomic.Int64 // its session is another agent's
	unknown  atomic.Int64 // its session is not known here
	crowded  atomic.Int64 // an open, of which too many wait
	strange  atomic.Int64 // it came as a request and is none, or as an answer and is not the agent's

	lines struct{ plain, version ratelog.Limit } // for the log
}

// Refused counts the messages over a NATS cluster that were not taken, by the reason. It is nil without a cluster.
func (b *Bus) Refused() map[string]uint64 {
	s := b.seals
	if s == nil {
		return nil
	}
	counts := map[string]uint64{}
	for reason, n := range map[string]*atomic.Int64{"plain": &s.plain, "version": &s.version, "forged": &s.forged, "repeated": &s.repeated, "foreign": &s.foreign,
		"unknown": &s.unknown, "crowded": &s.crowded, "strange": &s.strange} {
		counts[reason] = uint64(n.Load())
	}
	return counts
}

// warnPlain says who, by its own word, does not seal, and what to do.
func (b *Bus) warnPlain(v *asked) {
	v.link.seals.lines.plain.Do(func(note string) {
		b.log.Sugar().Warnf("natsbus: a message in the name of agent %s came over %s without a seal, and was refused: give all engines of one NATS cluster the same release of kvconn%s", v.from, v.link.name, note)
	})
}

// warnVersion says who, by its own word, seals otherwise. It gets no answer: no release knows how another reads one.
func (b *Bus) warnVersion(v *asked, version byte) {
	v.link.seals.lines.version.Do(func(note string) {
		b.log.Sugar().Warnf("natsbus: a message in the name of agent %s came over %s with a seal of version %d, and this agent knows version %d only: give all engines of one NATS cluster the same release of kvconn%s", v.from, v.link.name, version, sealVersion, note)
	})
}
