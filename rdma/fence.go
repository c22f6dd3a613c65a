// D fences a transfer: P says that no byte of it is on its way, or D cuts the lanes by which P could write.

package rdma

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	defect "github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/safe"
)

// drainBound is how long after a revoke P may take to say that no byte of the transfer is
// on its way. Then D cuts P's lanes. That takes flushBound at most, or, if the device
// does not give back what was posted, as long as the kernel needs to destroy a queue pair.
const drainBound = time.Second

// leastAsk is the least time for one signal: the signals before may have taken all of
// drainBound.
const leastAsk = drainBound / 10

// maxDrain bounds the transfers that one signal names.
const maxDrain = 4096

// revoke implements core.Transport. When it returns nil, P has said that it has stopped, or no
// lane is left by which P could write.
func (r *receiver) revoke(id core.TransferID) (err error) {
	r.mu.Lock()
	e, told := r.expected[id], r.telling[id]
	r.mu.Unlock()
	if e != nil {
		e.src.revoke(e)
		<-e.fenced
	}
	if told != nil && !defect.On("rdma-revoke-untold") {
		<-told.told
		err = told.lands
	}
	if e != nil {
		r.mu.Lock()
		told = r.telling[id] // the expect was taken before the revoke
		r.mu.Unlock()
		if told == e {
			<-told.told
		}
		if err = cmp.Or(err, e.lands); err == nil {
			err = r.t.flushEnded(e.gpus)
		}
	}
	if err != nil {
		return fmt.Errorf("rdma: transfer %q is revoked, but %w", id.Name(), err)
	}
	return nil
}

// revoke begins to fence an expect.
func (src *source) revoke(e *expect) {
	src.mu.Lock()
	defer src.mu.Unlock()
	if e.ended {
		return // its outcome is about to be told
	}
	e.ended, e.patience = true, time.Now().Add(drainBound)
	if len(src.lanes) == 0 && len(src.dying) == 0 {
		src.fenced(e) // P hears of the revoke with the next lane that it opens
		return
	}
	src.draining = append(src.draining, e)
	if !src.drains {
		src.drains = src.r.t.goRun("rdma drain", src.drain)
		if !src.drains { // the transport closes, and Close cuts all lanes
			src.draining = nil
		}
	}
}

// drain tells P which grants were revoked, many at a time.
func (src *source) drain() {
	for {
		src.mu.Lock()
		list := src.draining[:min(len(src.draining), maxDrain)]
		src.draining = src.draining[len(list):]
		if len(list) == 0 {
			src.draining, src.drains = nil, false
			src.mu.Unlock()
			return
		}
		s := &signal{Kind: signalDrain, Ticket: src.ticket, Below: src.below()}
		if len(src.lanes) == 0 && len(src.dying) == 0 { // the lanes were cut since
			for _, e := range list {
				src.fenced(e)
			}
			src.mu.Unlock()
			continue
		}
		src.mu.Unlock()
		for _, e := range list {
			s.Seqs = append(s.Seqs, e.grant.seq)
		}
		rep, err := src.r.t.ask(src.peer, s, max(time.Until(list[0].patience), leastAsk)) // the first has waited longest
		if err != nil {
			src.r.t.log.Warn("rdma: a peer does not say that it has stopped writing; its lanes are cut", zap.String("peer", string(src.peer)), zap.Error(err))
			src.cutOff(list)
			continue
		}
		pending := map[uint64]bool{}
		for _, seq := range rep.Pending {
			pending[seq] = true
		}
		var wait []*expect
		for _, e := range list {
			if pending[e.grant.seq] {
				wait = append(wait, e)
			} else {
				src.fence(e)
			}
		}
		if len(wait) > 0 && !src.r.t.goRun("rdma drain", func() { src.await(wait) }) {
			src.cutOff(wait)
		}
	}
}

// await gives P its time to end what was on its way.
func (src *source) await(list []*expect) {
	late := time.NewTimer(time.Until(list[0].patience))
	defer late.Stop()
	for _, e := range list {
		select {
		case <-e.fenced:
		case <-late.C:
			src.r.t.log.Warn("rdma: a peer has not ended its writes; its lanes are cut", zap.String("peer", string(src.peer)))
			src.cutOff(list)
			return
		case <-src.r.t.ctx.Done():
			src.cutOff(list) // Close cuts no lanes of a source that was dismissed
			return
		}
	}
}

// cutOff fences transfers without P's help. Transfers that were not revoked go on when P
// has connected again.
func (src *source) cutOff(list []*expect) {
	src.mu.Lock()
	dying := src.cut()
	if len(src.broken) > 0 {
		src.requestConnect()
	}
	src.mu.Unlock()
	await(dying)
	for _, e := range list {
		src.fence(e)
	}
}

// below is the least number of a grant that is alive; src.mu is held.
func (src *source) below() uint64 {
	src.r.mu.Lock()
	least := src.r.seq
	src.r.mu.Unlock()
	for seq, e := range src.live {
		if !e.ended {
			least = min(least, seq)
		}
	}
	return least
}

// dismiss forgets a P.
func (r *receiver) dismiss(peer core.AgentID) {
	r.mu.Lock()
	src := r.sources[peer]
	delete(r.sources, peer)
	r.mu.Unlock()
	if src != nil {
		src.leave("this decode agent has dismissed it")
		src.disconnectAll(errDismissed) // also those that have not begun, since P will never come back
	}
}

// leave tells a P that it may not write any more. From now on P can make no lane to this agent.
func (src *source) leave(why string) {
	src.mu.Lock()
	defer src.mu.Unlock()
	src.owed, src.gone = false, true
	if src.watching != nil {
		src.watching.Stop()
	}
	src.r.t.sayBye(src.peer, &signal{Kind: signalBye, Ticket: src.ticket, Secret: src.secret, Reason: why})
}

// close ends everything. When it returns nil, no byte can land. The kernel may take long to destroy the lanes of a source. So no source
// waits for another one's lanes: meanwhile the transfers of the others are fenced.
func (r *receiver) close() error {
	r.mu.Lock()
	r.closed = true
	all := slices.Collect(maps.Values(r.sources))
	r.mu.Unlock()
	for _, src := range all {
		src.leave("it was closed")
	}
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, src := range all {
		wg.Add(1)
		safe.Go("rdma close", func() {
			defer wg.Done()
			panicked, err := safe.Try("rdma close", func() error {
				src.close()
				return nil
			})
			if panicked {
				errs[i] = fmt.Errorf("rdma: prefill agent %s: %w: %w", src.peer, core.ErrMayLand, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// close ends the lanes and transfers of a P.
func (src *source) close() {
	src.mu.Lock()
	dying := src.cut()
	src.mu.Unlock()
	await(dying)
	src.mu.Lock()
	list := slices.Collect(maps.Values(src.live)) // none comes any more
	src.mu.Unlock()
	byGPUs(list, func(gpus gpuSet, list []*expect) {
		unflushed := src.r.t.flushEnded(gpus)
		src.mu.Lock()
		defer src.mu.Unlock()
		for _, e := range list {
			src.end(e, unflushed)
		}
	})
}

// end ends a transfer since the transport is closed; src.mu is held.
func (src *source) end(e *expect, unflushed error) {
	if src.live[e.grant.seq] == nil {
		return // somebody else has fenced it meanwhile
	}
	if unflushed != nil {
		e.lands = unflushed
	}
	if !e.ended {
		e.ended = true
		if e.lands != nil {
			src.r.keepFailure(e)
		}
		close(e.told)
	}
	src.fenced(e)
}

// keepFailure remembers, for a later Revoke, that bytes of a transfer may land at any time.
func (r *receiver) keepFailure(e *expect) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.telling[e.id] = e
}
