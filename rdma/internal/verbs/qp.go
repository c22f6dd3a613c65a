// A queue pair: the states that it is brought into, its route to the peer, and what is posted to it.

package verbs

/*
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"sync"
	"syscall"
	"unsafe"
)

// Caps are the sizes of a queue pair.
type Caps struct {
	SendDepth    int // writes that may be posted and not completed; also the longest chain of one Post
	ReceiveDepth int // receives that may be posted and not used up
	Pieces       int // of one write
}

// QP is a reliable connected queue pair. Its sends and receives complete in one
// completion queue. Only requests that ask for it are signalled.
type QP struct {
	dev    *Device
	cq     *CQ
	caps   Caps
	number uint32
	mu     sync.Mutex // Post builds its chain in memory of the queue pair
	c      *C.struct_vb_qp
}

// NewQP makes a queue pair in the reset state.
func NewQP(pd *PD, cq *CQ, caps Caps) (*QP, error) {
	d := pd.dev
	switch a := d.attr; {
	case cq.dev != d:
		return nil, fmt.Errorf("queue pair on RDMA device %s with a completion queue of %s: %w", d.info.Name, cq.dev.info.Name, syscall.EINVAL)
	case caps.SendDepth < 1 || caps.SendDepth > a.MaxQPWR || caps.ReceiveDepth < 0 || caps.ReceiveDepth > a.MaxQPWR:
		return nil, fmt.Errorf("queue pair with %d writes and %d receives on RDMA device %s: it has at most %d each: %w",
			caps.SendDepth, caps.ReceiveDepth, d.info.Name, a.MaxQPWR, syscall.EINVAL)
	case caps.Pieces < 1 || caps.Pieces > a.MaxSGE:
		return nil, fmt.Errorf("queue pair with %d pieces for each write on RDMA device %s: it has 1 to %d: %w",
			caps.Pieces, d.info.Name, a.MaxSGE, syscall.EINVAL)
	}
	q := &QP{dev: d, cq: cq, caps: caps}
	c := C.struct_vb_caps{send_depth: C.uint32_t(caps.SendDepth), receive_depth: C.uint32_t(caps.ReceiveDepth), pieces: C.uint32_t(caps.Pieces)}
	err := pd.use(func() error {
		cq.mu.Lock()
		defer cq.mu.Unlock()
		if cq.gone {
			return cq.closed()
		}
		var err error
		if q.c, err = C.vb_create_qp(pd.c, cq.c, &c); q.c == nil {
			return fmt.Errorf("make a queue pair (%d writes of %d pieces, %d receives) on RDMA device %s, which has at most %d: %w",
				caps.SendDepth, caps.Pieces, caps.ReceiveDepth, d.info.Name, d.attr.MaxQP, cause(err))
		}
		d.qps.Add(1)
		return nil
	})
	if err != nil {
		return nil, err
	}
	q.number = uint32(C.vb_qp_number(q.c))
	q.caps.Pieces, q.caps.ReceiveDepth = int(c.pieces), int(c.receive_depth)
	return q, nil
}

// Number is what the peer calls the queue pair.
func (q *QP) Number() uint32 { return q.number }

// State of a queue pair: enum ibv_qp_state.
type State int

// The states.
const (
	Reset State = iota
	Initialized
	ReadyToReceive
	ReadyToSend
	SendDrained
	SendError
	Failed
)

func (s State) String() string {
	names := [...]string{"reset", "initialized", "ready to receive", "ready to send", "send queue drained", "send queue error", "error"}
	if s < 0 || int(s) >= len(names) {
		return fmt.Sprintf("state %d", int(s))
	}
	return names[s]
}

// Route is how a queue pair reaches its peer. Init needs Port, PKeyIndex and
// RemoteWrite; ReadyToReceive all of the route; ReadyToSend the last group.
type Route struct {
	Port        int
	PKeyIndex   int
	RemoteWrite bool // the peer may write to memory that was registered with RemoteWrite

	RemoteQP       uint32
	RemotePSN      uint32   // the peer's LocalPSN
	MTU            int      // bytes; rounded down to 256, 512 … 4096
	Global         bool     // by RemoteGID: always in RoCE, between subnets in InfiniBand
	RemoteGID      [16]byte // with Global
	SourceGIDIndex int      // with Global
	HopLimit       int      // with Global
	TrafficClass   int      // with Global
	RemoteLID      uint16   // of InfiniBand
	ServiceLevel   int
	MinRNRTimer    int // how long the peer shall wait when no receive is posted: 1 is 0.01 ms, 12 is 0.64 ms, 31 is 491 ms, 0 is 655 ms

	LocalPSN uint32
	Timeout  int // of one try, 4.096 µs << Timeout; 0: for ever
	Retry    int // tries again after a timeout: 0 to 7
	RNRRetry int // tries again when the peer has no receive; 7: for ever
}

// check gives the first field that is out of its range.
func (p *Route) check() error {
	for _, f := range []struct {
		name     string
		is       int
		from, to int
	}{
		{"Port", p.Port, 1, 255},
		{"PKeyIndex", p.PKeyIndex, 0, 65535},
		{"RemoteQP", int(p.RemoteQP), 0, 1<<24 - 1},
		{"RemotePSN", int(p.RemotePSN), 0, 1<<24 - 1},
		{"LocalPSN", int(p.LocalPSN), 0, 1<<24 - 1},
		{"SourceGIDIndex", p.SourceGIDIndex, 0, 255},
		{"HopLimit", p.HopLimit, 0, 255},
		{"TrafficClass", p.TrafficClass, 0, 255},
		{"ServiceLevel", p.ServiceLevel, 0, 15},
		{"MinRNRTimer", p.MinRNRTimer, 0, 31},
		{"Timeout", p.Timeout, 0, 31},
		{"Retry", p.Retry, 0, 7},
		{"RNRRetry", p.RNRRetry, 0, 7},
	} {
		if f.is < f.from || f.is > f.to {
			return fmt.Errorf("%s is %d, it can be %d to %d: %w", f.name, f.is, f.from, f.to, syscall.EINVAL)
		}
	}
	return nil
}

func (p *Route) twin() C.struct_vb_route {
	c := C.struct_vb_route{
		port: C.uint8_t(p.Port), sl: C.uint8_t(p.ServiceLevel), traffic_class: C.uint8_t(p.TrafficClass),
		hop_limit: C.uint8_t(p.HopLimit), sgid_index: C.uint8_t(p.SourceGIDIndex),
		mtu: C.uint8_t(mtuCode(p.MTU)), min_rnr_timer: C.uint8_t(p.MinRNRTimer), timeout: C.uint8_t(p.Timeout),
		retry: C.uint8_t(p.Retry), rnr_retry: C.uint8_t(p.RNRRetry), pkey_index: C.uint16_t(p.PKeyIndex),
		dlid: C.uint16_t(p.RemoteLID), dest_qp: C.uint32_t(p.RemoteQP),
		rq_psn: C.uint32_t(p.RemotePSN), sq_psn: C.uint32_t(p.LocalPSN),
		dgid: *(*[16]C.uint8_t)(unsafe.Pointer(&p.RemoteGID)),
	}
	if p.Global {
		c.global = 1
	}
	if p.RemoteWrite {
		c.remote_write = 1
	}
	return c
}

// modify brings the queue pair into a state.
func (q *QP) modify(to State, p *Route) error {
	if err := p.check(); err != nil && to != Reset && to != Failed {
		return fmt.Errorf("bring a queue pair of RDMA device %s to %v: %w", q.dev.info.Name, to, err)
	}
	c := p.twin()
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.c == nil {
		return q.closed()
	}
	if err := errno(C.vb_modify(q.c, C.int(to), &c)); err != nil {
		return fmt.Errorf("bring queue pair %d of RDMA device %s to %v: %w%s", q.number, q.dev.info.Name, to, err, number(err))
	}
	return nil
}

// After Init, receives can be posted.
func (q *QP) Init(p *Route) error { return q.modify(Initialized, p) }

// ReadyToReceive connects the queue pair to its peer, whose writes may land from now on.
// On Ethernet, and only there, it finds out whether a route to the peer exists. Only a
// write shows whether the peer answers.
func (q *QP) ReadyToReceive(p *Route) error {
	if mtuCode(p.MTU) == 0 {
		return fmt.Errorf("bring queue pair %d of RDMA device %s to %v: MTU is %d bytes, it can be 256 to 4096: %w", q.number, q.dev.info.Name, ReadyToReceive, p.MTU, syscall.EINVAL)
	}
	if err := q.modify(ReadyToReceive, p); err != nil {
		if p.Global {
			return fmt.Errorf("%w; from GID index %d of port %d to GID %x", err, p.SourceGIDIndex, p.Port, p.RemoteGID)
		}
		return fmt.Errorf("%w; from port %d to LID %d", err, p.Port, p.RemoteLID)
	}
	return nil
}

// After ReadyToSend, writes can be posted.
func (q *QP) ReadyToSend(p *Route) error { return q.modify(ReadyToSend, p) }

// ToError stops the queue pair. Posted requests complete as Flushed. When it returns, no
// byte of the peer lands any more.
func (q *QP) ToError() error { return q.modify(Failed, &Route{}) }

// Reset forgets the peer and everything that is posted, without completions.
func (q *QP) Reset() error { return q.modify(Reset, &Route{}) }

// State asks the device for the queue pair's state.
func (q *QP) State() (State, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.c == nil {
		return 0, q.closed()
	}
	var s C.int
	if err := errno(C.vb_state(q.c, &s)); err != nil {
		return 0, fmt.Errorf("query queue pair %d of RDMA device %s: %w", q.number, q.dev.info.Name, err)
	}
	return State(s), nil
}

// closed is the error of a queue pair that was destroyed, and of the zero QP, which tests use.
func (q *QP) closed() error {
	if q.dev == nil {
		return fmt.Errorf("no queue pair: %w", ErrClosed)
	}
	return fmt.Errorf("queue pair %d of RDMA device %s: %w", q.number, q.dev.info.Name, ErrClosed)
}

// Post posts writes behind one doorbell, in order. It returns how many are posted: all of
// them or, with an error, those before the write that was refused. First and Pieces of the
// writes name entries of pieces. Post keeps neither slice and allocates nothing. ENOMEM
// says that the send queue is full.
func (q *QP) Post(writes []Write, pieces []SGE) (int, error) {
	if len(writes) > q.caps.SendDepth {
		return 0, fmt.Errorf("post %d writes on a queue pair of %d: %w", len(writes), q.caps.SendDepth, syscall.EINVAL)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.c == nil {
		return 0, q.closed()
	}
	r := C.vb_post(q.c, (*C.struct_vb_write)(unsafe.Pointer(unsafe.SliceData(writes))), C.int(len(writes)),
		(*C.struct_vb_sge)(unsafe.Pointer(unsafe.SliceData(pieces))), C.int(len(pieces)))
	if r.err != 0 {
		return int(r.n), q.postError("writes", int(r.n), len(writes), syscall.Errno(r.err))
	}
	return int(r.n), nil
}

// PostReceives posts n receives for writes with immediate, all with this id,
// and says how many are posted.
func (q *QP) PostReceives(id uint64, n int) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.c == nil {
		return 0, q.closed()
	}
	r := C.vb_post_receives(q.c, C.uint64_t(id), C.int(n))
	if r.err != 0 {
		return int(r.n), q.postError("receives", int(r.n), n, syscall.Errno(r.err))
	}
	return int(r.n), nil
}

func (q *QP) postError(what string, posted, of int, err error) error {
	full := ""
	if errors.Is(err, syscall.ENOMEM) {
		full = ": the queue is full"
	}
	return fmt.Errorf("post %s %d of %d on queue pair %d of RDMA device %s: %w%s%s", what, posted+1, of, q.number, q.dev.info.Name, err, number(err), full)
}

// Destroy gives the queue pair back. Posted requests get no completion; completions that
// lie in the queue may be dropped or still be polled. When it returns, no byte of the peer
// lands any more. A second call does nothing.
func (q *QP) Destroy() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.c == nil {
		return nil
	}
	if err := errno(C.vb_destroy_qp(q.c)); err != nil {
		return fmt.Errorf("destroy queue pair %d of RDMA device %s: %w", q.number, q.dev.info.Name, err)
	}
	q.c = nil
	q.dev.qps.Add(-1)
	return nil
}

// NewNullQP makes a queue pair of no device, whose posts go nowhere, for tests and to
// measure what a post costs besides the device. Only Post and DestroyNull do something.
func NewNullQP(caps Caps) (*QP, error) {
	c := C.struct_vb_caps{send_depth: C.uint32_t(caps.SendDepth), pieces: C.uint32_t(caps.Pieces)}
	q := &QP{dev: &Device{info: DeviceInfo{Name: "null"}}, caps: caps, c: C.vb_null_qp(&c)}
	if q.c == nil {
		return nil, errors.New("null queue pair: out of memory")
	}
	q.dev.qps.Add(1)
	return q, nil
}

// DestroyNull frees a queue pair of NewNullQP.
func (q *QP) DestroyNull() {
	q.mu.Lock()
	defer q.mu.Unlock()
	C.free(unsafe.Pointer(q.c))
	q.c = nil
}
