// Package local carries KV blocks between two agents of one host: D copies from P's memory into its
// own, once. D maps those of P's memories that P can hand out (memory.go, views.go), and reads the
// others by the kernel's process_vm_readv.
//
// P listens on an abstract unix socket, which leaves nothing in the file system. D connects to
// it. Each side proves that it has the ticket, which goes over no socket. Then P names the address
// of a random value. D reads this value out of the process that the kernel names as P's, and shows it to P.
// This proves that the other end is P, and that D may read P's memory. If D may not, the
// reason names the remedy, and the pair takes another transport. If all of P's regions are in memory that
// P hands out, D needs no leave to read P's process: since both have the ticket, D may use memory that
// comes over the same socket.
//
// D pulls. P says which of its memory a transfer is in (frame.go), and D's own plan says where
// the bytes go (kv/plan.go). P trusts no address, since it writes nothing; D uses P's addresses
// for no process but P's. D reports a transfer only if P still had its blocks when D had read them.
// Each write has a validity page for that, which D reads after each batch of blocks (validity_page.go). If P stops the write, it
// invalidates the page. Then D finds after a batch that it came too late, also if D's process was stopped just before. P waits for
// D's word that no batch is under way, for StopGrace at most. If D does not read P's process, or devices make the copies,
// D instead asks P when it has copied all; a P that is gone does not say yes. P reports a transfer when D says that D has reported it.
//
// D's fence is its own: Revoke lets no batch begin, and waits for the batches that are under way.
// If a socket ends, or the process behind it, the transfers that went over it end. If the kernel does not end a
// batch, only that transfer does not end, and the link ends (hung.go).
//
// D opens P's memory on a GPU by CUDA's handles (shared.go, opened.go): each allocation once for each link and each device of D's.
// D closes it when the link has ended and no copy uses it. D's device copies it to blocks on the device, or by pinned memory to blocks
// in host memory. Bytes of P's host memory come to D's device by pinned memory too. A copy has ended when its event has passed.
// Each second, and before it says that it has kept a transfer, P looks whether its memory is still what it has told D. If it is not,
// the link ends, and the two meet anew. If D cannot open P's memory, the pair takes another transport. It also does if D has no region
// on a device, since D then does not start CUDA.
package local
