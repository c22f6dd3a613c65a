// Pinned memory is shared out in slots: each direction, and each owner that waits, gets its part.

package cuda

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvconn/kvconn/internal/fault"
)

// Direction of copies.
type Direction int

// Directions of copies.
const (
	FromDevice Direction = iota // P reads the device's memory
	ToDevice                    // D writes it
	FromPeer                    // D reads another process's memory, and writes the device's
	directions
)

func (d Direction) String() string {
	switch d {
	case ToDevice:
		return "to the device"
	case FromPeer:
		return "from a peer's memory to the device"
	}
	return "from the device"
}

// leastSlots are needed so that both directions have several.
const leastSlots = 8

// ring is the pinned memory, in slots. A direction gets three quarters of them at most: if P's
// copies held all while D's peer waits for this very agent, both would stand. Owners that wait
// share a direction: the one that has the fewest of its slots is the next.
type ring struct {
	mu      sync.Mutex
	slots   int
	free    [][]byte
	held    [2]int
	shares  [2]map[string]int // held, by owner
	waiting [2][]waiter       // the longest wait first
	over    error
	all     chan struct{} // closed when all slots are free; nil unless somebody waits for that
}

// waiter is a call of Slot that waits.
type waiter struct {
	owner string
	comes chan *Slot
}

// Slot is a piece of pinned host memory.
type Slot struct {
	ring     *ring
	dir      Direction
	owner    string
	bytes    []byte
	users    atomic.Int32 // its owner, and the copies that use it
	released atomic.Bool
}

func (r *ring) init(memory []byte, slots int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.slots, r.shares = slots, [2]map[string]int{{}, {}}
	n := len(memory) / slots
	for i := slots - 1; i >= 0; i-- {
		r.free = append(r.free, memory[i*n:(i+1)*n:(i+1)*n])
	}
}

// take gives a slot that dir may have; mu is held.
func (r *ring) take(dir Direction, owner string) *Slot {
	if len(r.free) == 0 || r.held[dir] >= r.slots-r.slots/4 {
		return nil
	}
	s := &Slot{ring: r, dir: dir, owner: owner, bytes: r.free[len(r.free)-1]} // anew: a previous owner has no part in it
	s.users.Store(1)
	r.free = r.free[:len(r.free)-1]
	r.held[dir]++
	r.shares[dir][owner]++
	return s
}

// next is the place of the waiter whose turn it is. Somebody waits, and mu is held.
func (r *ring) next(dir Direction) (turn int) {
	if fault.On("gpu-slot-turns") {
		return 0
	}
	fewest := math.MaxInt
	for i := range r.waiting[dir] {
		if n := r.shares[dir][r.waiting[dir][i].owner]; n < fewest {
			turn, fewest = i, n
		}
	}
	return turn
}

// Slot waits for a slot of a direction, until ctx ends. The owner is whose bytes go through it:
// among those that wait, the owner with the fewest slots is the next, and among the calls of
// one owner the one that waits longest.
func (d *Device) Slot(ctx context.Context, dir Direction, owner string) (*Slot, error) {
	if err := d.slots(dir); err != nil {
		return nil, err
	}
	r := &d.ring
	r.mu.Lock()
	if r.over != nil {
		r.mu.Unlock()
		return nil, r.over
	}
	if len(r.waiting[dir]) == 0 {
		if s := r.take(dir, owner); s != nil {
			r.mu.Unlock()
			return s, nil
		}
	}
	comes := make(chan *Slot, 1)
	r.waiting[dir] = append(r.waiting[dir], waiter{owner, comes})
	r.mu.Unlock()
	select {
	case s, ok := <-comes:
		if !ok {
			return nil, d.over()
		}
		return s, nil
	case <-ctx.Done():
	}
	r.mu.Lock()
	if i := slices.IndexFunc(r.waiting[dir], func(w waiter) bool { return w.comes == comes }); i >= 0 {
		r.waiting[dir] = slices.Delete(r.waiting[dir], i, i+1)
	}
	r.mu.Unlock()
	select {
	case s, ok := <-comes: // it came at the same time
		if ok {
			return s, nil
		}
	default:
	}
	return nil, context.Cause(ctx)
}

// slots prepares the ring for a direction.
func (d *Device) slots(dir Direction) error {
	if dir == FromPeer {
		return errors.New("copies from a peer's memory to the device have no slot")
	}
	return d.Prepare()
}

// TrySlot gives a slot if there is one for the direction and nobody waits for one, else nil.
func (d *Device) TrySlot(dir Direction, owner string) (*Slot, error) {
	if err := d.slots(dir); err != nil {
		return nil, err
	}
	r := &d.ring
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.over != nil || len(r.waiting[dir]) > 0 {
		return nil, r.over
	}
	return r.take(dir, owner), nil
}

// SlotBytes is the size of each slot.
func (d *Device) SlotBytes() int { return d.o.SlotBytes }

// Bytes are the slot's memory, until it is released.
func (s *Slot) Bytes() []byte { return s.bytes }

// Release gives the slot back. If a copy uses it, it is free when that has ended.
func (s *Slot) Release() {
	if s.released.Swap(true) {
		return
	}
	if fault.On("gpu-slot-early") {
		s.users.Store(1)
	}
	s.drop()
}

// drop is the end of one use.
func (s *Slot) drop() {
	if s.users.Add(-1) == 0 {
		s.ring.put(s)
	}
}

// put takes a slot back, and gives it to the caller whose turn it is in a direction that may have
// it.
func (r *ring) put(s *Slot) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.held[s.dir]--
	if r.shares[s.dir][s.owner]--; r.shares[s.dir][s.owner] == 0 {
		delete(r.shares[s.dir], s.owner)
	}
	r.free = append(r.free, s.bytes)
	for _, dir := range [2]Direction{s.dir, 1 - s.dir} {
		for len(r.waiting[dir]) > 0 {
			turn := r.next(dir)
			slot := r.take(dir, r.waiting[dir][turn].owner)
			if slot == nil {
				break
			}
			r.waiting[dir][turn].comes <- slot
			r.waiting[dir] = slices.Delete(r.waiting[dir], turn, turn+1)
		}
	}
	if r.all != nil && len(r.free) == r.slots {
		close(r.all)
		r.all = nil
	}
}

// end sends all waiting callers away.
func (r *ring) end(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.over == nil {
		r.over = err
	}
	for dir := range r.waiting {
		for _, w := range r.waiting[dir] {
			close(w.comes)
		}
		r.waiting[dir] = nil
	}
}

// empty is closed when all slots are free. It is asked for once.
func (r *ring) empty() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make(chan struct{})
	if len(r.free) == r.slots {
		close(all)
	} else {
		r.all = all
	}
	return all
}
