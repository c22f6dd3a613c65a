// Moments are recorded on an engine's streams. For each stream with an awaited one, one goroutine waits and tells.

package cuda

import (
	"fmt"
	"slices"
	"unsafe"

	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/safe"
)

// awaited is a moment whose passing somebody wants to hear of.
type awaited struct {
	moment uint64
	tell   func(error)
}

func (a *awaited) end(err error) {
	defer safe.Recover("cuda await") // else nobody would hear of the other moments
	a.tell(err)
}

// streamWaits are the awaited moments of one stream, the oldest first; Device.mu guards them.
type streamWaits struct {
	list    []awaited
	running bool // a goroutine waits for them
}

// mostAwaited bounds what is awaited of one stream.
const mostAwaited = 1 << 16

// streamOf is the place of a moment's stream among the handle's streams.
func streamOf(moment uint64) uint8 { return uint8(moment >> 48) }

// Order is a moment's place among all moments of the process, in the order in which they were
// recorded.
func Order(moment uint64) uint64 { return moment & (1<<48 - 1) }

// Moment records what the stream has been given up to now.
func (d *Device) Moment(stream uintptr) (uint64, error) {
	if !d.enter() {
		return 0, d.over()
	}
	defer d.leave()
	if fault.On("gpu-wrong-stream") {
		stream = 0
	}
	m, err := d.drv.Moment(stream)
	if err != nil {
		d.suspect(err)
	}
	return m, err
}

// MomentEntry is Moment for callers in C: a function of type
// struct { uint32_t code, call; } (*)(void *, uintptr_t stream, uint64_t *moment), and its
// first argument. Before Close is called, TakingMoments tells of callers that are in the function.
func (d *Device) MomentEntry() (function, argument unsafe.Pointer) { return d.drv.MomentEntry() }

// TakingMoments counts a call of MomentEntry's function that has not returned, until leave is called. No other begins. It is called
// before Close.
func (d *Device) TakingMoments() (leave func()) {
	d.entered.Lock()
	defer d.entered.Unlock()
	d.calls++ // also on a device that has failed
	return d.leave
}

// Owns says whether a moment is one of this handle's. The handle knows nothing of other handles' moments, not
// even on the same device.
func (d *Device) Owns(moment uint64) bool { return d.drv.Owns(moment) }

// Await arranges that tell is called once, and not from within Await: with nil when the moment
// has passed, else with the reason why nobody will know.
func (d *Device) Await(moment uint64, tell func(error)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.over(); err != nil {
		safe.Go("cuda", func() { tell(err) })
		return
	}
	w := d.waits[streamOf(moment)]
	if w == nil {
		w = &streamWaits{}
		d.waits[streamOf(moment)] = w
	}
	if len(w.list) == mostAwaited {
		err := fmt.Errorf("%d moments of one stream of CUDA device %d are awaited: the engine's stream stands still", mostAwaited, d.info.Ordinal)
		safe.Go("cuda", func() { tell(err) })
		return
	}
	i, _ := slices.BinarySearchFunc(w.list, moment, func(a awaited, m uint64) int {
		if a.moment <= m {
			return -1
		}
		return 1
	})
	w.list = slices.Insert(w.list, i, awaited{moment, tell})
	if !w.running {
		w.running = true
		d.goRun(func() { d.await(w) })
	}
}

// await waits for a stream's moments until none is left. A moment that has passed settles the
// older ones.
func (d *Device) await(w *streamWaits) {
	for {
		d.mu.Lock()
		if len(w.list) == 0 {
			w.running = false
			d.mu.Unlock()
			return
		}
		oldest := w.list[0].moment
		d.mu.Unlock()
		err := d.drv.Await(oldest)
		if err != nil {
			d.suspect(err)
		}
		d.mu.Lock()
		n := 0
		for n < len(w.list) && (w.list[n].moment == oldest || err == nil && w.list[n].moment < oldest) {
			n++
		}
		settled := slices.Clone(w.list[:n])
		w.list = slices.Delete(w.list, 0, n)
		d.mu.Unlock()
		for _, a := range settled {
			a.end(err)
		}
	}
}

// endAwaits tells all who wait for a moment why they wait in vain.
func (d *Device) endAwaits(err error) {
	d.mu.Lock()
	var left []awaited
	for _, w := range d.waits {
		left = append(left, w.list...)
		w.list = nil
	}
	d.mu.Unlock()
	for _, a := range left {
		a.end(err)
	}
}
