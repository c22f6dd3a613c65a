// Package local carries KV blocks between two agents of one host: D copies from P's memory into its
// own, once. D maps P's memory where P can hand it out (memory.go, views.go), and calls the
// kernel's process_vm_readv where not.
//
// P listens on an abstract unix socket, which leaves nothing in the file system. D connects to
// it. Each side proves that it has the ticket, which goes over no socket. Then P names the address
// of a random value, and D reads it out of the process that the kernel names as P's and shows it.
// So it is proved that the other end is P, and that D may read P's memory. If D may not, the
// reason names the remedy, and the pair takes another transport. If all of P's regions are in memory that
// P hands out, D needs no leave: that both have the ticket is proof enough for memory that comes over
// the same socket.
//
// D pulls. P says which of its memory a transfer is in (frame.go), and D's own plan says where
// the bytes go (kv/plan.go). P trusts no address, since it writes nothing; D uses P's addresses
// for no process but P's. D reports a transfer only if P had kept its blocks when D had read them.
// Each write has a gate for that: a page of P's that D reads behind each batch of blocks (gate.go). If P stops the write, it
// closes the gate. Then D finds behind a batch that it came too late, also when D's process was stopped just before. P waits for
// D's word that no batch is under way, for StopGrace at most. Where D does not read P's process, or P's copies are of
// devices, D asks P instead when it has copied all, and a P that is gone does not say yes. P reports a transfer when D says that it has.
//
// D's fence is its own: Revoke waits for the batches that are under way and no others begin.
// A socket's end, or that of the process behind it, ends the transfers that went over it. If the kernel does not end a
// batch, that transfer alone has no end, and the link ends (hung.go).
//
// Memory of P's on a GPU is opened by CUDA's handles (shared.go, opened.go): once a link, allocation and device of D's, and closed
// when the link ends and no copy uses it. D's device copies it to blocks there, or by pinned memory to blocks in host memory; bytes of P's
// host memory come to D's device by pinned memory too. A copy has ended when its event has passed. P looks whether its memory
// is what it has told before it says that it has kept a transfer, and each second; if it is not, the link ends, and the two meet
// anew. What D cannot open has the pair take another transport, and so has a D without a region on a device, which starts no CUDA.
package local
