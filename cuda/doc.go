// Package cuda moves KV caches between the memory of CUDA devices and host memory, and says
// when. It knows no transfers of core's: a transport uses it for the regions that lie on a
// device.
//
// libcuda is opened at run time when the first of these functions is called, never before:
// so a process without device regions has no driver opened and none started. No context is
// made: a device is usable when its primary context is active, which is so once the engine
// has memory there. KVCONN_LIBCUDA names another library.
//
// # Where memory is
//
//	cuda.Locate(addr, bytes) (Location, error)         which device, which kind; refused kinds are errors
//	cuda.Open(ordinal, Options) (*Device, error)       an agent's handle on one device: moments, ring, streams
//	device.Register(name, addr, bytes) (*Region, error)
//	region.Check() error                               is it still the same memory? Before a transfer is armed
//	region.Export() (*os.File, offset, error)          as a dma-buf, for RDMA
//	region.Close()
//
// Register keeps the allocations under a region with their buffer ids, which CUDA never gives
// twice. Memory that was freed, or mapped anew (an engine that slept), has another id: Check
// names the region. A device copies from and to registered memory only.
//
// # Moments
//
// A moment is "all that this stream has been given up to now". It has passed when the device
// has done all of that.
//
//	device.Moment(stream) (uint64, error)   records it; cheap, allocates nothing, never 0
//	device.Passed(moment) (bool, error)     does not wait
//	device.Await(moment, tell func(error))  returns at once; tell is called once: nil when it has passed
//
// Moments of one stream pass in order, so the newest one that has passed settles all before
// it. Their number is bounded (Options.Moments): if so many have not passed, Moment is an
// error. While a stream is being captured into a graph it has no moments: ErrCapturing.
//
// For each stream with an awaited moment one goroutine waits in the driver on an event that
// blocks: no polling, and nothing is queued on the device. The other way, a host function
// behind the event on a stream of ours, would put waits into the device's queues. Streams
// share those (CUDA_DEVICE_MAX_CONNECTIONS, which some engines set to 1), and so our wait for
// one stream could hold up the engine's work on another.
//
// # The mover
//
// Copies go between device runs and slots: pieces of a ring of pinned memory that is allocated
// once (Options.RingBytes, Options.SlotBytes). Each direction may hold three quarters of the
// slots, so one cannot starve the other.
//
//	device.Slot(ctx, direction) (*Slot, error)   waits for a slot; TrySlot does not
//	slot.Bytes() []byte                          pinned, for readv and writev by address
//	slot.Release()                               at any time: if a copy uses it, it is free when that has ended
//
//	device.Transfer(name, direction) *Transfer   FromDevice: P reads; ToDevice: D writes
//	transfer.Start(Copy{Slot, At, Runs, After, Done})
//	transfer.Fence() error                       ends it: no copy of it reads or lands any more
//
// Start returns at once. Done is called once for each Copy: nil when the copy's event has
// passed. For ToDevice the bytes are then in the device's memory, and every kernel that is
// launched from now on sees them; for FromDevice they are in the slot. Done is called with
// no lock held and must return soon; it may use everything here. With After, a copy is given
// to the device when that moment has passed and not before. Runs must stay as they are until
// Done. Runs that lie outside of registered regions are an error.
//
// P, for each frame: Slot, Start, and when Done was called writev from the slot, Release. Several
// slots in flight keep the copy engine busy while the network sends.
//
// D: Slot when the socket has bytes, readv, Start, and count the bytes as landed in Done;
// then Release. A slot should not be kept while the network has nothing.
//
// Fence takes back the copies that the device does not have yet, and waits for the others:
// not longer than the ring takes to copy. It may be called from Done. Done may be called
// after Fence has returned, for copies that have ended. If the device does not answer within
// Options.StallTimeout, Fence is an error: then nobody knows whether a copy still lands, the
// device counts as failed, and the blocks must not be given back.
//
// # Errors
//
// *driver.Error has the call, its CUresult, what it was about, and the remedy. After a sticky
// one (an illegal address, a lost device, a destroyed context) the device has failed for good: all copies
// and awaited moments end with that reason, new ones get it, and Device.Err tells it. The
// host process lives on. Close may be called while copies run.
package cuda
