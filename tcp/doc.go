// Package tcp carries KV blocks over TCP: P sends from its registered memory
// and D receives straight into its own, without a copy in user space.
//
// D opens the connections ("streams"), several to a peer, to P's one listening port, so
// that only P must be reachable. A stream's first frame shows the ticket that P gave D
// over the control plane. If it shows no ticket of an admitted peer, P closes the stream.
// P sends a transfer in frames, spread over D's streams as each of them has room.
//
// P uses as many streams as make its transfers faster (stream_tuner.go), and asks D to open more.
//
// Streams are numbered. When one breaks, D opens a stream of the same number and says how many
// bytes of that number's frames it has received in all. P uses the new stream in place of the
// old one, even if P has not seen the break, and sends exactly the lost bytes again.
//
// P's engine may give the bytes of a write bit by bit, in any order of positions. P sends frames
// as it gets bytes. If D does not come back, P ends the write. P never ends a write because the
// engine gives nothing for a time.
//
// A frame names a transfer's random grant and a position in its linear order
// (kv/plan.go), never an address: D's own plan says where bytes go. D reads each frame's
// bytes into the blocks by readv, under the transfer's fence. So Revoke waits at most for
// one readv that is under way. D reads bytes that arrive after the Revoke into a scratch
// buffer. When all bytes are in, D answers with an acknowledgement on the stream, and P's
// blocks are free.
//
// Bytes of device memory go by way of pinned slots (mover.go), a few for each stream. The copies of a transfer's next
// frame begin while those of the frame before go on. P cuts the next frame, and begins its copies, when all copies of
// the frame before have begun and the stream may have another slot, unless another transfer or another stream would
// have that frame. D reads the next frame while copies go on, if the frame's header has come whole and the frame is of
// the same transfer. The bytes of both frames count when their copies have ended. If the stream is encrypted, D ends
// the copies with each frame. Revoke waits for the copies that are under way, and never for P.
//
// If one side must encrypt, the streams between the two are sealed: frames go in records, and
// the receiver uses nothing of a record before it has checked the record's tag (seal.go).
//
// If the kernel cannot read or write a transfer's memory, the transfer fails on the side of that
// memory, with the region's name. If it is D's memory, D reads the rest of the frame, throws it
// away, and tells P the reason on the stream. If it is P's memory, P ends the stream in the
// middle of the frame, and D opens it anew.
package tcp
