// An agent's handle on a device: it is opened, may fail for good, and knows which calls are in the driver.

package cuda

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda/internal/driver"
	"github.com/kvconn/kvconn/internal/safe"
)

// Defaults of the ring, also those of the keys device_ring_bytes and device_slot_bytes.
const (
	DefaultRingBytes = 64 << 20
	DefaultSlotBytes = 512 << 10 // less in a ring that has not leastSlots of them
)

// Options of a Device; zero values are the defaults.
type Options struct {
	RingBytes    int           // pinned host memory for copies: DefaultRingBytes
	SlotBytes    int           // of each slot in the ring: DefaultSlotBytes
	Moments      int           // that have not passed, at a time: 4,096
	NoKernel     bool          // the driver's own copies do all
	StallTimeout time.Duration // until a device that does not end a copy counts as failed: core.DefaultStallTimeout
	CloseTimeout time.Duration // bounds Close, from Closing on: StallTimeout
}

func (o *Options) complete() error {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def(&o.RingBytes, DefaultRingBytes)
	def(&o.SlotBytes, min(DefaultSlotBytes, o.RingBytes/leastSlots))
	def(&o.Moments, 4096)
	if o.StallTimeout == 0 {
		o.StallTimeout = core.DefaultStallTimeout
	}
	if o.CloseTimeout == 0 {
		o.CloseTimeout = o.StallTimeout
	}
	switch {
	case o.SlotBytes < 1 || o.RingBytes/o.SlotBytes < leastSlots:
		return fmt.Errorf("a ring of %d bytes has less than %d slots of %d bytes: make the ring larger, or the slots smaller", o.RingBytes, leastSlots, o.SlotBytes)
	case o.Moments < 1 || o.Moments > 1<<20:
		return fmt.Errorf("%d moments, want 1 to %d", o.Moments, 1<<20)
	case min(o.StallTimeout, o.CloseTimeout) < 0:
		return fmt.Errorf("a stall timeout of %s and a close timeout of %s: want more than 0 s", o.StallTimeout, o.CloseTimeout)
	}
	return nil
}

// Device is an agent's handle on a device. Its methods may be called from any goroutine.
type Device struct {
	drv  *driver.Device
	info Info
	o    Options
	wg   sync.WaitGroup // goroutines

	entered    sync.Mutex    // guards calls, and closed while it changes
	calls      int           // short calls of the driver that are under way
	left       chan struct{} // closed when the device is closed and no such call is under way
	closed     atomic.Bool
	failure    atomic.Pointer[error] // for good
	flushes    chan struct{}         // holds one while no flush is under way
	flushBound time.Duration         // of a device that is not stuck: StallTimeout
	halfway    chan struct{}         // closed when half of the time of a close is over
	stuck      chan struct{}         // closed when the failure is that copies do not end: they may yet land
	stalled    sync.Once
	closing    sync.Once
	until      time.Time     // of Close, once it is closing
	closeTimer *time.Timer   // see Closing
	hasty      chan struct{} // tests only: closed when Close is not to wait for the driver any longer

	closes   sync.Once
	closeErr error // of Close, once that has ended

	mu      sync.Mutex
	waits   map[uint8]*streamWaits
	regions []*Region
	known   atomic.Pointer[[]mapping] // what lies under the regions
	pieces  []driver.Piece            // of known, for Check
	sample  []driver.Piece            // of pieces, for Moved
	epoch   uint64                    // grows with each change of these, and of regions
	takes   uint64                    // of Remappings

	prepare    sync.Once
	prepareErr error
	memory     unsafe.Pointer // of the ring
	ring       ring
	queues     [directions]*queue // by Direction; nil before Prepare and preparePeers

	preparePeer    sync.Once
	preparePeerErr error
	peers          []*Peer                   // the peers that have memory open; mu guards this
	foreign        atomic.Pointer[[]mapping] // the memory that they have open
}

// Open gives a handle on the device of that number (CUDA_VISIBLE_DEVICES changes the numbers).
// The device's primary context must be active, else the error wraps ErrInactive.
func Open(ordinal int, o Options) (*Device, error) {
	if err := o.complete(); err != nil {
		return nil, fmt.Errorf("CUDA device %d: %w", ordinal, err)
	}
	if err := driver.Load(); err != nil {
		return nil, err
	}
	info, err := driver.Inform(ordinal)
	if err != nil {
		return nil, err
	}
	if !info.Unified {
		return nil, fmt.Errorf("CUDA device %d (%s) does not share an address space with the host: kvconn needs unified addressing", ordinal, info.Name)
	}
	drv, err := driver.Open(ordinal, o.Moments, !o.NoKernel)
	if err != nil {
		return nil, err
	}
	d := &Device{drv: drv, info: info, o: o, waits: map[uint8]*streamWaits{}, stuck: make(chan struct{}), flushes: make(chan struct{}, 1), flushBound: o.StallTimeout, halfway: make(chan struct{}), left: make(chan struct{})}
	d.flushes <- struct{}{}
	d.known.Store(&[]mapping{})
	d.foreign.Store(&[]mapping{})
	return d, nil
}

// NoKernel is why copies of many pieces go without the copy kernel, or nil. Options.NoKernel is no reason.
func (d *Device) NoKernel() error {
	if d.o.NoKernel {
		return nil
	}
	return d.drv.NoKernel()
}

// Info is what the device is.
func (d *Device) Info() Info { return d.info }

// Err is why the device has failed for good, or nil.
func (d *Device) Err() error {
	if err := d.failure.Load(); err != nil {
		return *err
	}
	return nil
}

// over is why nothing begins any more.
func (d *Device) over() error {
	if err := d.Err(); err != nil {
		return err
	}
	if d.closed.Load() {
		return fmt.Errorf("CUDA device %d: %w", d.info.Ordinal, ErrClosed)
	}
	return nil
}

// enter begins a short call of the driver, which leave ends. A call that the driver does not answer holds up no other. Close waits for
// a call that has begun, and none begins when it does.
func (d *Device) enter() bool { return d.enters(false) }

// enterStuck is enter for a call that is of use also while the device does not end a copy.
func (d *Device) enterStuck() bool { return d.enters(true) }

func (d *Device) enters(stuck bool) bool {
	d.entered.Lock()
	defer d.entered.Unlock()
	if d.closed.Load() || d.Err() != nil && !(stuck && d.isStuck()) {
		return false
	}
	d.calls++
	return true
}

func (d *Device) leave() {
	d.entered.Lock()
	defer d.entered.Unlock()
	if d.calls--; d.calls == 0 && d.closed.Load() {
		close(d.left)
	}
}

// suspect looks whether an error of the driver means the end of the device.
func (d *Device) suspect(err error) {
	if isSticky(err) {
		d.fail(err)
	}
}

func isSticky(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Sticky()
}

// fail ends all copies and awaited moments of the device.
func (d *Device) fail(err error) {
	if d.fails(err) {
		d.goRun(func() { d.endAll(d.Err()) }) // the caller may hold a lock
	}
}

// fails keeps the first cause.
func (d *Device) fails(err error) bool {
	var e *Error
	if errors.As(err, &e) && e.Sticky() {
		err = e.Brief()
	}
	err = fmt.Errorf("%s (%s) has failed: %w", d.info.Name, d.info.UUID, err)
	return d.failure.CompareAndSwap(nil, &err)
}

// stall fails a device if nobody knows whether its copies have ended. Even if the device has failed
// before, Err then also says that copies may yet land.
func (d *Device) stall(cause error) {
	d.stalled.Do(func() {
		why := fmt.Errorf("%w: %w", cause, ErrStuck)
		if !d.fails(why) { // before anybody hears of it
			why = fmt.Errorf("%w; %w", d.Err(), why)
			d.failure.Store(&why)
		}
		close(d.stuck)
		d.goRun(func() { d.endAll(d.Err()) })
	})
}

func (d *Device) isStuck() bool {
	select {
	case <-d.stuck:
		return true
	default:
		return false
	}
}

func (d *Device) endAll(err error) {
	d.endAwaits(err)
	d.ring.end(err)
	for _, q := range d.made() {
		q.end(err)
	}
}

// made are the queues that there are.
func (d *Device) made() (all []*queue) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, q := range d.queues {
		if q != nil {
			all = append(all, q)
		}
	}
	return all
}

// queue is a direction's, or nil before the first copy.
func (d *Device) queue(dir Direction) *queue {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.queues[dir]
}

// goRun starts a goroutine that Close waits for.
func (d *Device) goRun(f func()) {
	d.wg.Add(1)
	go func() {
		defer d.wg.Done()
		defer safe.Recover("cuda")
		f()
	}()
}

// Prepare pins the ring and makes the streams, once; Slot does so too. A transport calls it when
// regions are registered, so that a failure is seen then.
func (d *Device) Prepare() error {
	if !d.enter() {
		return d.over()
	}
	defer d.leave()
	d.prepare.Do(func() { d.prepareErr = d.makeRing() })
	return d.prepareErr
}

func (d *Device) makeRing() error {
	slots := d.o.RingBytes / d.o.SlotBytes
	memory, err := d.drv.Ring(uint64(slots) * uint64(d.o.SlotBytes))
	if err != nil {
		return err
	}
	var made [2]*queue
	for dir := range made {
		if made[dir], err = d.newQueue(Direction(dir)); err != nil {
			for _, q := range made[:dir] {
				q.drv.Close()
			}
			return errors.Join(err, d.drv.FreeRing(memory))
		}
	}
	d.ring.init(unsafe.Slice((*byte)(memory), slots*d.o.SlotBytes), slots)
	for _, q := range made {
		q.start()
	}
	d.mu.Lock()
	d.memory, d.queues[FromDevice], d.queues[ToDevice] = memory, made[FromDevice], made[ToDevice]
	d.mu.Unlock()
	if err := d.over(); err != nil { // meanwhile
		d.endAll(err)
	}
	return nil
}
