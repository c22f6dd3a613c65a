// What the machine says to peers waits in queues, in which no peer waits for another.

package node

import (
	"context"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// Bounds of a peerQueue.
const (
	maxLoadsEach    = 16      // loads to one peer that are under way at a time
	maxFinishes     = 512     // ends in one message: they fit into a message of any server
	maxFinishesEach = 1 << 16 // ends that wait for one peer; if so many do, the peer has not answered for long
	// maxRevokes is how many revokes wait at a time. If a peer does not answer, a
	// revoke takes a second or two, and these times must not add up.
	maxRevokes = 1024
)

// peerQueue sends peers the messages that the machine wants sent. A message may wait for the
// network, but never for another peer:
//
//   - Loads to one peer go in order, a few side by side. A transfer has one at most. Each
//     wait is bounded, and is short once the peer is lost.
//   - Ends of transfers go many in one message: a thousand aborts are a few
//     requests, and hold up no loads.
//   - Renewals and probes wait for no other message, since D learns by a renewal that its
//     loads get no answer. The machine has one under way for each peer.
//   - Revokes run side by side, since one may wait for its peer's word. The machine
//     has one under way for each id, and does nothing else with the id until it is
//     told Revoked. max_transfers bounds them.
type peerQueue struct {
	sender   *messageSender
	start    func(name string, f func())
	loads    workQueues[core.AgentID, core.SendLoad]
	finishes workQueues[core.AgentID, wire.Finish]
	revokes  workQueues[struct{}, core.TransferID]
}

// newPeerQueue's start runs a function on a goroutine; revoke fences a transfer and
// may wait for a peer.
func newPeerQueue(say *messageSender, revoke func(core.TransferID), start func(name string, f func())) *peerQueue {
	return &peerQueue{
		sender: say, start: start,
		loads: workQueues[core.AgentID, core.SendLoad]{name: "load", width: maxLoadsEach, batch: 1, start: start,
			work: func(_ core.AgentID, v []core.SendLoad) { say.load(v[0]) }},
		finishes: workQueues[core.AgentID, wire.Finish]{name: "finish", width: 1, batch: maxFinishes, limit: maxFinishesEach, start: start,
			work: say.finish},
		revokes: workQueues[struct{}, core.TransferID]{name: "revoke", width: maxRevokes, batch: 1, start: start,
			work: func(_ struct{}, id []core.TransferID) { revoke(id[0]) }},
	}
}

func (q *peerQueue) load(v core.SendLoad) { q.loads.add(v.Peer, v) }

func (q *peerQueue) renew(v core.SendRenew) { q.start("renew", func() { q.sender.renew(v) }) }

func (q *peerQueue) probe(v core.SendProbe) { q.start("probe", func() { q.sender.probe(v) }) }

// finish drops the oldest end if too many wait: the peer learns that end by its lease.
func (q *peerQueue) finish(peer core.AgentID, end wire.Finish) { q.finishes.add(peer, end) }

func (q *peerQueue) revoke(id core.TransferID) { q.revokes.add(struct{}{}, id) }

// wait returns when all loads and ends are sent, or when ctx ends.
func (q *peerQueue) wait(ctx context.Context) {
	q.loads.wait(ctx)
	q.finishes.wait(ctx)
}
