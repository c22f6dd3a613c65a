// A prefill engine of the attacker's encrypts its streams as package tcp does, where decode must: it may do so, and its frames are judged
// as others are.

package attack

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"io"
	"slices"
	"testing"

	"github.com/kvconn/kvconn/wire"
)

// sealedTicket is the ticket that a prefill engine of the attacker's gives a decode agent that must encrypt.
var sealedTicket = slices.Repeat([]byte{1}, 32)

// ticketFor is what it gives who says this hello.
func ticketFor(hello *wire.Agent) []byte {
	for _, e := range hello.Endpoints {
		if e.Transport == "tcp" && e.Encrypt == wire.EncryptMust {
			return sealedTicket
		}
	}
	return make([]byte, 16)
}

// sealer makes or opens the records of one direction of a stream, as package tcp does.
type sealer struct {
	t    testing.TB
	aead cipher.AEAD
	base []byte
	n    uint64
}

func newSealer(t testing.TB, direction string, hello, ofDecode, ofPrefill []byte) *sealer {
	shared, err := hkdf.Extract(sha256.New, sealedTicket, slices.Concat(ofDecode, ofPrefill))
	expand := func(secret []byte, info string, n int) (key []byte) {
		if err == nil {
			key, err = hkdf.Expand(sha256.New, secret, info, n)
		}
		return key
	}
	secret := expand(shared, "kvconn tcp "+direction+string(hello), sha256.Size)
	s := &sealer{t: t, base: expand(secret, "nonce", 12)}
	key := expand(secret, "key", 16)
	if err == nil {
		var block cipher.Block
		if block, err = aes.NewCipher(key); err == nil {
			s.aead, err = cipher.NewGCM(block)
		}
	}
	if err != nil {
		t.Error(err)
	}
	return s
}

func (s *sealer) nonce() []byte {
	nonce := slices.Clone(s.base)
	binary.BigEndian.PutUint64(nonce[4:], binary.BigEndian.Uint64(nonce[4:])^s.n)
	s.n++
	return nonce
}

// frame is a frame as records: its header, and what is behind it.
func (s *sealer) frame(f []byte) []byte {
	head := min(frameHeader, len(f))
	out := s.aead.Seal(nil, s.nonce(), f[:head], nil)
	for part := range slices.Chunk(f[head:], 64<<10) {
		out = s.aead.Seal(out, s.nonce(), part, nil)
	}
	return out
}

// read reads a record with so many bytes.
func (s *sealer) read(from io.Reader, size int) ([]byte, error) {
	record := make([]byte, size+recordTag)
	if _, err := io.ReadFull(from, record); err != nil {
		return nil, err
	}
	return s.aead.Open(nil, s.nonce(), record, nil)
}

const frameHeader, recordTag = 40, 16

// answersHello makes the stream's keys, if decode's hello wants them. The hello and its proof, or its random value, are read.
func (s *evilStream) answersHello(hello []byte) error {
	if binary.BigEndian.Uint32(hello[4:]) != frameSealedHello {
		return nil
	}
	if _, err := io.ReadFull(s, make([]byte, 16)); err != nil { // the proof
		return err
	}
	salt := make([]byte, 16)
	_, _ = rand.Read(salt)
	s.data = newSealer(s.t, "data", hello[:frameHeader], hello[frameHeader:], salt)
	s.answers = newSealer(s.t, "answers", hello[:frameHeader], hello[frameHeader:], salt)
	_, err := s.Write(frame(frameHelloReply, salt, 0, 0, nil))
	return err
}

// asSent is a frame as it is sent on this stream. Each is sent, in this order.
func (s *evilStream) asSent(f []byte) []byte {
	if s.data == nil {
		return f
	}
	return s.data.frame(f)
}

// send is say of who does not care whether decode reads it.
func (s *evilStream) send(f []byte) error {
	_, err := s.Write(s.asSent(f))
	return err
}

// next is the header of decode's next answer.
func (s *evilStream) next() (head []byte, err error) {
	if s.data == nil {
		head = make([]byte, frameHeader)
		_, err = io.ReadFull(s, head)
		return head, err
	}
	if head, err = s.answers.read(s, frameHeader); err == nil && binary.BigEndian.Uint32(head[4:]) == frameFault {
		_, err = s.answers.read(s, int(min(binary.BigEndian.Uint64(head[32:]), 64<<10)))
	}
	return head, err
}
