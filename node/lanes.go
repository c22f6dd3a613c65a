package node

import (
	"context"
	"sync"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/safe"
)

// laneWidth is how many requests to one peer are under way at a time.
const laneWidth = 16

// lanes run what waits for peers, each peer apart. A transfer has at most a load
// and a finish waiting; each wait is bounded, and short once a peer is lost.
type lanes struct {
	a    *Agent
	mu   sync.Mutex
	byID map[core.AgentID]*lane
	idle *sync.Cond // the last lane ended
}

type lane struct {
	queue   []func()
	running int
}

func newLanes(a *Agent) *lanes {
	l := &lanes{a: a, byID: map[core.AgentID]*lane{}}
	l.idle = sync.NewCond(&l.mu)
	return l
}

func (l *lanes) do(peer core.AgentID, f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ln := l.byID[peer]
	if ln == nil {
		ln = &lane{}
		l.byID[peer] = ln
	}
	ln.queue = append(ln.queue, f)
	if ln.running < laneWidth {
		ln.running++
		l.a.goRun("lane", func() { l.work(peer, ln) })
	}
}

func (l *lanes) work(peer core.AgentID, ln *lane) {
	for {
		l.mu.Lock()
		if len(ln.queue) == 0 {
			if ln.running--; ln.running == 0 {
				delete(l.byID, peer)
				if len(l.byID) == 0 {
					l.idle.Broadcast()
				}
			}
			l.mu.Unlock()
			return
		}
		f := ln.queue[0]
		ln.queue = ln.queue[1:]
		l.mu.Unlock()
		func() {
			defer safe.Recover("lane")
			f()
		}()
	}
}

// wait returns when no lane works, or when ctx ends.
func (l *lanes) wait(ctx context.Context) {
	stop := context.AfterFunc(ctx, func() {
		l.mu.Lock()
		l.idle.Broadcast()
		l.mu.Unlock()
	})
	defer stop()
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.byID) > 0 && ctx.Err() == nil {
		l.idle.Wait()
	}
}
