// Copies from a peer's memory to the device's go from mapping to mapping, without pinned memory.

package cuda

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/kvconn/kvconn/cuda/internal/driver"
)

// preparePeers makes the stream for copies from peers' memory, once. These copies need no pinned memory.
func (d *Device) preparePeers() error {
	if !d.enter() {
		return d.over()
	}
	defer d.leave()
	d.preparePeer.Do(func() {
		var q *queue
		if q, d.preparePeerErr = d.newQueue(FromPeer); d.preparePeerErr != nil {
			return
		}
		q.pairs = make([]driver.Pair, driver.MostRuns)
		q.start()
		d.mu.Lock()
		d.queues[FromPeer] = q
		d.mu.Unlock()
		if err := d.over(); err != nil { // meanwhile
			d.endAll(err)
		}
	})
	return d.preparePeerErr
}

// sources are the mappings that a job may read, or write in the device's memory.
func (d *Device) sources(j *job) []mapping {
	if j.Peer != nil {
		return *d.foreign.Load()
	}
	return *d.known.Load()
}

// resolve looks up where the job's runs lie. If they are of a peer's memory, they get the addresses that this memory has in this process.
func (t *Transfer) resolve(j *job, bytes uint64) error {
	if j.Peer != nil {
		if j.Peer.d != t.d {
			return fmt.Errorf("the memory of %s was opened by another handle on a device", j.Peer.name)
		}
		var err error
		j.Runs, j.under, err = j.Peer.here(j.Runs)
		return err
	}
	pieces, missing := under(*t.d.known.Load(), j.Runs)
	if missing != 0 {
		return fmt.Errorf("a copy of %d bytes: the memory at %#x is not registered", bytes, missing)
	}
	j.under, j.own = pieces, len(pieces)
	return nil
}

// gone says why a job cannot go on at an address that it could use when it began.
func (j *job) gone(addr uint64) error {
	if j.Peer != nil {
		return j.Peer.closed()
	}
	return unregistered(addr)
}

func unregistered(addr uint64) error {
	return fmt.Errorf("the memory at %#x is not registered any more: its region was closed before this copy began", addr)
}

// checkPairs is check for copies from a peer's memory to the device's.
func (t *Transfer) checkPairs(j *job) error {
	if j.Slot != nil || j.Peer == nil {
		return errors.New("it needs a peer, and no slot")
	}
	from, to := length(j.Runs), length(j.To)
	if from != to {
		return fmt.Errorf("%d bytes of %s for %d bytes", from, j.Peer.name, to)
	}
	own, missing := under(*t.d.known.Load(), j.To)
	if err := t.resolve(j, from); err != nil {
		return err
	}
	if missing != 0 {
		return fmt.Errorf("a copy of %d bytes: the memory at %#x is not registered", to, missing)
	}
	own = once(own)
	j.under, j.own = append(own, once(j.under)...), len(own)
	return nil
}

// once leaves each mapping only once in pieces. Runs go to and fro between a cache's allocations, and the driver is asked for each piece at
// each batch.
func once(pieces []driver.Piece) []driver.Piece {
	slices.SortFunc(pieces, func(a, b driver.Piece) int { return cmp.Or(cmp.Compare(a.ID, b.ID), cmp.Compare(a.Block, b.Block)) })
	return slices.CompactFunc(pieces, func(a, b driver.Piece) bool { return a.ID == b.ID && a.Block == b.Block })
}

// length is the number of bytes of runs; if it does not fit into a uint64, it is the largest uint64.
func length(runs []Run) (bytes uint64) {
	for _, r := range runs {
		if bytes+r.Len < bytes {
			return ^uint64(0)
		}
		bytes += r.Len
	}
	return bytes
}

// cutPairs is cut for copies from a peer's memory to the device's: as much as lies in one run and one mapping on both
// sides is one copy.
func (q *queue) cutPairs(j *job, most int) (n int) {
	known, foreign := *q.d.known.Load(), *q.d.foreign.Load()
	var from, to mapping
	q.otherGPU = false
	for {
		j.next, j.off = pass(j.Runs, j.next, j.off)
		j.nextTo, j.offTo = pass(j.To, j.nextTo, j.offTo)
		if j.next == len(j.Runs) {
			return n
		}
		r, w := j.Runs[j.next], j.To[j.nextTo]
		source, target := uint64(r.Addr)+j.off, uint64(w.Addr)+j.offTo
		var err error
		if !within(&from, foreign, source) {
			err = j.gone(source)
		} else if !within(&to, known, target) {
			err = unregistered(target)
		}
		if err != nil {
			j.err, j.next = cmp.Or(j.err, err), len(j.Runs)
			return n
		}
		take := min(r.Len-j.off, w.Len-j.offTo, from.end-source, to.end-target)
		if n > 0 && follow(q.pairs[n-1], source, target) && source > from.base && target > to.base {
			q.pairs[n-1].Len += take
		} else {
			if n == most {
				return n
			}
			q.otherGPU = q.otherGPU || from.otherGPU
			q.pairs[n] = driver.Pair{From: uintptr(source), To: uintptr(target), Len: take}
			n++
		}
		j.off, j.offTo = j.off+take, j.offTo+take
	}
}

// pass skips runs that are done or empty: it returns the next run to copy, and the offset in it.
func pass(runs []Run, next int, off uint64) (int, uint64) {
	for next < len(runs) && off == runs[next].Len {
		next, off = next+1, 0
	}
	return next, off
}

// within says whether an address lies in known memory, and puts the mapping that holds it into m. It looks first at the mapping that m has.
func within(m *mapping, known []mapping, addr uint64) (ok bool) {
	if addr >= m.base && addr < m.end {
		return true
	}
	*m, ok = find(known, addr)
	return ok
}

func follow(p driver.Pair, source, target uint64) bool {
	return uint64(p.From)+p.Len == source && uint64(p.To)+p.Len == target
}

// drain is one wait until so many batches of a queue have ended.
type drain struct {
	until int
	ended chan struct{}
}

// drained ends the waits whose batches have ended; mu is held.
func (q *queue) drained() {
	for len(q.drains) > 0 && q.ended >= q.drains[0].until {
		close(q.drains[0].ended)
		q.drains = q.drains[1:]
	}
}

// drain waits until the copies of a direction that the driver has now have ended. It does not wait for copies that the driver gets later.
func (d *Device) drain(dir Direction) error {
	q := d.queue(dir)
	if q == nil {
		return nil
	}
	q.mu.Lock()
	w := drain{q.ended + len(q.batches), make(chan struct{})}
	q.drains = append(q.drains, w) // in order: what has ended, and what is there, never gets less
	q.drained()
	q.mu.Unlock()
	select { // the queue's look bounds it
	case <-w.ended:
		return nil
	case <-d.stuck:
		return d.Err()
	}
}
