// D opens P's memory on GPUs. Its own devices copy out of it, to blocks on a device or in host memory.

package local

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/hostmem"
	"github.com/kvconn/kvconn/internal/fault"
)

// deviceBatch is how many times the bytes of other batches those from devices have: a copy's begin and end cost more.
const deviceBatch = 32

// opened is P's memory on devices, as each device of this process has it open. Bytes for blocks on a
// device are copied by that one; bytes for blocks in host memory come by pinned memory of the first.
type opened struct {
	t     *Transport
	peers []*cuda.Peer // by this process's devices
}

// opens makes an opened that has nothing open yet.
func (t *Transport) opens(p prefill) (memoryAccess, error) {
	if !t.places.any() {
		return nil, errors.New("it lies on a GPU, and no region of this agent does, so that this process starts no CUDA driver")
	}
	namespace, _ := strconv.ParseUint(p.pids, 10, 64) // P says this of itself: it is used only in texts of errors
	o := &opened{t: t}
	for _, d := range t.places.devices {
		o.peers = append(o.peers, d.Peer("prefill agent "+string(p.id), cuda.Process{ID: p.pid, Namespace: namespace}))
	}
	return o, nil
}

// lacks is the access to memory that P cannot share: D can open none of it.
type lacks struct{}

func (lacks) open(m *memory, _ *os.File) error {
	return fmt.Errorf("the prefill agent cannot share what it has on its devices: %s", strings.ToValidUTF8(string(m.handle), ""))
}
func (lacks) copy(*copier, *batch) (uint64, error) { return 0, errors.New("nothing is open") }
func (lacks) close()                               {}

// open implements memoryAccess.
func (o *opened) open(m *memory, file *os.File) error {
	a, err := parseAllocation(m)
	if err != nil {
		return err
	}
	for _, p := range o.peers {
		if err := p.Open(a, file); err != nil {
			return fmt.Errorf("region %q: %w", a.Region, err)
		}
	}
	return nil
}

// close implements memoryAccess. If a copy does not end, the memory stays open until the device is closed.
func (o *opened) close() {
	for _, p := range o.peers {
		if err := p.Close(); err != nil {
			o.t.cfg.Logger.Warn("memory of a prefill agent stays open", zap.Error(err))
		}
	}
}

// copy implements memoryAccess. It does not look at P's validity page. If it reads blocks too late, P does not say that it has
// kept them, and D throws the bytes away.
func (o *opened) copy(c *copier, b *batch) (done uint64, err error) {
	from := cursor{b.runs, b.off}
	for done < b.bytes {
		if b.in.ended.Load() {
			return done, errOver
		}
		c.into, _ = b.into.cut(c.into[:0], b.position+done, b.bytes-done, c.pairs)
		device, entries, n := o.t.places.alike(c.into)
		if c.into = c.into[:entries]; device >= 0 {
			err = o.toDevice(c, device, b, &from, n)
		} else {
			n, err = o.toHost(c, b, &from, n)
		}
		if err != nil {
			return done, err
		}
		done += n
		from.advance(n)
	}
	return done, nil
}

// toDevice copies the next bytes to blocks on a device.
func (o *opened) toDevice(c *copier, device int, b *batch, from *cursor, n uint64) error {
	c.from = from.cut(c.from[:0], n)
	return o.t.await(o.t.places.devices[device].Transfer(nameOf(b.in), cuda.FromPeer),
		cuda.Copy{Peer: o.peers[device], Runs: runsOf(c.from), To: runsOf(c.into)})
}

// toHost copies the next bytes, as many as a slot takes, to blocks in host memory.
func (o *opened) toHost(c *copier, b *batch, from *cursor, n uint64) (uint64, error) {
	slot, err := o.t.slot(0, cuda.FromDevice, b.in)
	if err != nil {
		return 0, err
	}
	defer slot.Release()
	n = min(n, uint64(len(slot.Bytes())))
	c.into, c.from = some(c.into, n), from.cut(c.from[:0], n)
	err = o.t.await(o.t.places.devices[0].Transfer(nameOf(b.in), cuda.FromDevice), cuda.Copy{Peer: o.peers[0], Slot: slot, Runs: runsOf(c.from)})
	if err == nil {
		err = c.spread(slot.Bytes()[:n])
	}
	return n, err
}

// nameOf says in errors of copies what they are for.
func nameOf(in *inbound) string { return "transfer " + strconv.Quote(in.id.Name()) }

// slot waits for pinned memory of a device.
func (t *Transport) slot(device int, to cuda.Direction, in *inbound) (*cuda.Slot, error) {
	ctx, cancel := context.WithTimeout(t.ctx, t.cfg.StallTimeout)
	defer cancel()
	slot, err := t.places.devices[device].Slot(ctx, to, string(in.source.id))
	switch {
	case err != nil && t.ctx.Err() != nil:
		return nil, errClosed
	case err != nil:
		return nil, fmt.Errorf("a slot of pinned memory: %w", err)
	}
	return slot, nil
}

// await starts a copy and waits until its event has passed. The device bounds that. If the device does not end a copy to blocks, the
// error wraps core.ErrMayLand. A device that has failed so says the same error for copies that it never had, and those that it has
// read into pinned memory: only MayCopy tells them apart.
func (t *Transport) await(tr *cuda.Transfer, one cuda.Copy) error {
	ended := make(chan error, 1)
	one.Done = func(err error) { ended <- err }
	tr.Start(one)
	if fault.On("local-device-early") {
		return nil
	}
	err := <-ended
	toBlocks := one.Slot == nil || one.Peer == nil
	if errors.Is(err, cuda.ErrStuck) && (fault.On("local-all-stuck") || toBlocks && tr.MayCopy() && !fault.On("local-none-stuck")) {
		t.receiver.mayStill(one.To, one.Runs)
		return fmt.Errorf("%w: %w", core.ErrMayLand, err)
	}
	return err
}

// spread copies bytes to the blocks of c.into. The engine may have freed the blocks' memory: then spread returns an error.
func (c *copier) spread(bytes []byte) (err error) {
	was := debug.SetPanicOnFault(true)
	defer debug.SetPanicOnFault(was)
	defer func() {
		if p := recover(); p != nil {
			if _, is := p.(interface{ Addr() uintptr }); !is {
				panic(p)
			}
			err = c.unwritable()
		}
	}()
	for _, to := range c.into {
		bytes = bytes[copy(unsafe.Slice(*(**byte)(unsafe.Pointer(&to.base)), to.len), bytes):]
	}
	return nil
}

// unwritable says which region of D's is not there.
func (c *copier) unwritable() error {
	list := make([]hostmem.Span, len(c.into))
	for i := range c.into {
		list[i] = hostmem.Span{Base: uint64(c.into[i].base), Length: uint64(c.into[i].len)}
	}
	return hostmem.Fault(c.t.layout.Regions, list, true, syscall.EFAULT)
}

// stage copies a batch of P's host memory, parts of which go to blocks on devices. It reads such a part into pinned
// memory, in the way in which it reads the others into blocks, and the device copies it from there.
func (c *copier) stage(b *batch) (done uint64, err error) {
	from, proven := cursor{b.runs, b.off}, true
	for done < b.bytes {
		if b.in.ended.Load() {
			return done, errOver
		}
		c.into, _ = b.into.cut(c.into[:0], b.position+done, b.bytes-done, c.pairs)
		device, _, n := c.t.places.alike(c.into)
		part := *b
		part.runs, part.off = from.runs, from.off
		if device < 0 {
			part.position, part.bytes = b.position+done, n
			n, err = c.read(&part)
		} else {
			n, err = c.toDevice(device, &part, b.position+done, n)
		}
		done += n
		if err != nil {
			return done, err
		}
		b.past, proven = part.past, proven && part.proven
		from.advance(n)
	}
	b.proven = proven
	return done, nil
}

// toDevice copies the next bytes of a batch, as many as a slot takes, to blocks on a device.
func (c *copier) toDevice(device int, part *batch, position, n uint64) (uint64, error) {
	slot, err := c.t.slot(device, cuda.ToDevice, part.in)
	if err != nil {
		return 0, err
	}
	defer slot.Release()
	n = min(n, uint64(len(slot.Bytes())))
	into := part.into
	part.into, part.position, part.bytes = slotOf(slot, n), 0, n
	if _, err := c.read(part); err != nil {
		var bad *unreadable
		if errors.As(err, &bad) {
			bad.position += position
		}
		return 0, err
	}
	c.into, _ = into.cut(c.into[:0], position, n, c.pairs) // c.read has overwritten it
	// If c.into has room for fewer pieces than the n bytes have, the caller's cut was as short, and so was n.
	return n, c.t.await(c.t.places.devices[device].Transfer(nameOf(part.in), cuda.ToDevice), cuda.Copy{Slot: slot, Runs: runsOf(c.into)})
}

// slotOf makes a destination out of the first n bytes of a slot.
func slotOf(slot *cuda.Slot, n uint64) *destination {
	at := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(slot.Bytes()))))
	return &destination{runs: []run{{at, n}}, ends: []uint64{n}, total: n}
}

// stuck is called for a copy that a device does not end. Its bytes may land at any time, so the engine must not hear of an end
// of the transfer: Revoke waits until Close, and Close waits for CloseGrace.
func (r *receiver) stuck(b *batch, err error) {
	in, src := b.in, b.in.source
	r.mu.Lock()
	in.stuck = true
	r.unwatch(b)
	src.flying--
	src.owe(b.finished)
	r.halt(in)
	src.calm()
	src.pay()
	src.link.say((&ending{cause: overFailed, text: "the decode engine's device does not answer"}).bytes(in.grant))
	link := src.link
	r.mu.Unlock()
	link.flush()
	r.t.cfg.Logger.Error("the blocks of a transfer may be written for ever", zap.String("transfer_id", string(in.id)), zap.Error(err))
}

// mayStill notes the regions into which a device may still copy. The copy goes to the runs of to or, if to is nil, to runs.
func (r *receiver) mayStill(to, runs []cuda.Run) {
	if to == nil {
		to = runs
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, at := range to {
		r.mayLand[regionAt(r.t.layout, uint64(at.Addr))] = true
	}
}

// settled waits until a channel is closed, and says whether it was: Close waits for copies of a device
// that does not answer only so long.
func (t *Transport) settled(quiet <-chan struct{}) bool {
	select {
	case <-quiet:
		return true
	case <-t.late:
	}
	select {
	case <-quiet: // both may have come
		return true
	default:
		return false
	}
}
