// Long requests wait for each other, so that no short request waits for them.

package natsbus

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/wire"
)

// A processor may need 35 ms to read a long request (longMessage), and half a second to compare the regions of a hello. So long requests
// that come over this agent's own server, over its cluster, or over the port that it has joined wait for each other: the agent answers one
// at a time, and short requests of others beside it. Long requests of ranks that join this agent wait in a queue of their own, since their
// answers wait for the registry. If a link is to one prefill engine's host, only that link waits, see places.
const (
	maxLongRequests = 256      // the most requests that wait
	maxLongBytes    = 16 << 20 // the most bytes of all requests that wait; if only one waits, it may have more
)

// longQueue has the long requests that wait. Their owners take turns: in each round the agent answers one request of each owner. A request
// that comes is for the next round or a later one, so new owners keep nobody out, however many come. Within a round, owners that had no
// request waiting go first. If there is no room, the newest request of the owner with the most bytes gives way to an owner that has fewer
// bytes. If an owner has no request waiting, it gets a place even if it would then have more bytes, as long as another owner has two
// or more. A request that gives way gets no answer: its requester takes it for lost. If the requester got an answer, it would ask again
// at once, which costs more than to answer it.
//
// A hello that has waited for the timeout is late: with the default connect_timeout_s its requester has given it up, or has asked again.
// The turn of a late hello goes to its owner's newest request. Other requests are never late, since they are of use even if nobody hears
// the answer.
type longQueue struct {
	mu        sync.Mutex
	queue     []*inboundRequest // in the order in which they are answered
	bytes     int
	of        map[string]waiting // what waits, by owner
	round     int                // the round that goes on
	answering bool
	timeout   time.Duration
	owner     func(core.AgentID) string
}

// waiting is how much of an owner waits.
type waiting struct{ requests, bytes int }

func newLongQueue(timeout time.Duration, owner func(core.AgentID) string) *longQueue {
	return &longQueue{of: map[string]waiting{}, timeout: timeout, owner: owner}
}

// put queues a request, and says how many requests have lost their place: this one, or others that made room for it. If starts is true,
// nobody answers the queue's requests now, so the caller must.
func (q *longQueue) put(v *inboundRequest) (dropped int, starts bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	v.came = time.Now()
	owner, size := q.owner(v.from), v.m.Size()
	dropped, ok := q.evict(owner, size)
	if !ok {
		return 1, false
	}
	v.round, v.again = q.round+1, false
	if last := q.newest(q.queue, owner); last >= 0 && !fault.On("bus-long-requests-in-order") {
		v.round, v.again = q.queue[last].round+1, true
	}
	at := len(q.queue)
	for at > 0 && v.before(q.queue[at-1]) {
		at--
	}
	q.queue = slices.Insert(q.queue, at, v)
	q.bytes += size
	had := q.of[owner]
	q.of[owner] = waiting{had.requests + 1, had.bytes + size}
	starts, q.answering = !q.answering, true
	return dropped, starts
}

// before says whether a long request is answered before one that came earlier.
func (v *inboundRequest) before(earlier *inboundRequest) bool {
	return v.round < earlier.round || v.round == earlier.round && !v.again && earlier.again
}

// evict drops the requests that give way to an owner's next request, and says how many it has dropped. If this would not make room enough,
// it drops none, and ok is false. q.mu is held.
func (q *longQueue) evict(owner string, size int) (dropped int, ok bool) {
	queue, bytes, of := q.queue, q.bytes, q.of
	for len(queue) >= maxLongRequests || len(queue) > 0 && bytes+size > maxLongBytes {
		victim, _ := largestOwner(of, 1) // somebody waits
		if of[victim].bytes <= of[owner].bytes+size {
			two, has := largestOwner(of, 2)
			if !has || of[owner].requests > 0 {
				return 0, false
			}
			victim = two
		}
		if dropped == 0 {
			queue, of = slices.Clone(queue), maps.Clone(of)
		}
		i := q.newest(queue, victim)
		bytes = q.less(of, bytes, queue[i])
		queue = slices.Delete(queue, i, i+1)
		dropped++
	}
	q.queue, q.bytes, q.of = queue, bytes, of
	return dropped, true
}

// largestOwner is the owner with the most bytes among those that have at least so many requests. If several have as many bytes, it is the
// first by name. ok is false if there is none.
func largestOwner(of map[string]waiting, requests int) (owner string, ok bool) {
	for o, s := range of {
		if most := of[owner].bytes; s.requests >= requests && (!ok || s.bytes > most || s.bytes == most && o < owner) {
			owner, ok = o, true
		}
	}
	return owner, ok
}

// newest is the index of an owner's newest request; -1 if it has none.
func (q *longQueue) newest(queue []*inboundRequest, owner string) int {
	for i, v := range slices.Backward(queue) {
		if q.owner(v.from) == owner {
			return i
		}
	}
	return -1
}

// less takes a request out of its owner's counts, and returns how many bytes all the others have.
func (q *longQueue) less(of map[string]waiting, bytes int, v *inboundRequest) (left int) {
	owner, size := q.owner(v.from), v.m.Size()
	had := of[owner]
	if of[owner] = (waiting{had.requests - 1, had.bytes - size}); had.requests == 1 {
		delete(of, owner)
	}
	return bytes - size
}

// next is the request to answer. If none waits, v is nil, and the caller stops answering.
func (q *longQueue) next() (v *inboundRequest, late bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.queue) == 0 {
		q.answering, q.queue = false, nil
		return nil, false
	}
	v = q.queue[0]
	q.queue[0] = nil
	q.queue = q.queue[1:]
	q.round = v.round
	q.bytes = q.less(q.of, q.bytes, v)
	if !q.late(v) {
		return v, false
	}
	if i := q.newest(q.queue, q.owner(v.from)); i >= 0 && !q.late(q.queue[i]) {
		turn := q.queue[i]
		turn.round, turn.again = v.round, v.again
		copy(q.queue[1:], q.queue[:i])
		q.queue[0] = turn
	}
	return v, true
}

// late says whether a request is only of use to somebody who waits for its answer, and most likely nobody waits any more.
func (q *longQueue) late(v *inboundRequest) bool {
	return time.Since(v.came) > q.timeout && isHello(v.m.Data) && !fault.On("bus-long-requests-never-late")
}

// isHello says whether a request is a hello, without reading all of it. kvconn writes the kind first.
func isHello(request []byte) bool {
	var kind wire.Kind
	_, rest, err := msgp.ReadMapHeaderBytes(request)
	if err == nil {
		var key []byte
		if key, rest, err = msgp.ReadMapKeyZC(rest); string(key) != "k" {
			return false
		}
	}
	if err == nil {
		_, err = kind.UnmarshalMsg(rest)
	}
	return err == nil && kind == wire.KindHello
}

// unanswered counts the requests that wait, and the one that is being answered.
func (q *longQueue) unanswered() (n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if n = len(q.queue); q.answering {
		n++
	}
	return n
}
