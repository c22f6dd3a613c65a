// A copy is checked, given to its direction's queue, and told of once when it has ended.

package cuda

import (
	"errors"
	"fmt"

	"github.com/kvconn/kvconn/cuda/internal/driver"
	"github.com/kvconn/kvconn/internal/safe"
)

// ErrStuck ends the copies of a device that did not end one within StallTimeout. Such a copy may
// yet read or land.
var ErrStuck = errors.New("a copy has not ended, and may yet read or land: the blocks of its transfer must not be used again")

// Run is a piece of the device's memory.
type Run = driver.Run

// Copy says what to copy: between device memory and a slot, or from a peer's memory to the device's.
type Copy struct {
	Slot *Slot       // none for FromPeer
	At   int         // the first byte in the slot
	Runs []Run       // in the device's memory; in the slot their bytes follow each other
	Peer *Peer       // FromPeer and FromDevice: the runs are of this peer's memory, by its addresses
	To   []Run       // FromPeer: where in the device's memory the runs' bytes go, in the same order
	Done func(error) // called once, see the package's page
}

// Transfer has copies of one transfer in one direction.
type Transfer struct {
	d      *Device
	name   string
	dir    Direction
	copies int // that have not ended; guarded by the queue's mu
}

// Transfer begins a Transfer. The name says in errors what the copies are for. Nobody need end it. But before a caller gives back memory that a copy may
// still use, it waits for the copy's Done.
func (d *Device) Transfer(name string, dir Direction) *Transfer {
	return &Transfer{d: d, name: name, dir: dir}
}

// job is one Copy on its way.
type job struct {
	Copy
	t      *Transfer
	under  []driver.Piece // the memory that it was begun in
	own    int            // how many of under are not the peer's
	next   int            // the next run to queue
	off    uint64         // how many bytes of that run are queued
	at     int            // the next byte of the slot
	nextTo int            // nextTo and offTo are like next and off, for To
	offTo  uint64
	out    int  // how many batches of it the driver has
	queued bool // the driver has got all of it, or gets no more of it
	ended  bool
	err    error
}

// Start gives a copy to the device. If the copy must come after work on an engine's streams, the caller has waited for that work.
func (t *Transfer) Start(c Copy) {
	j, err := t.ready(c)
	if err != nil {
		safe.Go("cuda", func() { c.Done(t.wrap(err)) })
		return
	}
	t.begin(j)
}

// ready checks a copy, and notes the memory that lies under it now: the copy is good only in this memory.
func (t *Transfer) ready(c Copy) (*job, error) {
	j := &job{Copy: c, t: t, at: c.At}
	err := t.check(j)
	if err == nil {
		err = t.prepare()
	}
	if err == nil && c.Slot != nil {
		c.Slot.users.Add(1)
	}
	return j, err
}

func (t *Transfer) begin(j *job) {
	q := t.d.queue(t.dir)
	q.mu.Lock()
	defer q.mu.Unlock()
	t.copies++
	q.push(j)
}

func (t *Transfer) wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("copies %s for %s: %w", t.dir, t.name, err)
}

func (t *Transfer) prepare() error {
	if t.dir == FromPeer {
		return t.d.preparePeers()
	}
	return t.d.Prepare()
}

func (t *Transfer) check(j *job) error {
	if t.dir == FromPeer {
		return t.checkPairs(j)
	}
	c := &j.Copy
	switch {
	case c.Slot == nil:
		return errors.New("it has no slot")
	case c.To != nil || c.Peer != nil && t.dir != FromDevice:
		return errors.New("a peer's memory is only read")
	}
	if c.Slot.released.Load() {
		return errors.New("the slot was released")
	}
	bytes, room := uint64(0), uint64(0)
	if c.At >= 0 && c.At <= len(c.Slot.bytes) {
		room = uint64(len(c.Slot.bytes) - c.At)
	}
	for _, r := range c.Runs {
		bytes += r.Len
		if r.Len > room || bytes > room {
			return fmt.Errorf("a copy of %d bytes or more from byte %d on does not fit into a slot of %d bytes", bytes, c.At, len(c.Slot.bytes))
		}
	}
	if err := t.resolve(j, bytes); err != nil {
		return err
	}
	if c.Slot.dir != t.dir {
		return fmt.Errorf("the slot is for copies %s", c.Slot.dir)
	}
	return nil
}

// MayCopy says whether the device still has a copy of the transfer, which may read or land. A device that has ended with ErrStuck says that of
// copies too that it never had, or that it has ended.
func (t *Transfer) MayCopy() bool {
	q := t.d.queue(t.dir)
	if q == nil {
		return false // nothing was ever copied
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return t.copies > 0
}
