package node

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// Bounds of the outbox.
const (
	maxFinishes = 512     // in one message: they fit into any server's
	maxOutbox   = 1 << 16 // for one peer; it has not answered for long then
	maxReason   = 256     // bytes of a reason on the wire
)

// outbox brings the news of transfers' ends to peers, many in one message: a
// thousand aborts are a few requests, and do not stand before others' loads.
type outbox struct {
	a      *Agent
	mu     sync.Mutex
	byPeer map[core.AgentID][]wire.Finish // a goroutine works on each that is there
	idle   *sync.Cond                     // the last one was emptied
}

func newOutbox(a *Agent) *outbox {
	o := &outbox{a: a, byPeer: map[core.AgentID][]wire.Finish{}}
	o.idle = sync.NewCond(&o.mu)
	return o
}

func (o *outbox) add(v core.SendFinish) {
	f := wire.Finish{TransferID: string(v.ID), Code: int(v.Code), Reason: shorten(v.Reason)}
	o.mu.Lock()
	defer o.mu.Unlock()
	list, working := o.byPeer[v.Peer]
	if len(list) >= maxOutbox {
		list = list[1:] // its lease will tell
	}
	o.byPeer[v.Peer] = append(list, f)
	if !working {
		o.a.goRun("outbox", func() { o.work(v.Peer) })
	}
}

func (o *outbox) work(peer core.AgentID) {
	for {
		o.mu.Lock()
		list := o.byPeer[peer]
		if len(list) == 0 {
			delete(o.byPeer, peer)
			o.idle.Broadcast()
			o.mu.Unlock()
			return
		}
		n := min(len(list), maxFinishes)
		part := slices.Clone(list[:n])
		o.byPeer[peer] = list[n:]
		o.mu.Unlock()
		rep, err := o.a.insist(peer, &wire.Request{Kind: wire.KindFinish, Finishes: part})
		if err == nil && rep.Code != 0 {
			err = errors.New(rep.Reason)
		}
		if err != nil { // the peer learns it by a renewal or a lease
			o.a.log.Debug("the ends of transfers were not delivered", zap.Int("transfers", n), zap.String("peer", string(peer)), zap.Error(err))
		}
	}
}

// wait returns when all is said, or when ctx ends.
func (o *outbox) wait(ctx context.Context) {
	stop := context.AfterFunc(ctx, func() {
		o.mu.Lock()
		o.idle.Broadcast()
		o.mu.Unlock()
	})
	defer stop()
	o.mu.Lock()
	defer o.mu.Unlock()
	for len(o.byPeer) > 0 && ctx.Err() == nil {
		o.idle.Wait()
	}
}

// shorten cuts a reason to what is carried, between characters.
func shorten(s string) string {
	if len(s) <= maxReason {
		return s
	}
	return strings.ToValidUTF8(s[:maxReason], "")
}
