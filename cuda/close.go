// Closing a device is bounded, also when the driver does not answer: what cannot be ended is told.

package cuda

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvconn/kvconn/internal/safe"
)

// Closing starts the time that Close has. Only the first call counts, and Close itself makes one.
// If a caller closes a transport before the device, it calls Closing before both. If a copy has
// not ended after half of the time, it counts as one that never ends: the device fails, and the
// transport does not wait for the copy any longer. Nor does it wait for a flush.
func (d *Device) Closing() {
	d.closing.Do(func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.until = time.Now().Add(d.o.CloseTimeout)
		d.closeTimer = time.AfterFunc(d.o.CloseTimeout/2, func() {
			defer safe.Recover("cuda closing")
			close(d.halfway)
			if n := d.busy(); n > 0 {
				d.stall(fmt.Errorf("%d copies have not ended within %s of a close", n, d.o.CloseTimeout/2))
			}
		})
	})
}

// busy is how many copies the driver has.
func (d *Device) busy() (n int) {
	for _, q := range d.made() {
		q.mu.Lock()
		n += q.copies + len(q.lost)
		q.mu.Unlock()
	}
	return n
}

// Close ends all copies and awaited moments, and waits, at most CloseTimeout from Closing on,
// until none is under way, all calls of the driver have returned and all slots were released. Then Close gives
// the driver back all that the device has of it. If a copy, a call or a slot does not end, the error says so and Close
// gives nothing back, since the driver may still use it. A second call waits for the first one and returns the same error.
func (d *Device) Close() error {
	d.Closing()
	d.closes.Do(func() { _, d.closeErr = safe.Try("cuda close", d.close) })
	return d.closeErr
}

func (d *Device) close() error {
	d.shut()
	defer d.closeTimer.Stop()
	deadline := d.lastWait()
	defer deadline.Stop()
	ended := make(chan struct{})
	safe.Go("cuda close", func() {
		d.end()
		<-d.left // a call may have made queues
		d.prepare.Do(func() { d.prepareErr = d.over() })
		d.preparePeer.Do(func() { d.preparePeerErr = d.over() })
		d.end()
		d.wg.Wait()
		<-d.ring.empty()
		close(ended)
	})
	select {
	case <-ended:
	case <-deadline.C:
		safe.Go("cuda close", func() { // a queue's lock is held while the driver is called
			if n := d.busy(); n > 0 { // these began after Closing looked: nobody would ever tell of them
				d.stall(fmt.Errorf("%d copies have not ended at the end of a close", n))
			}
		})
		what := "a copy, a wait in the driver or a slot has not ended"
		if !d.hasLeft() {
			what = "a call of the driver has not returned"
		}
		return fmt.Errorf("closing CUDA device %d: after %s %s; its pinned memory stays", d.info.Ordinal, d.o.CloseTimeout, what)
	}
	if n := d.busy(); n > 0 { // copies of a peer's memory, which have no slot
		return fmt.Errorf("closing CUDA device %d: nobody knows whether %d copies have ended; what they may use stays", d.info.Ordinal, n)
	}
	given := make(chan error, 1)
	safe.Go("cuda close", func() {
		_, err := safe.Try("cuda close", d.releaseAll)
		given <- err
	})
	late := d.lastWait()
	defer late.Stop()
	select {
	case err := <-given:
		return err
	case <-late.C:
	case <-d.hasty:
	}
	return fmt.Errorf("closing CUDA device %d: after %s the driver has not taken back what the device has", d.info.Ordinal, d.o.CloseTimeout)
}

// lastWait is the timer of one wait of Close. The transports may have used up all of Close's time, so each wait has at least a
// quarter of CloseTimeout or 250 ms, whichever is less.
func (d *Device) lastWait() *time.Timer {
	return time.NewTimer(max(time.Until(d.until), min(d.o.CloseTimeout/4, 250*time.Millisecond)))
}

// releaseAll gives the driver back all that the device has of it. The caller makes sure that no copy and no call uses this any more.
func (d *Device) releaseAll() error {
	for _, q := range d.made() {
		q.drv.Close()
	}
	err := d.closePeers()
	if d.memory != nil {
		err = errors.Join(err, d.drv.FreeRing(d.memory))
	}
	_, closeErr := d.drv.Close()
	if d.Err() != nil {
		return nil // on a failed device these calls fail too, and the driver takes all back when the context ends
	}
	return errors.Join(err, closeErr)
}

// end ends all copies, slots and moments that somebody waits for, since the device is closed.
func (d *Device) end() {
	d.endAll(fmt.Errorf("CUDA device %d: %w", d.info.Ordinal, ErrClosed))
	for _, q := range d.made() {
		q.stop()
	}
}

// shut has no short call begin any more.
func (d *Device) shut() {
	d.entered.Lock()
	defer d.entered.Unlock()
	d.closed.Store(true)
	if d.calls == 0 {
		close(d.left)
	}
}

func (d *Device) hasLeft() bool {
	select {
	case <-d.left:
		return true
	default:
		return false
	}
}
