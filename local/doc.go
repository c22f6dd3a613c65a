// Package local carries KV blocks between two agents of one host: D copies from P's memory into its
// own, once. D maps the memory of P that P can hand out (memory.go, views.go), and reads the rest
// by the kernel's process_vm_readv.
//
// P listens on an abstract unix socket, which leaves nothing in the file system. D connects to
// it. Each side proves that it has the ticket, without sending it. Then P names the address of a random
// value. D reads this value out of the process that the kernel names as P's, and shows it to P. This proves
// that the process at the other end is P's, and that D may read P's memory. If D may not, the reason names
// the remedy, and the pair takes another transport. If all of P's regions are in memory that P hands out, D
// needs no permission to read P's process: since both have the ticket, D may use memory that comes over the
// same socket.
//
// D pulls: P says in which of its memory a transfer is (frame.go), and D's own plan says where the bytes go (kv/plan.go). P need trust
// no address, since it writes nothing; D uses P's addresses for no process but P's. D reports a transfer only if P still had its
// blocks when D had read them. Each write has a validity page for that, which D reads after each batch of blocks (validity_page.go).
// If P stops the write, it invalidates the page. Then D finds after a batch that it came too late, even if D's process was stopped
// just before. P waits until D says that no batch is under way, for StopGrace at most. If D does not read P's process, or if devices
// make the copies, D reads no page. Instead it asks P when it has copied all, and a P that is gone does not say yes. P reports a
// transfer when D says that D has reported it.
//
// D's fence is its own: Revoke lets no batch begin, and waits for the batches that are under way.
// If a socket or the process behind it ends, the transfers that went over it end. If the kernel does not end a
// batch, the link ends, and all its transfers but that batch's end (hung.go).
//
// D opens P's memory on a GPU by CUDA's handles (shared.go, opened.go): each allocation once for each link and each device of D's. D
// closes it when the link has ended and no copy uses it. D's device copies the bytes to blocks on the device, or by way of pinned
// memory to blocks in host memory. Bytes of P's host memory come to D's device by way of pinned memory too. A copy has ended when its
// event has passed. Each second, and before it says that it has kept a transfer's blocks, P looks whether its memory is still what it
// has told D. If it is not, the link ends, and the two meet anew. If D cannot open P's memory, the pair takes another transport. It
// also does so if D has no region on a device, since D then does not start CUDA.
package local
