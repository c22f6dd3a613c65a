// The ticket of a sealed stream has a second half, which tells D to seal. D's hello has a
// random value of D's between header and proof, and the proof is of both. P answers by a header
// with a random value of its own. The proof shows P that D wants this stream to be sealed: a
// host on the way cannot turn one kind of hello into the other.

package tcp

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/kvconn/kvconn/core"
)

// AdmitSealed is Admit for a peer that must encrypt.
func (t *Transport) AdmitSealed(peer core.AgentID) (ticket []byte, err error) {
	if t.cfg.Encrypt == EncryptNever {
		return nil, fmt.Errorf("tcp: decode agent %s must encrypt its streams, and this agent never does", peer)
	}
	return t.sender.admit(peer, true)
}

// showTicket is a peer's ticket on its way over the control plane.
func (p *outPeer) showTicket(sealed bool) ([]byte, error) {
	if sealed != p.secret.sealed() {
		return nil, fmt.Errorf("tcp: decode agent %s was admitted before with encryption %t, and asks now for %t", p.id, !sealed, sealed)
	}
	if !sealed {
		return append([]byte(nil), p.ticket[:]...), nil
	}
	return append(p.ticket[:len(p.ticket):len(p.ticket)], p.secret[:]...), nil
}

// readTicket reads what showTicket made, as far as this agent may use it.
func (t *Transport) readTicket(b []byte) (ticket random, key secret, err error) {
	copy(ticket[:], b)
	switch {
	case len(b) == len(ticket) && t.cfg.Encrypt == EncryptMust:
		err = errors.New("a ticket for streams that are not encrypted, and this agent must encrypt")
	case len(b) == len(ticket):
	case len(b) != len(ticket)+len(key):
		err = fmt.Errorf("a ticket of %d bytes, want %d: run the same kvconn on both", len(b), len(ticket))
	case t.cfg.Encrypt == EncryptNever:
		err = errors.New("a ticket for streams that are encrypted, and this agent never encrypts")
	default:
		if key = secret(b[len(ticket):]); !key.sealed() {
			err = errors.New("a ticket without a secret")
		}
	}
	return ticket, key, err
}

// sealedHello is hello for a sealed stream.
func sealedHello(ticket random, key secret, number int, attempt, received uint64) (p helloProof) {
	p = helloProof{sealed: true, salt: newRandom()}
	(&header{kind: frameSealedHello, key: ticket.name(), position: received, length: attempt<<numberBits | uint64(number)}).encode(&p.of)
	p.got = p.want(ticket, key)
	return p
}

// bytes are a sealed hello as it is sent.
func (p *helloProof) bytes() []byte {
	return append(append(append([]byte(nil), p.of[:]...), p.salt[:]...), p.got[:]...)
}

// helloSealed says hello, and derives the stream's keys from P's answer.
func (s *inStream) helloSealed(ticket random, key secret, number int, attempt, received uint64) error {
	said := sealedHello(ticket, key, number, attempt, received)
	if _, err := s.conn.Write(said.bytes()); err != nil {
		return err
	}
	s.conn.SetReadDeadline(time.Now().Add(s.r.t.cfg.StallTimeout))
	h, err := readHeader(s.conn)
	switch {
	case err != nil:
		return err
	case h.kind == frameLeave:
		return errTicket
	case h.kind != frameHelloReply:
		return fmt.Errorf("frame of kind %d, want the answer to a sealed hello", h.kind)
	}
	k, err := newSeals(ticket, key, &said.of, said.salt, h.key)
	s.sealed = &unsealer{seals: k}
	return err
}

// acceptSealed seals an accepted stream. P's answer is sent when the stream runs.
func (st *outStream) acceptSealed(p *helloProof) (err error) {
	salt := newRandom()
	(&header{kind: frameHelloReply, key: salt}).encode(&st.first)
	st.sealed, err = newSeals(st.peer.ticket, st.peer.secret, &p.of, p.salt, salt)
	return err
}

// sendHelloReply sends the first frame that P sends on a sealed stream.
func (s *sender) sendHelloReply(st *outStream) error {
	if st.sealed == nil {
		return nil
	}
	st.conn.SetWriteDeadline(time.Now().Add(s.t.cfg.StallTimeout))
	_, err := st.conn.Write(st.first[:])
	return err
}

// answer reads the header of one of D's answers.
func (st *outStream) answer() (header, error) {
	if st.sealed != nil {
		return st.sealed.answers.readHeader(st.conn)
	}
	return readHeader(st.conn)
}

// readText reads the text behind a header.
func (st *outStream) readText(text []byte) error {
	if st.sealed == nil || len(text) == 0 {
		_, err := io.ReadFull(st.conn, text)
		return err
	}
	record := make([]byte, len(text)+tagBytes)
	if _, err := io.ReadFull(st.conn, record); err != nil {
		return err
	}
	_, err := st.sealed.answers.open(text[:0], record)
	return err
}
