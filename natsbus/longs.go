package natsbus

import (
	"slices"
	"strings"
	"sync"

	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/safe"
)

// A long request (longMessage) may take a processor for 35 ms to be read. So those that come over this agent's own server or cluster
// wait for each other: one is answered at a time, and the short ones of others go on beside it. Those of ranks that join wait apart,
// since their answers wait for the registry. Where a link is to one prefill engine's host, that link waits, see places.
const (
	maxLongs       = 256      // that wait
	maxLongBytes   = 16 << 20 // of all that wait: what one processor reads in about a second
	maxLongBytesOf = 4 << 20  // of one owner; one request may wait however long it is
)

// longs are the long requests that wait. One for which there is no room gets no answer: its asker asks again.
type longs struct {
	mu        sync.Mutex
	queue     []*asked // in the order of their coming
	bytes     int
	of        map[string]int // the bytes that wait, of each owner
	answering bool
}

func newLongs() *longs { return &longs{of: map[string]int{}} }

// put has a request wait, and says how many have lost their place: this one, or others that made room for it. starts: nobody answers
// them at this moment, so the caller does.
func (q *longs) put(v *asked) (dropped int, starts bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	owner, size := ownerOf(v.from), v.m.Size()
	if own := q.of[owner]; own > 0 && own+size > maxLongBytesOf {
		return 1, false
	}
	for len(q.queue) >= maxLongs || len(q.queue) > 0 && q.bytes+size > maxLongBytes {
		greediest := q.greediest()
		if q.of[greediest] <= q.of[owner]+size {
			return dropped + 1, false
		}
		q.dropNewest(greediest)
		dropped++
	}
	q.queue = append(q.queue, v)
	q.add(owner, size)
	starts, q.answering = !q.answering, true
	return dropped, starts
}

// greediest is the owner of which the most bytes wait; q.mu is held.
func (q *longs) greediest() (owner string) {
	for o, n := range q.of {
		if n > q.of[owner] {
			owner = o
		}
	}
	return owner
}

// dropNewest takes an owner's newest request away; q.mu is held.
func (q *longs) dropNewest(owner string) {
	for i, v := range slices.Backward(q.queue) {
		if ownerOf(v.from) == owner {
			q.queue = slices.Delete(q.queue, i, i+1)
			q.add(owner, -v.m.Size())
			return
		}
	}
}

func (q *longs) add(owner string, bytes int) {
	q.bytes += bytes
	if q.of[owner] += bytes; q.of[owner] == 0 {
		delete(q.of, owner)
	}
}

// next is the request to answer; nil if none waits: then the caller answers them no more.
func (q *longs) next() *asked {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.queue) == 0 {
		q.answering, q.queue = false, nil
		return nil
	}
	v := q.queue[0]
	q.queue[0] = nil
	q.queue = q.queue[1:]
	q.add(ownerOf(v.from), -v.m.Size())
	return v
}

// waits says whether a request waits for other long ones.
func (l *link) waits(v *asked) bool {
	return l.kind != portLink && len(v.m.Data) > longMessage && !fault.On("bus-longs-at-once")
}

// longCame takes a long request.
func (b *Bus) longCame(v asked) {
	q := b.longs
	if strings.HasPrefix(v.m.Subject, joinRoot) {
		q = b.longJoins
	}
	dropped, starts := q.put(&v)
	if dropped > 0 && v.link.seals != nil {
		v.link.seals.crowded.Add(int64(dropped))
	}
	if dropped > 0 {
		b.log.Sugar().Debugf("natsbus: no answer over %s to long requests, of %s or of who asks more: too many wait", v.link.name, v.from)
	}
	if starts && !b.spawn("natsbus.longs", func() { b.answerLongs(q) }) {
		b.refuseLongs(q)
	}
}

// answerLongs answers the long requests that wait, one after the other, until there is none.
func (b *Bus) answerLongs(q *longs) {
	for b.ctx.Err() == nil {
		v := q.next()
		if v == nil {
			return
		}
		func() {
			defer safe.Recover("natsbus.longs")
			b.serveOne(v)
		}()
	}
	b.refuseLongs(q)
}

// refuseLongs tells all who wait that this agent is closing.
func (b *Bus) refuseLongs(q *longs) {
	for v := q.next(); v != nil; v = q.next() {
		b.answer(v, refuse("agent %s is closing", v.link.id))
	}
}
