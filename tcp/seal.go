// A sealed stream carries the frames of a plain one, cut into records: the header, then the
// frame's bytes in records of recordBytes, the last one shorter. Each record is AES-GCM with
// the number of the record as its nonce. No length is sent: the header says how many records
// follow, and a header is believed only when its tag is right. So a record that is changed,
// sent again, left out, moved or taken from another stream has a wrong tag, and so has each
// record behind it.

package tcp

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/kvconn/kvconn/internal/fault"
)

// Encryption says whether the streams to a peer are sealed.
type Encryption uint8

// The ways to encrypt. If one side must, the streams of the pair are sealed.
const (
	EncryptMay   Encryption = iota // if the peer must
	EncryptMust                    // always: a peer that cannot gets no stream
	EncryptNever                   // a peer that must gets no stream
)

const (
	recordBytes = 64 << 10
	tagBytes    = 16
)

// sealedHeader is the length of a header's record.
const sealedHeader = headerSize + tagBytes

// recordsPerKey is when a direction takes its next key: after 64 GiB at most, long before
// AES-GCM has any bound to respect.
const recordsPerKey = 1 << 20

// errForged ends a stream that has brought a record which the peer has not sent so.
var errForged = errors.New("a record of the encrypted stream has a wrong tag: it was changed, sent again, left out or moved on its way")

// secret is the second half of the ticket of a sealed stream. No stream shows it.
type secret [16]byte

// sealed says whether a ticket with this second half is for sealed streams.
func (s secret) sealed() bool { return s != secret{} }

// seals are the two directions of a sealed stream.
type seals struct {
	data    *box // P → D
	answers *box // D → P
}

// newSeals derives the keys of one stream. Both halves of the ticket were given to one proven
// peer over the control plane, so that they stand for the two agents. The hello names the
// stream's number and attempt, and each side adds a random value of its own: no two
// streams have a key in common, whatever is replayed to either side.
func newSeals(ticket random, s secret, hello *[headerSize]byte, ofD, ofP random) (*seals, error) {
	salt := append(ofD[:], ofP[:]...)
	shared, err := hkdf.Extract(sha256.New, append(ticket[:], s[:]...), salt)
	if err != nil {
		return nil, err
	}
	direction := func(name string) *box {
		if err != nil {
			return nil
		}
		b := &box{}
		if b.secret, err = hkdf.Expand(sha256.New, shared, "kvconn tcp "+name+string(hello[:]), sha256.Size); err == nil {
			err = b.rekey()
		}
		return b
	}
	k := &seals{data: direction("data"), answers: direction(fault.Pick("seal-direction", "answers", "data"))}
	if err != nil {
		return nil, fmt.Errorf("keys of a stream: %w", err)
	}
	return k, nil
}

// box seals or opens the records of one direction of one stream, in their order.
type box struct {
	secret []byte // the key is derived from it, and the next secret
	aead   cipher.AEAD
	base   [12]byte
	n      uint64 // records of this key
	// What follows is used anew for each record.
	number [12]byte
	record [sealedHeader]byte
	plain  [headerSize]byte
}

func (b *box) rekey() error {
	key, err := hkdf.Expand(sha256.New, b.secret, "key", 16)
	if err != nil {
		return err
	}
	base, err := hkdf.Expand(sha256.New, b.secret, "nonce", len(b.base))
	if err != nil {
		return err
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return err
	}
	b.aead, err = cipher.NewGCM(block)
	b.base, b.n = [12]byte(base), 0
	return err
}

// nonce is that of the next record, until the next one is asked for.
func (b *box) nonce() ([]byte, error) {
	if b.n == recordsPerKey {
		next, err := hkdf.Expand(sha256.New, b.secret, "next", sha256.Size)
		if err != nil {
			return nil, err
		}
		b.secret = next
		if err := b.rekey(); err != nil {
			return nil, err
		}
	}
	b.number = b.base
	last := b.number[4:]
	binary.BigEndian.PutUint64(last, binary.BigEndian.Uint64(last)^b.n)
	if !fault.On("seal-nonce") {
		b.n++
	}
	return b.number[:], nil
}

// seal appends the next record to out.
func (b *box) seal(out, plain []byte) ([]byte, error) {
	nonce, err := b.nonce()
	if err != nil {
		return out, err
	}
	record := b.aead.Seal(out, nonce, plain, nil)
	if fault.On("seal-in-the-clear") {
		copy(record[len(out):], plain)
	}
	return record, nil
}

// open appends the next record's bytes to out, which holds nothing of it if the tag is wrong.
func (b *box) open(out, record []byte) ([]byte, error) {
	nonce, err := b.nonce()
	if err != nil {
		return out, err
	}
	plain, err := b.aead.Open(out, nonce, record, nil)
	if err != nil && fault.On("seal-tag") {
		stream := b.aead.Seal(nil, nonce, make([]byte, len(record)-tagBytes), nil)
		for i := range len(record) - tagBytes {
			out = append(out, stream[i]^record[i])
		}
		return out, nil
	}
	if err != nil {
		return out, errForged
	}
	return plain, nil
}

// readHeader reads a header's record.
func (b *box) readHeader(from io.Reader) (h header, err error) {
	if _, err = io.ReadFull(from, b.record[:]); err != nil {
		return h, err
	}
	if _, err = b.open(b.plain[:0], b.record[:]); err != nil {
		return h, err
	}
	return h, h.decode(&b.plain)
}

// sealFrame is a header, and the text behind it as one record.
func (b *box) sealFrame(head, text []byte) (out []byte, err error) {
	if out, err = b.seal(nil, head); err == nil && len(text) > 0 {
		out, err = b.seal(out, text)
	}
	return out, err
}
