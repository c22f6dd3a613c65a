// Agents of a cluster seal what they say: how two of them agree on a session's keys, and what a message looks like.

package natsbus

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdh"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// A cluster's servers may belong to others, and so may its users. Those who carry an agent's messages
// must not read them, and a subject does not prove who the sender is. So agents of a cluster seal their messages.
//
// The requester opens a session with the agent that is to answer, by a Diffie-Hellman exchange of
// keys that both make for this session and sign:
//
//	open:   magic version 1 | requester's ed25519 key, X25519 key, signature of both ids and these
//	opened: magic version 2 | responder's ed25519 key, X25519 key, session, signature of both ids, of open and of these
//
// An agent's id comes from the ed25519 key that signs (it is the key's digest, or an nkey): no authority,
// registry or secret is needed to know whom a session is with. This is the exchange SIG-DH of Canetti and
// Krawczyk (Analysis of Key-Exchange Protocols, EUROCRYPT 2001), except that the requester signs first. Its
// first request proves that the requester is there now, since only the owner of open's X25519 key can
// make it. The keys of a session die with it: whoever gets an agent's keys later reads nothing of the
// messages before. Each of the two directions has a key of its own:
//
//	request: magic version 3 | session | number | AES-128-GCM
//	answer:  magic version 4 | session | number | AES-128-GCM, with the request's header and tag as associated data
//	notice:  magic version 5 | responder's ed25519 key, signature, code and reason: the request is not answered
//
// The number is the nonce, as in RFC 8446 section 5.3, and no number is used twice: for each key an
// agent counts the messages that it seals. The responder accepts each number of a request once
// (RFC 4303 section 3.4.3). If a message does not prove that it is the requester's, the responder does not
// answer it, so the requester goes on waiting for the right answer. If the responder has forgotten the
// session, it answers with a notice, which it signs.
const (
	sealMagic   = 0xc1 // no MessagePack has this byte, so no plain message begins with it
	sealVersion = 1
)

// sealKind is the third byte of each such message.
type sealKind byte

const (
	sealOpen sealKind = 1 + iota
	sealOpened
	sealRequest
	sealAnswer
	sealNotice
)

// Lengths of messages and their parts, in bytes.
const (
	sealStart    = 3 // magic, version, kind
	sealHeader   = sealStart + 8 + 8
	sealTag      = 16
	sealOverhead = sealHeader + sealTag
	dhBytes      = 32
	openBytes    = sealStart + ed25519.PublicKeySize + dhBytes + ed25519.SignatureSize
	openedBytes  = openBytes + 8
	noticeBytes  = sealStart + ed25519.PublicKeySize + ed25519.SignatureSize + 1 // and the reason
	maxReason    = 1024                                                          // of a notice and of a Reply
)

// Bounds of a session at the agent that asks: it opens another one then, while it uses this one.
const (
	sessionRequests = 1 << 20 // AES-GCM has no bound to respect before that
	sessionLife     = time.Hour
	unusedLife      = 10 * time.Second // without a request
)

// kindOfSealed is nothing for what is no message of this version.
func kindOfSealed(m []byte) sealKind {
	if len(m) < sealStart || m[0] != sealMagic || m[1] != sealVersion {
		return 0
	}
	kind := sealKind(m[2])
	switch n := len(m); {
	case kind == sealOpen && n == openBytes, kind == sealOpened && n == openedBytes,
		(kind == sealRequest || kind == sealAnswer) && n >= sealOverhead,
		kind == sealNotice && n >= noticeBytes && n <= noticeBytes+maxReason:
		return kind
	}
	return 0
}

// otherVersion is the version of a sealed message of another release.
func otherVersion(m []byte) (version byte, other bool) {
	if len(m) < 2 || m[0] != sealMagic || m[1] == sealVersion {
		return 0, false
	}
	return m[1], true
}

// signText is what an agent signs. Its first byte is in no UTF-8: an agent with an nkey also
// signs any text that a NATS server sends it, when it enters there.
func signText(what string, requester, responder core.AgentID, parts ...[]byte) []byte {
	text := append([]byte{0xff}, "kvconn seal 1 "+what+"\x00"+string(requester)+"\x00"+string(responder)+"\x00"...)
	return append(text, slices.Concat(parts...)...)
}

// signed says whether the owner of an id has signed a text.
func signed(public []byte, id core.AgentID, text, signature []byte) error {
	switch {
	case fault.On("seal-any-key"):
	case !owns(public, id):
		return fmt.Errorf("it is signed by another key than that of agent %s", id)
	case !ed25519.Verify(public, text, signature):
		return fmt.Errorf("the signature is not that of agent %s", id)
	}
	return nil
}

// sealSession is what two agents share: one of them asks, and the other answers.
type sealSession struct {
	id       uint64
	peer     core.AgentID
	requests direction
	answers  direction
	began    time.Time
}

// direction is the key of one direction of a session. The agent that seals counts the messages.
type direction struct {
	aead cipher.AEAD
	base [12]byte
	next atomic.Uint64
}

// nonce is of the message with that number (RFC 8446 section 5.3).
func (d *direction) nonce(number uint64) (n [12]byte) {
	n = d.base
	binary.BigEndian.PutUint64(n[4:], binary.BigEndian.Uint64(n[4:])^number)
	return n
}

// newSealSession derives the keys from the shared secret and all that both have said.
func newSealSession(secret, open, opened []byte, requester, responder core.AgentID) (*sealSession, error) {
	transcript := sha256.Sum256(slices.Concat(open, opened))
	shared, err := hkdf.Extract(sha256.New, secret, transcript[:])
	if err != nil {
		return nil, err
	}
	expand := func(name string, bytes int) (out []byte) {
		if err == nil {
			out, err = hkdf.Expand(sha256.New, shared, string(signText(name, requester, responder)), bytes)
		}
		return out
	}
	s := &sealSession{id: binary.BigEndian.Uint64(opened[sealStart+ed25519.PublicKeySize+dhBytes:]), began: time.Now()}
	for name, d := range map[string]*direction{"request": &s.requests, "answer": &s.answers} {
		key, base := expand(name+" key", 16), expand(name+" nonce", len(d.base))
		if err != nil {
			return nil, err
		}
		block, err := aes.NewCipher(key)
		if err != nil {
			return nil, err
		}
		if d.aead, err = cipher.NewGCM(block); err != nil {
			return nil, err
		}
		copy(d.base[:], base)
	}
	return s, nil
}

// opening is the requester's half of an exchange.
type opening struct {
	self    *Identity
	to      core.AgentID
	key     *ecdh.PrivateKey
	message []byte
}

func (i *Identity) open(to core.AgentID) (*opening, error) {
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	said := slices.Concat(i.public(), key.PublicKey().Bytes())
	signature := ed25519.Sign(i.signer, signText("open", i.id, to, said))
	return &opening{i, to, key, slices.Concat([]byte{sealMagic, sealVersion, byte(sealOpen)}, said, signature)}, nil
}

// keysOf takes an open or opened apart.
func keysOf(m []byte) (public, dh, rest []byte) {
	m = m[sealStart:]
	return m[:ed25519.PublicKeySize], m[ed25519.PublicKeySize : ed25519.PublicKeySize+dhBytes], m[ed25519.PublicKeySize+dhBytes:]
}

// accept is the responder's half. It makes the session that an open asks for, and the answer.
func (i *Identity) accept(from core.AgentID, open []byte, number uint64) (*sealSession, []byte, error) {
	public, dh, signature := keysOf(open)
	if err := signed(public, from, signText("open", from, i.id, public, dh), signature); err != nil {
		return nil, nil, err
	}
	theirs, err := ecdh.X25519().NewPublicKey(dh)
	if err != nil {
		return nil, nil, err
	}
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	secret, err := key.ECDH(theirs) // refuses the keys with which all secrets are the same (RFC 7748 section 6.1)
	if err != nil {
		return nil, nil, err
	}
	said := binary.BigEndian.AppendUint64(slices.Concat(i.public(), key.PublicKey().Bytes()), number)
	mine := ed25519.Sign(i.signer, signText("opened", from, i.id, open, said))
	opened := slices.Concat([]byte{sealMagic, sealVersion, byte(sealOpened)}, said, mine)
	s, err := newSealSession(secret, open, opened, from, i.id)
	if err != nil {
		return nil, nil, err
	}
	s.peer = from
	return s, opened, nil
}

// finish is the second half of the requester's exchange: it takes the responder's answer to open.
func (o *opening) finish(opened []byte) (*sealSession, error) {
	public, dh, rest := keysOf(opened)
	said, signature := opened[sealStart:len(opened)-ed25519.SignatureSize], rest[8:]
	if err := signed(public, o.to, signText("opened", o.self.id, o.to, o.message, said), signature); err != nil {
		return nil, err
	}
	theirs, err := ecdh.X25519().NewPublicKey(dh)
	if err != nil {
		return nil, err
	}
	secret, err := o.key.ECDH(theirs)
	if err != nil {
		return nil, err
	}
	s, err := newSealSession(secret, o.message, opened, o.self.id, o.to)
	if err != nil {
		return nil, err
	}
	s.peer = o.to
	return s, nil
}

// used says that the requester has made a request.
func (s *sealSession) used() bool { return s.requests.next.Load() > 0 }

// expired says that the requester may not use the session any more. The responder keeps it for longer.
func (s *sealSession) expired(now time.Time) bool {
	n, age := s.requests.next.Load(), now.Sub(s.began)
	return n >= 2*sessionRequests || age >= sessionLife*3/2 || n == 0 && age >= unusedLife/2
}

// needsRekey says that the requester is to open another session, and may use this one until it has.
func (s *sealSession) needsRekey(now time.Time) bool {
	return s.requests.next.Load() >= sessionRequests || now.Sub(s.began) >= sessionLife
}

// sealHeadroom begins a message: what is appended to it is sealed.
func sealHeadroom(b []byte) []byte { return append(b, make([]byte, sealHeader)...) }

// requestTag is what an answer is bound to: the header and tag of its request. Nobody knows the tag
// before the request is sent, so that no answer can be had beforehand.
type requestTag [sealOverhead]byte

func requestTagOf(request []byte) (m requestTag) {
	copy(m[:], request[:sealHeader])
	copy(m[sealHeader:], request[len(request)-sealTag:])
	return m
}

// associated is what a tag is of beside the sealed text.
func associated(m, bound []byte) []byte {
	if bound == nil {
		return m[:sealHeader]
	}
	return slices.Concat(m[:sealHeader], bound)
}

// seal seals what follows the headroom in a message.
func (d *direction) seal(kind sealKind, session uint64, m []byte, bound []byte) []byte {
	number := d.next.Add(1) - 1
	m[0], m[1], m[2] = sealMagic, sealVersion, byte(kind)
	binary.BigEndian.PutUint64(m[sealStart:], session)
	binary.BigEndian.PutUint64(m[sealStart+8:], number)
	nonce := d.nonce(number)
	return d.aead.Seal(m[:sealHeader], nonce[:], m[sealHeader:], associated(m, bound))
}

func (s *sealSession) sealRequest(m []byte) []byte { return s.requests.seal(sealRequest, s.id, m, nil) }

func (s *sealSession) sealAnswer(m []byte, to *requestTag) []byte {
	return s.answers.seal(sealAnswer, s.id, m, boundTo(to))
}

func boundTo(request *requestTag) []byte {
	if fault.On("seal-answer-free") {
		return nil
	}
	return request[:]
}

var errSeal = errors.New("its tag is wrong: it is of another, or was changed on its way")

// unseal opens a message in its own memory.
func (d *direction) unseal(m, bound []byte) ([]byte, error) {
	nonce := d.nonce(numberOf(m))
	plain, err := d.aead.Open(m[sealHeader:sealHeader], nonce[:], m[sealHeader:], associated(m, bound))
	if err != nil {
		return nil, errSeal
	}
	return plain, nil
}

// sessionOf and numberOf read the header of a request or an answer.
func sessionOf(m []byte) uint64 { return binary.BigEndian.Uint64(m[sealStart:]) }
func numberOf(m []byte) uint64  { return binary.BigEndian.Uint64(m[sealStart+8:]) }

// openAnswer opens the answer to a request.
func (s *sealSession) openAnswer(m []byte, request *requestTag) ([]byte, error) {
	if sessionOf(m) != s.id {
		return nil, errSeal
	}
	return s.answers.unseal(m, boundTo(request))
}
