// What goes over a stream: headers that name a grant and a position, and the hello before the first of them.

package tcp

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
)

// headerSize is the length of a frame's header; a data frame's bytes follow.
const headerSize = 40

// magic starts each header: "KV" and the version of the stream's protocol.
const magic = uint32('K')<<24 | uint32('V')<<16 | 4

type frameKind uint32

const (
	frameHello frameKind = 1 // D → P, first: see hello
	frameData  frameKind = 2 // P → D: length bytes from position on
	frameAck   frameKind = 3 // D → P: all bytes of the transfer are in
	frameNack  frameKind = 4 // D → P: the transfer is not expected, or no more
	frameLeave frameKind = 5 // P → D, the last: P knows no such ticket
	frameAgain frameKind = 6 // P → D: see again
	frameFault frameKind = 7 // D → P: the transfer has failed at D; length bytes of text say why

	frameSealedHello frameKind = 8 // D → P, in hello's place: the stream is to be encrypted
	frameHelloReply  frameKind = 9 // P → D: the answer to a sealed hello; its header is the last one in the clear
)

// random is 128 random bits: a peer's ticket, or a transfer's grant.
type random [16]byte

func newRandom() (k random) {
	rand.Read(k[:]) // never fails: crypto/rand ends the program instead
	return k
}

// maxFrame is the most bytes of one frame. If a frame belongs to no transfer, D reads it and
// throws it away; with this bound a peer cannot keep a stream busy in this way for ever.
const maxFrame = 1 << 30

// numberBits bound the number of a stream, and so how many streams one ticket opens.
const numberBits = 6

// maxPeerStreams is the most streams between two agents.
const maxPeerStreams = 1 << numberBits

// hello is the first frame of D's stream number: key is the name of the ticket that P gave
// D. attempt rises with each stream that D opens, so that the newest of a number counts.
// received is how much D has read of this number's frames, headers included, in all its
// streams to this P: bytes beyond it are lost. A proof follows, which only an agent that
// has the ticket can make: the ticket itself is never sent. A hello that is overheard is of
// no use to anybody else, since its attempt is over.
func hello(ticket random, number int, attempt, received uint64) []byte {
	var b [headerSize]byte
	(&header{kind: frameHello, key: ticket.name(), position: received, length: attempt<<numberBits | uint64(number)}).encode(&b)
	proof := ticket.proof(&b)
	return append(b[:], proof[:]...)
}

// name identifies a ticket, and reveals nothing of it.
func (k random) name() random { return k.derive("name", nil) }

// proof shows the knowledge of a ticket for one hello.
func (k random) proof(hello *[headerSize]byte) random { return k.derive("hello", hello[:]) }

func (k random) derive(what string, of []byte) random {
	mac := hmac.New(sha256.New, k[:])
	mac.Write([]byte("kvconn tcp " + what))
	mac.Write(of)
	return random(mac.Sum(nil)[:len(k)])
}

// again asks D to open a stream anew, because P's bytes do not get through it, or to open one
// that D has not opened yet (attempt 0).
func again(number int, attempt uint64) header {
	return header{kind: frameAgain, length: attempt<<numberBits | uint64(number)}
}

// stream is the number and attempt that a hello or an again names.
func (h *header) stream() (number int, attempt uint64) {
	return int(h.length % maxPeerStreams), h.length >> numberBits
}

// header is a frame's header, big-endian on the wire.
type header struct {
	kind     frameKind
	key      random // the ticket's name (hello) or the transfer's grant
	position uint64 // first byte, in the transfer's linear order
	length   uint64
}

func (h *header) encode(b *[headerSize]byte) {
	binary.BigEndian.PutUint32(b[0:], magic)
	binary.BigEndian.PutUint32(b[4:], uint32(h.kind))
	copy(b[8:24], h.key[:])
	binary.BigEndian.PutUint64(b[24:], h.position)
	binary.BigEndian.PutUint64(b[32:], h.length)
}

func (h *header) decode(b *[headerSize]byte) error {
	if m := binary.BigEndian.Uint32(b[0:]); m != magic {
		return fmt.Errorf("frame starts with %#08x, want %#08x: the peer is no kvconn agent, or of another version", m, magic)
	}
	h.kind = frameKind(binary.BigEndian.Uint32(b[4:]))
	copy(h.key[:], b[8:24])
	h.position = binary.BigEndian.Uint64(b[24:])
	h.length = binary.BigEndian.Uint64(b[32:])
	return nil
}
