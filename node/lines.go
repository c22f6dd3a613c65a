package node

import (
	"context"
	"sync"

	"github.com/kvconn/kvconn/internal/safe"
)

// lines hold work that waits, in a line for each key. As many goroutines as a line
// is wide take work from its front, side by side.
type lines[K comparable, T any] struct {
	name  string
	width int // goroutines of one line
	batch int // elements that a goroutine takes at a time
	most  int // elements that wait in one line; one more drops the oldest. 0: the caller bounds them
	work  func(key K, part []T)
	start func(name string, f func()) // runs f on a goroutine

	mu    sync.Mutex
	byKey map[K]*line[T]
	idle  *sync.Cond // the last line ended
}

type line[T any] struct {
	waiting []T
	running int
}

func (l *lines[K, T]) add(key K, v T) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ln := l.byKey[key]
	if ln == nil {
		ln = &line[T]{}
		if l.byKey == nil {
			l.byKey = map[K]*line[T]{}
		}
		l.byKey[key] = ln
	}
	if l.most > 0 && len(ln.waiting) >= l.most {
		ln.waiting = ln.waiting[1:]
	}
	ln.waiting = append(ln.waiting, v)
	if ln.running < l.width {
		ln.running++
		l.start(l.name, func() { l.run(key, ln) })
	}
}

// run works until the line is empty.
func (l *lines[K, T]) run(key K, ln *line[T]) {
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

// next takes from the front of a line; nil ends the goroutine that called it.
func (l *lines[K, T]) next(key K, ln *line[T]) []T {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := min(len(ln.waiting), l.batch); n > 0 {
		part := ln.waiting[:n:n] // nothing is written there any more
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

// wait returns when nothing waits and nothing is being done, or when ctx ends.
func (l *lines[K, T]) wait(ctx context.Context) {
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

// gate bounds how much is done at a time, of all keys and of one key. If there is no
// place it refuses at once.
type gate[K comparable] struct {
	most, mostEach int

	mu  sync.Mutex
	all int
	of  map[K]int
}

func (g *gate[K]) enter(key K) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.all >= g.most || g.of[key] >= g.mostEach {
		return false
	}
	if g.of == nil {
		g.of = map[K]int{}
	}
	g.all++
	g.of[key]++
	return true
}

func (g *gate[K]) leave(key K) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.all--
	if g.of[key]--; g.of[key] == 0 {
		delete(g.of, key)
	}
}
