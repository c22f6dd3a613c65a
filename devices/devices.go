// Package devices are the CUDA devices on which an agent's regions lie. It says which region
// lies where, gives the tcp transport its slots, and knows the moments of all devices.
package devices

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/kv"
)

// ErrDevice is wrapped by errors of the driver, or of the device.
var ErrDevice = core.ErrMemory

// Devices of one agent, from its registration on. Its methods may be called from any
// goroutine. The nil value has no device.
type Devices struct {
	list    []*cuda.Device
	regions []*cuda.Region // by the layout's regions; nil: host memory
}

// Open finds the devices of the regions that lie in device memory, sets each region's Memory
// to its device's number, and pins the devices' rings. The result is nil if all regions lie in
// host memory; nothing of CUDA's is asked then.
func Open(regions []kv.Region, o cuda.Options) (*Devices, error) {
	if !slices.ContainsFunc(regions, func(r kv.Region) bool { return r.Memory != kv.HostMemory }) {
		if fault.On("driver-unasked") {
			_, _ = cuda.Devices()
		}
		return nil, nil
	}
	d := &Devices{regions: make([]*cuda.Region, len(regions))}
	all := opening{Devices: d, o: o, numbers: map[int]int{}}
	for i := range regions {
		if regions[i].Memory == kv.HostMemory {
			continue
		}
		if err := all.find(i, &regions[i]); err != nil {
			return nil, errors.Join(err, d.Close())
		}
	}
	for k := range d.list {
		if err := all.register(k, regions); err != nil {
			return nil, errors.Join(err, d.Close())
		}
	}
	return d, nil
}

// opening are Devices whose regions are looked for.
type opening struct {
	*Devices
	o       cuda.Options
	numbers map[int]int // by CUDA's ordinals
	locator cuda.Locator
	of      [][]int        // by device: the numbers of its regions
	at      [][]cuda.Place // where these lie
}

// find finds the device of a region, and opens it.
func (d *opening) find(i int, r *kv.Region) error {
	at, err := d.locator.Find(uintptr(r.Base), r.Extent())
	if err != nil {
		return refused(r, err)
	}
	k, known := d.numbers[at.Device]
	if !known {
		k = len(d.list)
		if k == kv.MaxDevices {
			return fmt.Errorf("%w: %v lies on one more device than the %d that an agent may have", core.ErrInvalid, r, kv.MaxDevices)
		}
		dev, err := cuda.Open(at.Device, d.o)
		if err != nil {
			return fmt.Errorf("%w: %v: %w", ErrDevice, r, err)
		}
		d.list, d.numbers[at.Device] = append(d.list, dev), k
		d.of, d.at = append(d.of, nil), append(d.at, nil)
		if err := dev.Prepare(); err != nil {
			return fmt.Errorf("%w: %v: %w", ErrDevice, r, err)
		}
	}
	r.Memory = kv.DeviceMemory(k)
	d.of[k], d.at[k] = append(d.of[k], i), append(d.at[k], at)
	return nil
}

// register registers the regions of a device.
func (d *opening) register(k int, regions []kv.Region) error {
	names := make([]string, len(d.of[k]))
	for j, i := range d.of[k] {
		names[j] = regions[i].Name
	}
	list, err := d.list[k].RegisterAll(names, d.at[k])
	if err != nil {
		return fmt.Errorf("%w: %w", ErrDevice, err)
	}
	for j, i := range d.of[k] {
		d.regions[i] = list[j]
	}
	return nil
}

// refused says whether the caller or the machine is at fault.
func refused(r *kv.Region, err error) error {
	var kind *cuda.KindError
	if errors.As(err, &kind) {
		return fmt.Errorf("%w: %v is registered as device memory: %w", core.ErrInvalid, r, err)
	}
	return fmt.Errorf("%w: %v is registered as device memory: %w", ErrDevice, r, err)
}

// NoKernel is why copies of many pieces go without the copy kernel, or nil.
func (d *Devices) NoKernel() error {
	if d == nil {
		return nil
	}
	var all []error
	for _, dev := range d.list {
		all = append(all, dev.NoKernel())
	}
	return errors.Join(all...)
}

// Closing begins the time that Close has. It is called before the transports are closed, which
// wait for copies.
func (d *Devices) Closing() {
	if d == nil {
		return
	}
	for _, dev := range d.list {
		dev.Closing()
	}
}

// Close ends all copies. The transports that use them are closed before, or were given up.
func (d *Devices) Close() error {
	if d == nil {
		return nil
	}
	errs := make([]error, len(d.list))
	var wg sync.WaitGroup
	for i, dev := range d.list { // side by side: each may take its whole time
		wg.Add(1)
		safe.Go("close device", func() {
			defer wg.Done()
			if _, err := safe.Try("close device", dev.Close); err != nil {
				errs[i] = fmt.Errorf("%w: %w", ErrDevice, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Of is the device of a region, -1 for host memory.
func (d *Devices) Of(region uint32) int {
	if d == nil || d.regions[region] == nil {
		return -1
	}
	return slices.Index(d.list, d.regions[region].Device())
}

// Check says whether the regions still have the memory that was registered. It is asked before
// a transfer is armed.
func (d *Devices) Check() error {
	if d == nil {
		return nil
	}
	for _, dev := range d.list {
		if err := dev.Check(); err != nil {
			return fmt.Errorf("%w: %w", ErrDevice, err)
		}
	}
	return nil
}

// Moved says whether some of the regions' memory is not what was registered any more. It is cheap
// enough for each call of an engine, but no proof: Check is.
func (d *Devices) Moved() bool {
	return d != nil && slices.ContainsFunc(d.list, (*cuda.Device).Moved)
}

// Epoch grows whenever other memory is taken for what was registered, and by nothing else: not by memory that a transport probes with.
func (d *Devices) Epoch() (n uint64) {
	for _, dev := range d.list {
		n += dev.Takes()
	}
	return n
}

// Remapping is memory that lies under the regions in the place of what was registered.
type Remapping []*cuda.Remapping

// Look finds the memory that lies under the regions now, which takes milliseconds.
func (d *Devices) Look() (Remapping, error) {
	var all Remapping
	for _, dev := range d.list {
		n, err := dev.Look()
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrDevice, err)
		}
		all = append(all, n)
	}
	return all, nil
}

// Take takes the memory for what was registered, and says whether it did: another may have taken some since
// Look. It takes no time. No transfer is under way.
func (r Remapping) Take() bool {
	for _, n := range r {
		if !n.Current() {
			return false
		}
	}
	for _, n := range r {
		n.Take()
	}
	return true
}

// fewRegions is so few that each region's mappings are asked for, and not those of all.
const fewRegions = 4

// Few are the regions on devices that a write reads, if they are so few that CheckFew of them asks for no more mappings than Check does.
func (d *Devices) Few(pairs []kv.Pair) (few []*cuda.Region, ok bool) {
	if d == nil {
		return nil, true
	}
	mappings := 0
	for i := range pairs {
		r := d.regions[pairs[i].SrcRegion]
		if n := len(few); r == nil || n > 0 && few[n-1] == r || slices.Contains(few, r) {
			continue
		}
		few = append(few, r)
		if mappings += r.Mappings(); len(few) > fewRegions || mappings > d.mappings() {
			return nil, false
		}
	}
	return few, true
}

// mappings are those that Check asks for.
func (d *Devices) mappings() (n int) {
	for _, dev := range d.list {
		n += dev.Mappings()
	}
	return n
}

// CheckFew is Check of some regions. It asks for the mappings of each.
func (d *Devices) CheckFew(few []*cuda.Region) error {
	for _, r := range few {
		if err := r.Check(); err != nil {
			return fmt.Errorf("%w: %w", ErrDevice, err)
		}
	}
	return nil
}

// MomentEntries are for callers in C: by region, the number of its device from 1 on, 0 for host
// memory; and by device, how to record a moment.
func (d *Devices) MomentEntries() (byRegion []uint8, entries []Entry) {
	if d == nil {
		return nil, nil
	}
	byRegion = make([]uint8, len(d.regions))
	for i := range d.regions {
		byRegion[i] = uint8(d.Of(uint32(i)) + 1)
	}
	for _, dev := range d.list {
		f, arg := dev.MomentEntry()
		entries = append(entries, Entry{f, arg})
	}
	return byRegion, entries
}

// TakingMoments is cuda.Device's of all devices.
func (d *Devices) TakingMoments() (leave func()) {
	if d == nil {
		return func() {}
	}
	var all []func()
	for _, dev := range d.list {
		all = append(all, dev.TakingMoments())
	}
	return func() {
		for _, leave := range all {
			leave()
		}
	}
}

// Entry is cuda.Device's MomentEntry.
type Entry struct{ Function, Argument unsafe.Pointer }

// Order is a moment's place in the order in which an engine has taken them; 0 is the first.
func Order(m core.Moment) uint64 { return cuda.Order(uint64(m)) }

// Moment is what a stream of a region's device has been given up to now.
func (d *Devices) Moment(region uint32, stream uintptr) (core.Moment, error) {
	if d == nil || int(region) >= len(d.regions) || d.regions[region] == nil {
		return 0, fmt.Errorf("%w: region %d does not lie in device memory: only a device has streams", core.ErrInvalid, region)
	}
	m, err := d.regions[region].Device().Moment(stream)
	switch {
	case errors.Is(err, cuda.ErrMoments):
		err = fmt.Errorf("%w: %w", core.ErrOverload, err)
	case errors.Is(err, cuda.ErrCapturing):
		err = fmt.Errorf("%w: %w", core.ErrInvalid, err)
	case err != nil:
		err = fmt.Errorf("%w: %w", ErrDevice, err)
	}
	return core.Moment(m), err
}

// Await has tell called once, not from within Await: with nil when the moment has passed, else
// with the reason why nobody will know.
func (d *Devices) Await(m core.Moment, tell func(error)) {
	if d != nil {
		for _, dev := range d.list {
			if dev.Owns(uint64(m)) {
				dev.Await(uint64(m), tell)
				return
			}
		}
	}
	safe.Go("unknown moment", func() {
		tell(fmt.Errorf("%w: %#x is no moment of this agent: moments come from kvconn_moment", core.ErrInvalid, uint64(m)))
	})
}

func slot(ctx context.Context, dev *cuda.Device, dir cuda.Direction, owner core.AgentID) (*cuda.Slot, error) {
	if ctx.Err() == nil {
		return dev.Slot(ctx, dir, string(owner))
	}
	s, err := dev.TrySlot(dir, string(owner))
	if s == nil && err == nil {
		err = ctx.Err()
	}
	return s, err
}
