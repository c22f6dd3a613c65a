package rdma

import (
	"fmt"

	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// sendQueue counts the requests that one lane has posted and those that its signalled
// completions have freed. A queue pair completes in order, so one completion frees all
// requests before it. H is the owner of requests. A sendQueue is for one goroutine at a
// time, and allocates only when it is made.
//
// It cannot stall as long as requests are posted whenever there is room: either a
// signalled request is under way, or there is room for requests and bytes.
type sendQueue[H any] struct {
	depth    int    // most requests under way
	maxBytes uint64 // no write begins when so many are under way
	every    int    // at most so many requests from one signal to the next

	requests  int // under way
	bytes     uint64
	signals   int        // signalled ones among them
	next      uint64     // ID of the next request; from 1, so that there is one before each
	plain     int        // requests since the last signalled one
	plainSize uint64     // their bytes
	ring      []batch[H] // each holds a request at least, so depth of them are enough
	head, n   int
	signalled uint64 // ever
}

// batch is what one completion frees of one owner's requests.
type batch[H any] struct {
	Owner    H
	Requests int
	Bytes    uint64
	End      bool // the owner's last, for now

	last     uint64 // ID of its last request
	signaled bool
}

// newSendQueue makes a sendQueue for a queue pair with depth send requests. every is
// bounded by half of depth.
func newSendQueue[H any](depth int, maxBytes uint64, every int) *sendQueue[H] {
	depth = max(depth, 1)
	return &sendQueue[H]{
		depth:    depth,
		maxBytes: max(maxBytes, 1),
		every:    min(max(every, 1), max(depth/2, 1)),
		next:     1,
		ring:     make([]batch[H], depth),
	}
}

// room is how much may be posted now. The last write may exceed bytes.
func (q *sendQueue[H]) room() (requests int, bytes uint64) {
	return q.depth - q.requests, q.maxBytes - min(q.bytes, q.maxBytes)
}

// idle says whether nothing is under way.
func (q *sendQueue[H]) idle() bool { return q.requests == 0 }

// last is the ID of the request that was posted last; 0 before the first.
func (q *sendQueue[H]) last() uint64 { return q.next - 1 }

// posting takes the credits of the chain that is posted next; there must be room for it. It sets the
// ID of each write, and whether the write is signalled. Each every-th write is signalled, and a write
// after which half of the queue's bytes wait for a signal. If end is true, the owner has no more to post
// now, and the chain's last write is signalled. If no signalled request is under way, it is signalled too.
func (q *sendQueue[H]) posting(owner H, writes []verbs.Write, pieces []verbs.SGE, end bool) {
	if len(writes) > q.depth-q.requests {
		panic(fmt.Sprintf("rdma: %d requests are posted with %d of %d under way", len(writes), q.requests, q.depth))
	}
	b := batch[H]{Owner: owner}
	for i := range writes {
		w := &writes[i]
		size := uint64(0)
		for _, p := range pieces[w.First:][:w.Pieces] {
			size += uint64(p.Length)
		}
		w.ID = q.next
		q.next++
		b.Requests++
		b.Bytes += size
		q.plain++
		q.plainSize += size
		last := i == len(writes)-1
		b.End = last && end
		if b.End || q.plain >= q.every || q.plainSize >= (q.maxBytes+1)/2 || last && q.signals == 0 {
			w.Flags |= verbs.Signaled
			q.plain, q.plainSize = 0, 0
			q.signals++
			q.signalled++
			b.signaled = true
		}
		if b.signaled || last {
			b.last = w.ID
			q.ring[(q.head+q.n)%len(q.ring)] = b
			q.n++
			q.requests += b.Requests
			q.bytes += b.Bytes
			b = batch[H]{Owner: owner}
		}
	}
}

// completed returns, when the request with that ID is done, the batches that are then done.
// Each call returns one of them, the oldest first, and false if none is left. If the request
// has failed, completed returns the batches before its ID, and flush the others.
func (q *sendQueue[H]) completed(id uint64) (b batch[H], ok bool) {
	if q.n == 0 || q.ring[q.head].last > id || id >= q.next {
		return b, false
	}
	return q.flush()
}

// owner returns the owner of the request with that ID, if it is under way.
func (q *sendQueue[H]) owner(id uint64) (h H, ok bool) {
	for i := range q.n {
		if b := &q.ring[(q.head+i)%len(q.ring)]; b.last >= id {
			return b.Owner, b.last-uint64(b.Requests) < id
		}
	}
	return h, false
}

// flush returns the batches that are under way on a queue pair that is gone. Each call
// returns one of them, the oldest first, and false if none is left.
func (q *sendQueue[H]) flush() (b batch[H], ok bool) {
	if q.n == 0 {
		return b, false
	}
	b = q.ring[q.head]
	q.ring[q.head] = batch[H]{}
	q.head = (q.head + 1) % len(q.ring)
	q.n--
	q.requests -= b.Requests
	q.bytes -= b.Bytes
	if b.signaled {
		q.signals--
	}
	return b, true
}
