package rdma

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// receiver is D's half: the transfers that D expects, and the Ps that write them.
type receiver struct {
	t *Transport

	mu       sync.Mutex // taken after a source's
	closed   bool
	sources  map[core.AgentID]*source
	expected map[core.TransferID]*expect
	telling  map[core.TransferID]*expect // Received is being called; the id is free again
	arrived  map[gpuSet][]*expect        // by the GPUs that their bytes lie on: transfers that wait for flushes
	awaiting int                         // transfers of which a goroutine is to tell that they have arrived
	most     int                         // transfers at a time
	slots    []slot
	free     []uint16 // the longest free first, so that the generation of a late mark is not in use again yet
	seq      uint64   // of the next grant
}

// slot names a transfer in an immediate.
type slot struct {
	e          *expect
	generation uint8
}

// expect is a transfer that one P may write. Its source guards the fields that change.
type expect struct {
	id       core.TransferID
	src      *source
	grant    grant
	segments int
	gpus     gpuSet // on which some of its blocks lie

	patience time.Time // until when a revoke waits for P
	stripes  uint64    // bit i: stripe i has landed
	begun    time.Time
	ended    bool          // revoked, or its outcome is told
	fenced   chan struct{} // closed when nothing can land any more
	lands    error         // once it is fenced: bytes may land for ever, and so nobody hears of an end
	told     chan struct{} // closed when Received has returned, or never will be called
}

func (r *receiver) init(t *Transport, slots int) {
	r.t = t
	r.sources, r.expected, r.telling = map[core.AgentID]*source{}, map[core.TransferID]*expect{}, map[core.TransferID]*expect{}
	r.arrived = map[gpuSet][]*expect{}
	r.most = slots
	r.slots = make([]slot, min(2*slots, maxSlots))
	r.free = make([]uint16, len(r.slots))
	for i := range r.free {
		r.free[i] = uint16(i)
	}
	r.seq = 1
}

func (r *receiver) source(peer core.AgentID) *source {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sources[peer]
}

// connect makes P make its lanes.
func (r *receiver) connect(peer core.AgentID, ticket []byte) error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return errClosed
	}
	src := r.sources[peer]
	if src == nil {
		src = &source{r: r, peer: peer, lanes: map[uint32]*lane{}, dying: map[uint32]*lane{},
			live: map[uint64]*expect{}, cause: errUnsettled, settled: make(chan struct{})}
		src.newSecret()
		r.sources[peer] = src
	}
	r.mu.Unlock()
	src.mu.Lock()
	defer src.mu.Unlock()
	if !bytes.Equal(src.ticket, ticket) { // P has dismissed this agent since, and numbers its lanes anew
		src.cut()
		src.broken, src.up = nil, nil
	}
	src.ticket = bytes.Clone(ticket)
	src.requestAt, src.backoff, src.owed = time.Time{}, 0, true
	src.requestConnect()
	return nil
}

// newSecret makes a new secret, by which all grants that were given before are void; mu is held, or nobody else knows the source.
func (src *source) newSecret() {
	src.secret = make([]byte, secretSize)
	rand.Read(src.secret)
}

// expect implements core.Transport.
func (r *receiver) expect(id core.TransferID, peer core.AgentID, dst []kv.Segment) ([]byte, error) {
	var total uint64
	for _, s := range dst {
		total += s.Length
	}
	return r.arm(id, peer, total, len(dst), r.t.gpusOf(dst))
}

// arm lets P write so many bytes. P itself says where they land, within the regions whose keys it has.
func (r *receiver) arm(id core.TransferID, peer core.AgentID, total uint64, segments int, gpus gpuSet) ([]byte, error) {
	e := &expect{id: id, segments: segments, gpus: gpus, fenced: make(chan struct{}), told: make(chan struct{})}
	err := r.t.forgotten()
	if e.gpus != 0 {
		err = r.t.checkMemory()
	}
	if err != nil {
		return nil, fmt.Errorf("transfer %q: %w", id.Name(), err)
	}
	src := r.source(peer)
	if src == nil {
		return nil, fmt.Errorf("rdma: transfer %q: agent %s is not connected", id.Name(), peer)
	}
	src.mu.Lock()
	defer src.mu.Unlock()
	e.src = src
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.closed:
		return nil, errClosed
	case src.gone:
		return nil, fmt.Errorf("rdma: transfer %q: agent %s was dismissed", id.Name(), peer)
	case r.expected[id] != nil:
		return nil, fmt.Errorf("rdma: transfer %q is expected already", id.Name())
	case len(r.slots)-len(r.free)+r.awaiting >= r.most:
		return nil, fmt.Errorf("rdma: %d transfers are expected or being revoked already (max_transfers)", r.most)
	}
	n := r.free[0]
	r.free = r.free[1:]
	r.slots[n].e = e
	e.grant = grant{seq: r.seq, bytes: total, slot: n, generation: r.slots[n].generation}
	r.seq++
	r.expected[id] = e
	src.live[e.grant.seq] = e
	src.watch()
	return e.grant.sign(src.secret, id), nil
}

// begin notes that bytes of an expect may have landed; its source's lock is held.
func (e *expect) begin() {
	if e.begun.IsZero() {
		e.begun = time.Now()
	}
}

// take ends an expect. The caller tells its outcome when it is fenced. If the expect
// has ended already, take returns false. Its source's lock is held.
func (r *receiver) take(e *expect) bool {
	if e.ended {
		return false
	}
	e.ended = true
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.expected, e.id)
	r.telling[e.id] = e
	return true
}

// fence is called when no byte of a transfer can land any more.
func (src *source) fence(e *expect) {
	src.mu.Lock()
	defer src.mu.Unlock()
	src.fenced(e)
}

// fenced is fence for callers that hold src.mu.
func (src *source) fenced(e *expect) {
	if src.live[e.grant.seq] == nil {
		return
	}
	delete(src.live, e.grant.seq)
	close(e.fenced)
	r := src.r
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.expected[e.id] == e {
		delete(r.expected, e.id)
	}
	s := &r.slots[e.grant.slot]
	s.e, s.generation = nil, (s.generation+1)%maxGeneration
	r.free = append(r.free, e.grant.slot)
}

// tell tells the outcome of an expect that was taken, unless the agent is closed. If bytes may land at any time, tell tells nothing: only
// Revoke returns that error, now or later.
func (e *expect) tell(err error) {
	r := e.src.r
	if e.lands == nil && errors.Is(err, core.ErrMayLand) {
		e.lands = err
	}
	if e.lands != nil {
		close(e.told)
		return
	}
	st := core.TransferStats{Segments: e.segments}
	if err == nil {
		st.Bytes = e.grant.bytes
	}
	if !e.begun.IsZero() {
		st.Nanos = time.Since(e.begun).Nanoseconds()
	}
	r.t.tell(func(s core.Sink) { s.Received(e.id, st, err) })
	r.mu.Lock()
	if r.telling[e.id] == e {
		delete(r.telling, e.id)
	}
	r.mu.Unlock()
	close(e.told)
}
