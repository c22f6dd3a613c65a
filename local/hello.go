// How two agents meet on a fresh socket:
//
//	D: hello      the name of the ticket that P gave D, and a random value
//	P: challenge  a random value, an address, and a proof that P has the ticket
//	D: response   what D has read at that address of P's process, and a proof that D has the ticket
//	P: verdict    D has proved itself, or why not
//	P: memories   those that other processes may open (memory.go)
//	D: answer     which of them D has opened, and why not the others
//	P: verdict    the socket is D's, or what D has opened will not do
//
// A proof covers all that was said on the socket, so it is of no use on another socket.
// If somebody else listens at a dead agent's name, he cannot give a proof, and D gives none before it has P's. If
// the kernel does not let D read, D says that instead. Then P may let this one process read, and
// D tries once more. If all of P's regions are in memories that D may open, D need not read P's process.

package local

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net"
	"slices"
	"syscall"
)

// random is 128 random bits: a ticket, a grant, a nonce.
type random [16]byte

func newRandom() (k random) {
	rand.Read(k[:]) // never fails: crypto/rand ends the program instead
	return k
}

func (k random) derive(what string, of ...[]byte) random {
	mac := hmac.New(sha256.New, k[:])
	mac.Write([]byte("kvconn local " + what))
	mac.Write(slices.Concat(of...))
	return random(mac.Sum(nil)[:len(k)])
}

// name identifies a ticket, and reveals nothing of it.
func (k random) name() random { return k.derive("name") }

func (k random) equals(other random) bool { return hmac.Equal(k[:], other[:]) }

// version is that of the protocol, and of the endpoint.
const version = 3

// magic begins each side's first message: "KL" and the version.
const magic = uint32('K')<<24 | uint32('L')<<16 | version

const (
	helloSize     = 4 + 2*16
	challengeSize = 4 + 4 + 16 + 8 + 16
	responseSize  = 4 + 4 + 16 + 16
	verdictSize   = 4 + 4
)

// refusal is why P refuses a socket; 0: P takes it.
type refusal uint32

const (
	refusedTicket refusal = 1 // P does not know the ticket, or does not know it any more
	refusedUser   refusal = 2 // D's process belongs to another user than P's
	refusedFull   refusal = 3
)

func (r refusal) Error() string {
	switch r {
	case refusedTicket:
		return "the prefill agent does not know the ticket any more: the two must say hello again"
	case refusedUser:
		return "the prefill agent's process is another user's: run both as one user"
	case refusedFull:
		return "the prefill agent has as many connections as its limit of descriptors allows"
	}
	return fmt.Sprintf("the prefill agent refuses with the code %d, which this version does not know", uint32(r))
}

// responseKind says what D has read.
type responseKind uint32

const (
	responseRead   responseKind = 1 // the value that P has put there
	responseBarred responseKind = 2 // nothing: the kernel's errno says why. May P let this process read?
	responseGiveUp responseKind = 3 // nothing, and P can do nothing for it
)

// verdict is P's answer to a response.
type verdict uint32

const (
	verdictReady  verdict = 1 // to a D that has read nothing: all of P's regions are in memory that D may open
	verdictWrong  verdict = 2 // the response or its proof is wrong
	verdictAgain  verdict = 3 // P has let D's process read: try again
	verdictBarred verdict = 4 // P cannot let D's process read; the value is an errno, or 0
	verdictTaken  verdict = 5 // P lets another process read, and the kernel has room for one; the value is its id
)

// hello is D's first words.
type hello struct{ name, salt random }

func (h hello) bytes() []byte {
	b := binary.BigEndian.AppendUint32(make([]byte, 0, helloSize), magic)
	return append(append(b, h.name[:]...), h.salt[:]...)
}

func parseHello(b []byte) (h hello, err error) {
	if m := binary.BigEndian.Uint32(b); m != magic {
		return h, fmt.Errorf("it begins with %#08x, want %#08x: it is no kvconn agent, or of another version", m, magic)
	}
	return hello{random(b[4:20]), random(b[20:36])}, nil
}

// challenge is P's answer.
type challenge struct {
	refused refusal
	salt    random
	address uint64 // of a random value in P's memory, which no socket shows before D does
	proof   random
}

func (w *challenge) prove(ticket random, h hello) {
	w.proof = w.proofOf(ticket, h)
}

func (w *challenge) proofOf(ticket random, h hello) random {
	return ticket.derive("challenge", h.bytes(), w.bytes()[:challengeSize-16])
}

func (w *challenge) bytes() []byte {
	b := binary.BigEndian.AppendUint32(make([]byte, 0, challengeSize), magic)
	b = binary.BigEndian.AppendUint32(b, uint32(w.refused))
	b = append(b, w.salt[:]...)
	b = binary.BigEndian.AppendUint64(b, w.address)
	return append(b, w.proof[:]...)
}

func parseChallenge(b []byte) (w challenge, err error) {
	if m := binary.BigEndian.Uint32(b); m != magic {
		return w, fmt.Errorf("the answer begins with %#08x, want %#08x: it is no kvconn agent, or of another version", m, magic)
	}
	return challenge{refusal(binary.BigEndian.Uint32(b[4:])), random(b[8:24]), binary.BigEndian.Uint64(b[24:]), random(b[32:48])}, nil
}

// response is D's answer to a challenge.
type response struct {
	kind  responseKind
	errno syscall.Errno
	read  random
	proof random
}

func (c *response) prove(ticket random, h hello, w *challenge) { c.proof = c.proofOf(ticket, h, w) }

func (c *response) proofOf(ticket random, h hello, w *challenge) random {
	return ticket.derive("response", h.bytes(), w.bytes(), c.bytes()[:responseSize-16])
}

func (c *response) bytes() []byte {
	b := binary.BigEndian.AppendUint32(make([]byte, 0, responseSize), uint32(c.kind))
	b = binary.BigEndian.AppendUint32(b, uint32(c.errno))
	b = append(b, c.read[:]...)
	return append(b, c.proof[:]...)
}

func parseResponse(b []byte) response {
	return response{responseKind(binary.BigEndian.Uint32(b)), syscall.Errno(binary.BigEndian.Uint32(b[4:])), random(b[8:24]), random(b[24:40])}
}

func (v verdict) bytes(value uint32) []byte {
	b := binary.BigEndian.AppendUint32(make([]byte, 0, verdictSize), uint32(v))
	return binary.BigEndian.AppendUint32(b, value)
}

func parseVerdict(b []byte) (verdict, uint32) {
	return verdict(binary.BigEndian.Uint32(b)), binary.BigEndian.Uint32(b[4:])
}

// read reads just so many bytes.
func read(conn *net.UnixConn, n int) ([]byte, error) {
	b := make([]byte, n)
	for got := 0; got < n; {
		k, err := conn.Read(b[got:])
		if err != nil {
			return nil, err
		}
		got += k
	}
	return b, nil
}
