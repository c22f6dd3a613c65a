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
//	cuda.Devices() ([]Info, error)                     by UUID and PCI place, with what each can do
//	cuda.Locate(addr, bytes) (Location, error)         which device, which kind; refused kinds are errors
//	cuda.Open(ordinal, Options) (*Device, error)       an agent's handle on one device: moments, ring, streams
//	device.Register(name, addr, bytes) (*Region, error)
//	device.RegisterAll(names, []Place) ([]*Region, error)   of a Locator, which asks for each mapping once
//	region.Check() error                               is it still the same memory? Before a transfer is armed
//	device.Check() error                               the same of all regions, each mapping once
//	device.Moved() bool                                a quick look whether Check would say no
//	device.Look() (*Renewal, error)                    finds what an engine has mapped anew; Take takes it, between transfers only
//	region.Export() (*os.File, offset, error)          as a dma-buf, for RDMA
//	device.Flush() error                               after a card has written, before that is told; Flushable
//	region.Close()
//
// Register keeps the allocations under a region with their buffer ids, which CUDA never gives
// twice. Memory that was freed, or mapped anew (an engine that slept), has another id: Check
// names the region. A device copies from and to registered memory only. A copy that was begun in other memory
// than lies there now ends with a ChangedError: it is looked for before the device gets the copy, and again
// when the copy has ended, since the memory may go meanwhile.
//
// # Moments
//
// A moment is "all that this stream has been given up to now". It has passed when the device
// has done all of that.
//
//	device.Moment(stream) (uint64, error)   records it; cheap, allocates nothing, never 0
//	device.Owns(moment) bool                an agent with several devices asks each
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
// Many small copies go in one launch of a kernel (internal/driver/copy.ptx), which the driver compiles when the device is opened; others,
// and all where it does not take the kernel (device.NoKernel says why), in batches or one by one.
//
// Copies go between device runs and slots: pieces of a ring of pinned memory that is allocated
// once (Options.RingBytes, Options.SlotBytes). Each direction may hold three quarters of the
// slots, so one cannot starve the other.
//
//	device.Slot(ctx, direction, owner) (*Slot, error)   waits for a slot; TrySlot does not
//	slot.Bytes() []byte                          pinned, for readv and writev by address
//	slot.Release()                               at any time: if a copy uses it, it is free when that has ended
//
//	device.Transfer(name, direction) *Transfer   FromDevice: P reads; ToDevice: D writes
//	transfer.Start(Copy{Slot, At, Runs, Done})
//	transfer.Fence() error                       ends it: no copy of it reads or lands any more
//
// Start returns at once. Done is called once for each Copy: nil when the copy's event has
// passed. For ToDevice the bytes are then in the device's memory, and every kernel that is
// launched from now on sees them; for FromDevice they are in the slot. Done is called with
// no lock held and must return soon; it may use everything here. What the copy
// has to come after, as a moment of its blocks, has passed before Start. Runs must stay as they are until
// Done. Runs that lie outside of registered regions are an error.
//
// SlotBytes is the size of every slot. Prepare pins the ring; a transport calls it when regions are
// registered, so that a failure is seen then.
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
// Options.StallTimeout, the device counts as failed, and the copies and Fence end with ErrStuck: then
// nobody knows whether a copy still lands, and the blocks must not be given back.
//
// # Memory of another process
//
// Two processes of one host need no network between their devices: D opens P's memory and copies it.
//
//	at P: device.Share() (*Shared, error)              the allocations, each with a handle, or with a shared.File for the peer's socket
//	      shared.Check() error                         is it still that memory? After D has read, before D counts it
//	at D: device.Peer(name, process) *Peer             opens nothing yet; P tells its ThisProcess()
//	      peer.Open(Allocation, file) error            for reading; what is open already stays so. A *RefusedError has the reason
//	      peer.Close() error                           closes all; the next Open begins anew
//	      Copy{Peer, Runs, To, Done}                   to the device, in a Transfer FromPeer: needs no pinned memory
//	      Copy{Peer, Runs, Slot, At, Done}             to a slot, in a Transfer FromDevice, for blocks in host memory
//
// Runs are told by P's addresses; what P has not opened to D is refused. Nobody writes to a peer's memory. One Copy has best some
// hundred runs. D's Fence waits for D's own copies, and P's process may stand still meanwhile.
//
// A load goes like this. P waits for the moment of its blocks, and only then tells D where they are: so no event is shared between processes. D
// copies after its own moment. When the copies have ended D asks P, and P looks whether it still holds the offer and whether Shared.Check
// is nil. D counts what it has read after P's yes, and throws it away after a no, or when P does not answer.
//
// P's engine may free its memory, or sleep, at any time: CUDA tells nobody. Of memory that cudaMalloc gave CUDA leaves undefined what
// D reads then. Memory that was mapped by handles lives on, with its old bytes, as long as D has it open, so a sleeping engine's GPU
// gets nothing back. Both are harmless to what D counts: an ID is never given twice, so if P finds the IDs of Share again when D's copies have ended,
// the memory was that one all the time. That D keeps nothing for long is P's word: an agent looks each second whether Check is still nil,
// else tells its peers to Close, and they Open what the next Share has. Before an agent ends it has its peers Close, and waits for them in
// bounded time; only then its engine may free what was shared. D also closes when P's process has ended: what it reads from then on nobody says
// yes to.
//
// P's memory may lie on another GPU than D's blocks, if CUDA lets D's GPU reach it. That is tried by opening it, not looked up, since a process does
// not see the GPUs that are hidden from it.
//
// # Errors
//
// *driver.Error has the call, its CUresult, what it was about, and the remedy. After a sticky
// one (an illegal address, a lost device, a destroyed context) the device has failed for good: all copies
// and awaited moments end with that reason, new ones get it, and Device.Err tells it. The
// host process lives on. Close may be called while copies run: from Closing on it is bounded by
// Options.CloseTimeout, and a copy that has not ended in half of that time counts as stuck.
package cuda
