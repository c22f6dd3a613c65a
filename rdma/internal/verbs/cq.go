package verbs

/*
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

// CQ is a completion queue with an event channel of its own. One goroutine
// polls and waits:
//
//	for {
//		if n, _ := q.Poll(buf); n > 0 { …; continue }
//		q.Arm()
//		if n, _ := q.Poll(buf); n > 0 { …; continue } // what came before Arm makes no event
//		q.Wait(time.Time{})
//	}
type CQ struct {
	dev   *Device
	depth int
	c     *C.struct_vb_cq

	mu   sync.Mutex // held by each use of c but Wait's
	gone bool       // c is freed

	file  *os.File // a duplicate of the channel's descriptor, in the netpoller
	raw   syscall.RawConn
	take  func(uintptr) bool // made once, so that Wait allocates nothing
	taken C.int              // by take
}

// NewCQ makes a completion queue for at least depth completions. Queue pairs
// must not have more outstanding than fit: a queue that overruns is lost with
// all its queue pairs. The vector, 0 to Attr.Vectors-1, is the interrupt.
func (d *Device) NewCQ(depth, vector int) (*CQ, error) {
	if depth < 1 || depth > d.attr.MaxCQE {
		return nil, fmt.Errorf("completion queue of %d on RDMA device %s: it takes 1 to %d: %w", depth, d.info.Name, d.attr.MaxCQE, syscall.EINVAL)
	}
	q := &CQ{dev: d}
	err := d.use(func() error {
		var err error
		if q.c, err = C.vb_create_cq(d.ctx, C.int(depth), C.int(vector)); q.c == nil {
			return fmt.Errorf("make a completion queue of %d, vector %d, on RDMA device %s, which has at most %d: %w",
				depth, vector, d.info.Name, d.attr.MaxCQ, cause(err))
		}
		if q.file, err = pollable(C.vb_cq_fd(q.c), d.info.Name+" completions"); err == nil {
			if q.raw, err = q.file.SyscallConn(); err != nil {
				_ = q.file.Close()
			}
		}
		if err != nil {
			C.vb_destroy_cq(q.c)
			return err
		}
		d.cqs.Add(1)
		return nil
	})
	if err != nil {
		return nil, err
	}
	q.depth = int(C.vb_cq_depth(q.c))
	q.take = func(uintptr) bool { // no lock: Close lets the queue go when nobody is in here
		q.taken = C.vb_take_events(q.c)
		return q.taken != 0
	}
	return q, nil
}

// Depth is how many completions fit, at least as many as were asked for.
func (q *CQ) Depth() int { return q.depth }

func (q *CQ) closed() error {
	return fmt.Errorf("completion queue of RDMA device %s: %w", q.dev.info.Name, ErrClosed)
}

// Poll takes at most len(into) completions and never waits.
func (q *CQ) Poll(into []Completion) (int, error) {
	if len(into) == 0 {
		return 0, nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.gone {
		return 0, q.closed()
	}
	n := C.vb_poll(q.c, (*C.struct_vb_completion)(unsafe.Pointer(unsafe.SliceData(into))), C.int(len(into)))
	if n < 0 {
		return 0, fmt.Errorf("poll a completion queue of RDMA device %s: %w", q.dev.info.Name, syscall.Errno(-n))
	}
	return int(n), nil
}

// Arm asks for one event at the next completion. Completions that came before make no
// event: poll once more before Wait.
func (q *CQ) Arm() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.gone {
		return q.closed()
	}
	if err := errno(C.vb_arm(q.c)); err != nil {
		return fmt.Errorf("arm a completion queue of RDMA device %s: %w", q.dev.info.Name, err)
	}
	return nil
}

// Wait waits for the event of an Arm, without a thread and without CPU. A zero deadline
// means none. Any other deadline ends the wait with os.ErrDeadlineExceeded. Close and
// Interrupt end it with ErrClosed. The event may be of a completion that was polled
// already.
func (q *CQ) Wait(deadline time.Time) error {
	err := q.file.SetReadDeadline(deadline)
	if err == nil {
		err = q.raw.Read(q.take)
	}
	switch {
	case err == nil:
	case errors.Is(err, os.ErrDeadlineExceeded):
		return err
	case errors.Is(err, os.ErrNoDeadline): // the poller does not know the descriptor
		return fmt.Errorf("wait for a completion queue of RDMA device %s: %w", q.dev.info.Name, err)
	default:
		return q.closed()
	}
	if q.taken < 0 {
		return fmt.Errorf("wait for a completion queue of RDMA device %s: %w", q.dev.info.Name, syscall.Errno(-q.taken))
	}
	return nil
}

// Interrupt ends the Wait that is under way and all later ones; Poll goes on
// until Close.
func (q *CQ) Interrupt() { _ = q.file.Close() }

// Close ends Wait and gives the queue back. While queue pairs use the queue, Close
// fails with EBUSY and only Wait has ended. A second call does nothing.
func (q *CQ) Close() error {
	_ = q.file.Close() // returns when nobody is in Wait
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.gone {
		return nil
	}
	if err := errno(C.vb_destroy_cq(q.c)); err != nil {
		return fmt.Errorf("close a completion queue of RDMA device %s: %w", q.dev.info.Name, err)
	}
	q.gone = true
	q.dev.cqs.Add(-1)
	return nil
}
