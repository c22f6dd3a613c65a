package node

import (
	"context"
	"sync"

	"github.com/kvconn/kvconn/internal/safe"
)

// workQueues hold work that waits, in one queue for each key. Up to width goroutines take work
// from the front of a queue, side by side.
type workQueues[K comparable, T any] struct {
	name  string
	width int // goroutines of one queue
	batch int // elements that a goroutine takes at a time
	limit int // the most elements that wait in one queue: one more drops the oldest; 0: the caller bounds them
	work  func(key K, part []T)
	start func(name string, f func()) // runs f on a goroutine

	mu    sync.Mutex
	byKey map[K]*workQueue[T]
	idle  *sync.Cond // the last queue ended
}

type workQueue[T any] struct {
	waiting []T
	running int
}

func (l *workQueues[K, T]) add(key K, v T) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ln := l.byKey[key]
	if ln == nil {
		ln = &workQueue[T]{}
		if l.byKey == nil {
			l.byKey = map[K]*workQueue[T]{}
		}
		l.byKey[key] = ln
	}
	if l.limit > 0 && len(ln.waiting) >= l.limit {
		ln.waiting = ln.waiting[1:]
	}
	ln.waiting = append(ln.waiting, v)
	if ln.running < l.width {
		ln.running++
		l.start(l.name, func() { l.run(key, ln) })
	}
}

// run works until the queue is empty.
func (l *workQueues[K, T]) run(key K, ln *workQueue[T]) {
	for {
		part := l.next(key, ln)
		if part == nil {
			return
		}
		func() {
			defer safe.Recover(l.name)
			l.work(key, part)
		}()
	}
}

// next takes elements from the front of a queue. If it returns nil, the goroutine that called it must end.
func (l *workQueues[K, T]) next(key K, ln *workQueue[T]) []T {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := min(len(ln.waiting), l.batch); n > 0 {
		part := ln.waiting[:n:n] // add never writes there any more
		ln.waiting = ln.waiting[n:]
		return part
	}
	if ln.running--; ln.running == 0 {
		delete(l.byKey, key)
		if len(l.byKey) == 0 && l.idle != nil {
			l.idle.Broadcast()
		}
	}
	return nil
}

// wait returns when no element waits and no goroutine works, or when ctx ends.
func (l *workQueues[K, T]) wait(ctx context.Context) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.idle == nil {
		l.idle = sync.NewCond(&l.mu)
	}
	defer context.AfterFunc(ctx, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.idle.Broadcast()
	})()
	for len(l.byKey) > 0 && ctx.Err() == nil {
		l.idle.Wait()
	}
}

// limiter bounds how much is done at a time, for all keys together and for each key. If there is no
// place, it refuses at once.
type limiter[K comparable] struct {
	limit, limitEach int

	mu    sync.Mutex
	total int
	byKey map[K]int
}

func (g *limiter[K]) acquire(key K) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.total >= g.limit || g.byKey[key] >= g.limitEach {
		return false
	}
	if g.byKey == nil {
		g.byKey = map[K]int{}
	}
	g.total++
	g.byKey[key]++
	return true
}

func (g *limiter[K]) release(key K) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.total--
	if g.byKey[key]--; g.byKey[key] == 0 {
		delete(g.byKey, key)
	}
}
