// The driver gets the copies of a direction in batches, and a batch's event says when they have ended.

package cuda

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/cuda/internal/driver"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/safe"
)

// mostQueued bounds the copies that the driver has of one direction: with some thousand its
// calls wait, and the transport with them.
const mostQueued = 512

// queue gives the driver the copies of one direction, on a stream of kvconn's own.
type queue struct {
	d   *Device
	dir Direction
	drv *driver.Queue

	mu      sync.Mutex
	pending []*job  // jobs that the driver does not have all copies of
	batches []batch // batches that the driver has, the oldest first
	number  int     // of the next batch's event
	copies  int     // in all batches
	lost    []*job  // jobs that the driver may have, without an event
	over    error
	stopped bool
	more    sync.Cond // told when batches has more, or the queue is over

	ended int         // how many batches have ended
	seen  int         // how many had ended at the last look
	still int         // how many looks since then have seen no further one
	watch *time.Timer // runs while the driver has batches; see look

	told    []*job // jobs that have ended and whose Done is to be called
	telling sync.Cond
	silent  bool // tell has ended

	drains []drain // the waits for batches to end, the earliest first

	runs     [driver.MostRuns]Run // of the batch that is being made
	pairs    []driver.Pair        // in place of runs, for FromPeer
	otherGPU bool                 // some of that batch is memory of another GPU
}

// batch is what the driver got in one call, with an event behind it.
type batch struct {
	j      *job
	event  int
	copies int
}

func (d *Device) newQueue(dir Direction) (*queue, error) {
	drv, err := d.drv.OpenQueue(dir == ToDevice)
	if err != nil {
		return nil, err
	}
	q := &queue{d: d, dir: dir, drv: drv}
	q.more.L, q.telling.L = &q.mu, &q.mu
	q.watch = time.AfterFunc(d.o.StallTimeout, q.look)
	return q, nil
}

// start begins to wait for events, and to call Done: on two goroutines, so that a Done that takes its time holds up no copy.
func (q *queue) start() {
	q.d.goRun(q.wait)
	q.d.goRun(q.tell)
}

// look fails the device if no batch has ended for two looks. One look alone may have come late,
// after a pause of the process.
func (q *queue) look() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.batches) == 0 {
		return
	}
	if q.ended != q.seen {
		q.seen, q.still = q.ended, 0
	} else if q.still++; q.still == 2 {
		q.d.stall(fmt.Errorf("none of %d copies %s has ended within %s", q.copies, q.dir, q.d.o.StallTimeout))
		return
	}
	q.watch.Reset(q.d.o.StallTimeout / 2)
}

// end takes back the copies that the driver does not have. The copies that the driver has end by their
// events or, if those do not come, with err.
func (q *queue) end(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.over == nil {
		q.over = err
	}
	for _, j := range q.pending {
		j.err, j.queued = err, true
		q.settle(j)
	}
	q.pending = nil
	if q.d.isStuck() {
		err = q.d.Err() // whatever ends the device besides
		left := slices.Clone(q.lost)
		for _, b := range q.batches {
			left = append(left, b.j)
		}
		for _, j := range left {
			if !j.ended {
				j.err = err
				q.report(j)
			}
		}
	}
}

// stop lets the goroutines end when nothing is under way.
func (q *queue) stop() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.stopped = true
	q.watch.Stop()
	q.more.Signal()
	q.telling.Signal()
}

// push queues a job; mu is held.
func (q *queue) push(j *job) {
	if q.over != nil {
		j.err, j.queued = q.over, true
		q.settle(j)
		return
	}
	q.pending = append(q.pending, j)
	q.submit()
}

// submit gives the driver what it may have; mu is held.
func (q *queue) submit() {
	for len(q.pending) > 0 && len(q.batches) < driver.MostBatches && q.copies < mostQueued {
		j := q.pending[0]
		if err := q.d.same(j); err != nil && !fault.On("gpu-copies-anew") {
			q.d.suspect(err)
			j.err, j.next = cmp.Or(j.err, err), len(j.Runs)
		}
		from := j.at
		n := q.cut(j, min(driver.MostRuns, mostQueued-q.copies))
		if n > 0 {
			queued, err := q.give(j, from, n)
			if queued {
				if len(q.batches) == 0 {
					q.seen, q.still = q.ended, 0
					q.watch.Reset(q.d.o.StallTimeout / 2)
				}
				q.batches = append(q.batches, batch{j, q.number, n})
				q.number = (q.number + 1) % driver.MostBatches
				q.copies += n
				j.out++
				q.more.Signal()
			}
			if err != nil {
				j.err, j.next = cmp.Or(j.err, err), len(j.Runs)
				q.d.suspect(err)
				if !queued && !isSticky(err) { // nobody will know when what was queued has ended
					j.out++
					q.lost = append(q.lost, j)
					q.d.stall(err)
				}
			}
		}
		if j.next == len(j.Runs) {
			j.queued = true
			q.pending = slices.Delete(q.pending, 0, 1)
			q.settle(j)
		}
	}
}

// give gives the driver n copies that were cut; from is where they begin in the slot.
func (q *queue) give(j *job, from, n int) (queued bool, err error) {
	if j.Slot == nil {
		return q.drv.CopyPairs(q.number, q.pairs[:n], !q.otherGPU)
	}
	return q.drv.Copy(q.number, unsafe.Pointer(unsafe.SliceData(j.Slot.bytes[from:])), q.runs[:n], !q.otherGPU)
}

// cut puts the job's next runs into q.runs, at most so many, and says how many: neighbours in one
// mapping become one run, and a run that crosses mappings becomes several.
func (q *queue) cut(j *job, most int) (n int) {
	if j.Slot == nil {
		return q.cutPairs(j, most)
	}
	known := q.d.sources(j)
	var in mapping
	q.otherGPU = false
	for j.next < len(j.Runs) {
		r := j.Runs[j.next]
		addr, left := uint64(r.Addr)+j.off, r.Len-j.off
		if left == 0 {
			j.next, j.off = j.next+1, 0
			continue
		}
		if addr < in.base || addr >= in.end {
			var ok bool
			if in, ok = find(known, addr); !ok { // its region was closed since
				j.err, j.next = cmp.Or(j.err, j.gone(addr)), len(j.Runs)
				break
			}
		}
		take := min(left, in.end-addr)
		if n > 0 && uint64(q.runs[n-1].Addr)+q.runs[n-1].Len == addr && addr > in.base {
			q.runs[n-1].Len += take
		} else {
			if n == most {
				break
			}
			q.otherGPU = q.otherGPU || in.otherGPU
			q.runs[n] = Run{Addr: uintptr(addr), Len: take}
			n++
		}
		j.off += take
		j.at += int(take)
	}
	return n
}

// find is the mapping that an address lies in.
func find(known []mapping, addr uint64) (mapping, bool) {
	i, _ := slices.BinarySearchFunc(known, addr, func(m mapping, a uint64) int {
		if m.end <= a {
			return -1
		}
		return 1
	})
	if i == len(known) || addr < known[i].base {
		return mapping{}, false
	}
	return known[i], true
}

// settle ends a job if the driver has no copy of it any more and gets none; mu is held.
func (q *queue) settle(j *job) {
	if !j.queued || j.out > 0 {
		if fault.On("gpu-report-early") && j.queued {
			q.report(j)
		}
		return
	}
	j.t.copies--
	if j.Slot != nil {
		j.Slot.drop()
	}
	q.report(j)
}

// report has a job's Done called, once; mu is held.
func (q *queue) report(j *job) {
	switch {
	case j.ended:
		return
	case q.silent: // a job that was begun when the device was closed already
		safe.Go("cuda done", j.tell)
	default:
		q.told = append(q.told, j)
		q.telling.Signal()
	}
	j.ended = true
}

// wait waits for the batches' events, in the order of the stream.
func (q *queue) wait() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		for len(q.batches) == 0 && !q.stopped {
			q.more.Wait()
		}
		if len(q.batches) == 0 {
			return
		}
		b := q.batches[0]
		q.mu.Unlock()
		err := q.drv.Copied(b.event)
		if err != nil {
			q.d.suspect(err)
			if !isSticky(err) { // nobody knows whether the copies have ended, and nobody ever will
				q.d.stall(err)
				q.mu.Lock()
				return
			}
		}
		if err == nil && !fault.On("gpu-read-anew") { // memory may have gone while it was copied
			if err = q.d.same(b.j); err != nil {
				q.d.suspect(err)
			}
		}
		q.mu.Lock()
		q.batches = slices.Delete(q.batches, 0, 1)
		q.copies -= b.copies
		q.ended++
		q.drained()
		if len(q.batches) == 0 {
			q.watch.Stop()
		}
		b.j.out--
		if b.j.err == nil {
			b.j.err = err
		}
		q.settle(b.j)
		q.submit()
		q.telling.Signal() // the last one may be waited for
	}
}

func (j *job) tell() {
	defer safe.Recover("cuda done") // a Done that panics must not keep the others from being called
	j.Done(j.t.wrap(j.err))
}

// tell calls the Done of jobs that have ended, without the lock.
func (q *queue) tell() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		for len(q.told) == 0 {
			if q.stopped && len(q.batches) == 0 {
				q.silent = true
				return
			}
			q.telling.Wait()
		}
		told := q.told
		q.told = nil
		q.mu.Unlock()
		for _, j := range told {
			j.tell()
		}
		q.mu.Lock()
	}
}
