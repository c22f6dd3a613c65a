// Package cuda moves KV caches between the memory of CUDA devices and host memory, and tells
// when each copy has ended. It does not know core's transfers: a transport uses it for the
// regions that lie on a device.
//
// The first call of one of the functions below opens libcuda. A process without device regions
// makes no such call, so it neither opens nor starts a driver. The package makes no context: a
// device is usable when its primary context is active, as it is once the engine has memory on
// the device. The variable KVCONN_LIBCUDA may name another library.
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
//	device.Look() (*Remapping, error)                  finds what an engine has mapped anew; Take takes it, between transfers only
//	region.Export() (*os.File, offset, error)          as a dma-buf, for RDMA
//	device.Flush() error                               after a card has written, before that is told; Flushable
//	region.Close()
//
// Register keeps the allocations under a region with their buffer ids, which CUDA never gives
// twice. Memory that was freed, or mapped anew (an engine that slept), has another id: Check
// names the region. A device copies from and to registered memory only. If other memory lies at a copy's
// addresses than when it was begun, the copy ends with a ChangedError. The package compares the memory before the
// device gets the copy, and again when the copy has ended, since the engine may free the memory meanwhile.
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
// Moments of one stream pass in order: if one has passed, all before it have. Their number
// is bounded (Options.Moments): if so many have not passed, Moment is an error. While a
// stream is being captured into a graph it has no moments: ErrCapturing.
//
// For each stream with an awaited moment one goroutine waits in the driver for an event, and
// sleeps there. So nobody polls, and nothing is queued on the device. A host function behind
// the event, on a stream of ours, would put waits into the device's queues instead. Streams
// share these queues (CUDA_DEVICE_MAX_CONNECTIONS, which some engines set to 1), so our wait
// for one stream could hold up the engine's work on another.
//
// # The mover
//
// One launch of a kernel (internal/driver/copy.ptx) makes many small copies. The driver compiles the kernel when the device is opened.
// Other copies go in batches or one by one. If the driver does not take the kernel (device.NoKernel says why), all copies go in this
// way.
//
// Copies go between runs of device memory and slots. A slot is a piece of a ring of pinned
// memory, which is allocated once (Options.RingBytes, Options.SlotBytes). Each direction may
// hold three quarters of the slots, so one cannot starve the other.
//
//	device.Slot(ctx, direction, owner) (*Slot, error)   waits for a slot; TrySlot does not
//	slot.Bytes() []byte                          pinned, for readv and writev by address
//	slot.Release()                               at any time: if a copy uses it, it is free when that has ended
//
//	device.Transfer(name, direction) *Transfer   FromDevice: P reads; ToDevice: D writes
//	transfer.Start(Copy{Slot, At, Runs, Done})
//	transfer.MayCopy() bool                      after ErrStuck: has the device a copy of it still?
//
// Start returns at once. Done is called once for each Copy: nil when the copy's event has
// passed. For ToDevice the bytes are then in the device's memory, and every kernel that is
// launched from now on sees them; for FromDevice they are in the slot. Done is called with
// no lock held and must return soon; it may call everything of this package. If a copy has to come after
// a moment, such as that of its blocks, the caller calls Start when the moment has passed. Runs must stay as they
// are until Done. Runs that lie outside of registered regions are an error.
//
// SlotBytes is the size of every slot. Prepare pins the ring; a transport calls it when regions are
// registered, so that a failure is seen then.
//
// For each frame P calls Slot and Start. When Done was called, P calls writev from the slot, and
// then Release. If P has several slots in flight, the copy engine works while the network sends.
//
// D calls Slot when the socket has bytes, then readv and Start. In Done it counts the bytes as
// landed, and then calls Release. D should not keep a slot while the network has nothing.
//
// Before a transport gives the blocks of a transfer back, it waits for the Done of each of the transfer's
// copies. This takes no longer than to copy the ring. If the device does not answer within
// Options.StallTimeout, the device counts as failed, and its copies end with ErrStuck. Then nobody knows
// whether a copy that the device has still lands. As long as MayCopy is true, the transport must not give the
// blocks back.
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
// The runs have P's addresses. The package refuses a run in memory that D has not opened. Nobody writes to a peer's memory. A Copy
// should have some hundred runs. D waits for its own copies only, so P's process may be stopped meanwhile.
//
// A load goes like this. P waits for the moment of its blocks, and only then tells D where they are: so the processes share no event. D
// copies after its own moment. When the copies have ended, D asks P whether it still holds the offer and whether Shared.Check is nil. If P
// says yes, D counts the bytes that it has read. If P says no, or does not answer, D throws them away.
//
// P's engine may free its memory, or sleep, at any time: CUDA tells nobody. If the memory was cudaMalloc's, CUDA leaves undefined what D
// reads then. Memory that was mapped by handles lives on, with its old bytes, as long as D has it open: so the sleep of P's engine frees
// nothing until D closes it. In both cases D counts no wrong bytes: CUDA never gives an ID twice, so if P finds the IDs of Share again
// when D's copies have ended, the memory was the same all the time. P sees to it that D does not keep memory open for long. Each second
// P looks whether Check is still nil. If not, P tells its peers to Close, and they Open what the next Share has. Before P's agent ends,
// it has its peers Close, and waits for them in bounded time. Only then may its engine free what was shared. D also closes when P's
// process has ended, since nobody then says yes to what D reads.
//
// P's memory may lie on another GPU than D's blocks, if CUDA lets D's GPU reach it. D finds out only by opening the memory, since a
// process does not see the GPUs that are hidden from it.
//
// # Errors
//
// *driver.Error has the call, its CUresult, what it was about, and the remedy. After a sticky error (an
// illegal address, a lost device, a destroyed context) the device has failed for good. All copies and
// awaited moments end with that reason, new ones get it, and Device.Err tells it. The host process lives
// on. Close may be called while copies run. From the call of Closing on, Close takes
// Options.CloseTimeout at most, and a copy that has not ended in half of that time counts as stuck.
package cuda
