// Package tcp carries KV blocks over TCP: P sends from its registered memory
// and D receives straight into its own, without a copy in user space.
//
// D opens the connections ("streams"), several to a peer, to P's one listening
// port, so that only P must be reachable. A stream shows by its first frame the
// ticket that P gave D over the control plane; P closes one that shows no ticket
// of an admitted peer. P sends a transfer in frames, spread over the streams of
// the D that asked for it as each of them has room.
//
// Streams are numbered. When one breaks, D opens the number anew and says how many
// bytes of its frames it has received in all: P takes the new one for the old, also
// when it has not seen that break, and sends exactly what was lost again.
//
// A write may be given bit by bit, in any order of positions; frames follow what has
// been given. P ends it when D does not come back, never because it rests.
//
// A frame names a transfer's random grant and a position in its linear order
// (core/plan.go), never an address: where bytes go follows from D's own plan.
// Each frame's bytes are read by readv into the blocks under the transfer's
// fence, so that Revoke waits at most for one readv that is under way; what
// arrives later is read into a scratch buffer. When all bytes are in, D answers
// with an acknowledgement on the stream, and P's blocks are free.
package tcp
