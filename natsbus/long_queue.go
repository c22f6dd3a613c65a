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

// A long request (longMessage) may take a processor for 35 ms to be read, and a hello's regions may take half a second to be compared.
// So those that come over this agent's own server, over its cluster, or over the port that it has joined wait for each other: one is
// answered at a time, and the short ones of others go on beside it. Those of ranks that join this agent wait apart, since their answers
// wait for the registry. Where a link is to one prefill engine's host, that link waits, see places.
const (
	maxLongRequests = 256      // that wait
	maxLongBytes    = 16 << 20 // of all that wait; one request may wait however long it is
)

// longQueue are the long requests that wait. Their owners take turns: each has one answered in a round. What comes is for the next round or
// a later one, so that new owners without an end keep none out; in a round those of whom nothing waited go first. If there is no room,
// the newest of the owner with the most bytes gives way to an owner that has fewer. An owner of whom nothing waits has a place also if
// it would have more, while another has two. A request that gives way gets no answer: to its requester it is lost on the way. If the requester
// heard of it, it would ask again at once, which costs more than the answer does.
//
// A hello that has waited for the timeout is late: by the default connect_timeout_s its requester has given it up, or asked again. Its turn goes to its owner's
// newest request. The other requests are never late, since they are of use though nobody hears the answer.
type longQueue struct {
	mu        sync.Mutex
	queue     []*inboundRequest // in the order in which they are answered
	bytes     int
	of        map[string]waiting // what waits, of each owner
	round     int                // that goes on
	answering bool
	timeout   time.Duration
	owner     func(core.AgentID) string
}

// waiting is how much of an owner waits.
type waiting struct{ requests, bytes int }

func newLongQueue(timeout time.Duration, owner func(core.AgentID) string) *longQueue {
	return &longQueue{of: map[string]waiting{}, timeout: timeout, owner: owner}
}

// put has a request wait, and says how many have lost their place: this one, or others that made room for it. starts: nobody answers
// them at this moment, so the caller does.
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

// evict drops what gives way to an owner's next request, and says how many that are. If all that would give way is not enough, it
// drops none, and ok is false. q.mu is held.
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

// largestOwner is the owner with the most bytes, of those with so many requests, if there is one. Of equals it is the first by name.
func largestOwner(of map[string]waiting, requests int) (owner string, ok bool) {
	for o, s := range of {
		if most := of[owner].bytes; s.requests >= requests && (!ok || s.bytes > most || s.bytes == most && o < owner) {
			owner, ok = o, true
		}
	}
	return owner, ok
}

// newest is the place of an owner's newest request; -1 if it has none.
func (q *longQueue) newest(queue []*inboundRequest, owner string) int {
	for i, v := range slices.Backward(queue) {
		if q.owner(v.from) == owner {
			return i
		}
	}
	return -1
}

// less takes a request away from its owner's, and says how many bytes are left of all.
func (q *longQueue) less(of map[string]waiting, bytes int, v *inboundRequest) (left int) {
	owner, size := q.owner(v.from), v.m.Size()
	had := of[owner]
	if of[owner] = (waiting{had.requests - 1, had.bytes - size}); had.requests == 1 {
		delete(of, owner)
	}
	return bytes - size
}

// next is the request to answer; nil if none waits: then the caller answers them no more.
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

// late says whether nobody waits for a request's answer any more, most likely, and the answer is all that it is for.
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

// unanswered counts those that wait, with the one that is being answered.
func (q *longQueue) unanswered() (n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if n = len(q.queue); q.answering {
		n++
	}
	return n
}
