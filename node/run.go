// Two goroutines perform the machine's actions: one begins and stops the use of blocks by a transport, one does the
// rest.

package node

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// run performs those of the machine's actions that are not of core.OfMemory, in their order, and tells
// the machine the time while the machine waits for something. No such action may wait for a driver, since
// renewals are among them.
func run(ctx context.Context, h *lockedMachine, perform func(core.Action)) {
	var (
		stopTicker func()
		ticked     atomic.Bool
	)
	defer func() {
		if stopTicker != nil {
			stopTicker()
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return
		case <-h.control.wake:
		}
		list, busy := h.take(&h.control)
		for _, act := range list {
			perform(act)
		}
		h.performed(&h.control)
		switch {
		case busy && stopTicker == nil:
			stopTicker = h.clock.NewTicker(core.TickInterval, func(time.Time) { ticked.Store(true); h.Tick() })
		case !busy && stopTicker != nil && ticked.Swap(false): // short transfers share a ticker
			stopTicker()
			stopTicker = nil
		}
	}
}

// runMemory performs the actions of core.OfMemory in their order. Before a transport begins to use memory of a device, the driver
// is asked if it is what was registered, and the driver may take its time, as while an engine allocates.
func runMemory(ctx context.Context, h *lockedMachine, perform func([]core.Action)) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-h.memory.wake:
		}
		list, _ := h.take(&h.memory)
		perform(list)
		h.performed(&h.memory)
	}
}

// performer does the machine's actions. An action that may wait for the network goes
// to the peer queue, or to a goroutine of its own.
type performer struct {
	log        *zap.Logger
	finder     *finder
	peers      *peerTable
	transports *transports
	queue      *peerQueue
	machine    *lockedMachine
	partial    func(bytes uint64) // counts bytes that a transport gets while the engine still computes
}

func (p *performer) perform(act core.Action) {
	switch v := act.(type) {
	case core.Resolve:
		p.finder.resolve(v)
	case core.SendLoad:
		p.queue.load(v)
	case core.SendRenew:
		p.queue.renew(v)
	case core.SendProbe:
		p.queue.probe(v)
	case core.SendFinish:
		p.queue.finish(v.Peer, wire.Finish{TransferID: string(v.ID), Code: int(v.Code), Reason: shorten(v.Reason)})
	case core.SendRestart:
		p.queue.finish(v.Peer, wire.Finish{TransferID: string(v.ID), Restart: v.Digest})
	case core.Forget:
		if v.Gone {
			p.peers.markGone(v.Peer)
		} else {
			p.peers.suspect(v.Peer)
		}
	case core.Yield:
		p.machine.tell(core.Resume{})
	case core.Await:
		p.transports.devices.Await(v.Moment, func(err error) { p.awaited(v.Moment, err) })
	default:
		p.log.Error("unknown action", zap.String("type", fmt.Sprintf("%T", act)))
	}
}

// maxPerCheck is for how many actions at most one check of the memory is made.
const maxPerCheck = 64

// performOfMemory does actions of core.OfMemory.
func (p *performer) performOfMemory(list []core.Action) {
	for some := range slices.Chunk(list, maxPerCheck) {
		l := p.transports.newMemoryCheck()
		for _, act := range some {
			switch v := act.(type) {
			case core.Expect:
				grant, err := p.expect(v, l)
				p.machine.tell(core.Expecting{ID: v.ID, Grant: grant, Err: err})
			case core.Revoke:
				p.queue.revoke(v.ID)
			case core.Write:
				p.write(v, l)
			case core.StopWrite:
				p.transports.Stop(v.ID)
			}
		}
	}
}

// awaited tells that a moment has passed, or why nobody will know.
func (p *performer) awaited(at core.Moment, err error) {
	if err != nil {
		p.machine.tell(core.MomentFailed{Moment: at, Err: err})
		return
	}
	p.machine.tell(core.MomentPassed{Moment: at})
}

func (p *performer) expect(v core.Expect, l *memoryCheck) (grant []byte, err error) {
	from := p.peers.get(v.Peer)
	if from == nil || from.in == nil {
		return nil, fmt.Errorf("prefill agent %s is not known any more", v.Peer)
	}
	to, err := newReceivePlan(from.in.match, v.Selection)
	if err != nil {
		return nil, fmt.Errorf("the load from prefill agent %s cannot be planned: %w", v.Peer, err)
	}
	return p.transports.Expect(v.ID, v.Peer, to, l)
}

// write performs a Write: of all blocks, of the first ones, or of further blocks of a write that has begun.
func (p *performer) write(v core.Write, l *memoryCheck) {
	fail := func(err error) {
		if v.Extends { // the transport tells Written, when it reads the blocks no more
			p.log.Error("a transfer cannot go on", zap.String("transfer_id", string(v.ID)), zap.Error(err))
			p.transports.Stop(v.ID)
			return
		}
		p.machine.tell(core.Written{ID: v.ID, Err: err})
	}
	if p.peers.get(v.Peer) == nil {
		fail(fmt.Errorf("decode agent %s is not known any more", v.Peer))
		return
	}
	op := core.WriteOp{ID: v.ID, Peer: v.Peer, Grant: v.Grant}
	err := p.transports.plan(&op, &v)
	if v.End != nil && err == nil {
		p.partial(op.Payload())
	}
	switch {
	case err != nil:
		fail(err)
	case !v.Extends:
		p.transports.Write(op, l)
	case op.Payload() > 0:
		p.transports.Extend(op, l)
	}
}
