package natsbus

import (
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base32"
	"errors"
	"fmt"
	"math/big"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nkeys"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// Identity is the key pair of one open agent. The agent's id is the digest of the public
// key, so that nobody else can prove to be it.
type Identity struct {
	seed   [ed25519.SeedSize]byte
	key    ed25519.PrivateKey
	id     core.AgentID
	signer ed25519.PrivateKey // of the key that the id is of: the nkey's in a cluster, else key

	once sync.Once
	cert tls.Certificate
	err  error
}

// NewIdentity makes a key pair. It lives as long as the agent, and is never stored.
func NewIdentity() *Identity {
	var seed [ed25519.SeedSize]byte
	rand.Read(seed[:])
	return identityOf(seed)
}

func identityOf(seed [ed25519.SeedSize]byte) *Identity {
	key := ed25519.NewKeyFromSeed(seed[:])
	return &Identity{seed: seed, key: key, signer: key, id: digest(key.Public().(ed25519.PublicKey))}
}

// digest is the id of the agent that has a public key.
func digest(public ed25519.PublicKey) core.AgentID {
	sum := sha256.Sum256(public)
	return core.AgentID(base32.StdEncoding.EncodeToString(sum[:20]))
}

// NewKeyedIdentity is for an agent that has an nkey in a cluster. Its id begins with the
// public nkey, so that the cluster's permissions can hold the agent to its own ids.
func NewKeyedIdentity(seed string) (*Identity, error) {
	_, public, err := seedKey(seed)
	if err != nil {
		return nil, err
	}
	_, raw, err := nkeys.DecodeSeed([]byte(seed))
	if err != nil {
		return nil, errors.New("not an nkey seed, which begins with SU")
	}
	i := NewIdentity()
	i.signer = ed25519.NewKeyFromSeed(raw)
	i.id = core.AgentID(public+keySeparator) + i.id[:maxAgentID-len(public)-len(keySeparator)]
	return i, nil
}

// ID is the digest of the public key, or the nkey with a part of the digest.
func (i *Identity) ID() core.AgentID { return i.id }

// public is the key that the id is of.
func (i *Identity) public() ed25519.PublicKey { return i.signer.Public().(ed25519.PublicKey) }

// ownerOf is the key that an id is of; an id of no nkey is its own owner.
func ownerOf(id core.AgentID) string {
	key, _, _ := strings.Cut(string(id), keySeparator)
	return key
}

// ownerIn is ownerOf where this agent has an nkey in a cluster: there all ids of no nkey are one owner, since anybody makes as many
// of them as he likes. An agent without an nkey meets no others.
func (i *Identity) ownerIn(id core.AgentID) string {
	if i.nkey() != "" && !isKeyed(id) && !fault.On("bus-free-ids-own") {
		return freeIDs
	}
	return ownerOf(id)
}

const freeIDs = keySeparator // the owner of all; no id is that

// nkey is the key with which an agent's id begins; "" if it begins with none.
func (i *Identity) nkey() string {
	if !isKeyed(i.id) {
		return ""
	}
	return ownerOf(i.id)
}

func isKeyed(id core.AgentID) bool { return strings.Contains(string(id), keySeparator) }

// owns says whether an id is of that public key. Of an nkey's id the rest is the owner's to choose.
func owns(public ed25519.PublicKey, id core.AgentID) bool {
	if key, _, keyed := strings.Cut(string(id), keySeparator); keyed {
		text, err := nkeys.Encode(nkeys.PrefixByteUser, public)
		return err == nil && string(text) == key
	}
	return digest(public) == id
}

// At is the identity that the agent shows to one server: to each server another one, so
// that none learns under which id the agent is known elsewhere.
func (i *Identity) At(server core.AgentID) *Identity {
	mac := hmac.New(sha256.New, i.seed[:])
	mac.Write([]byte("kvconn at " + server))
	return identityOf([ed25519.SeedSize]byte(mac.Sum(nil)))
}

// certificate carries the public key in a TLS handshake. Nothing in it is believed but
// the key.
func (i *Identity) certificate() (tls.Certificate, error) {
	i.once.Do(func() {
		template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Unix(0, 0), NotAfter: time.Unix(1<<36, 0)}
		var der []byte
		if der, i.err = x509.CreateCertificate(rand.Reader, template, template, i.key.Public(), i.key); i.err == nil {
			i.cert = tls.Certificate{Certificate: [][]byte{der}, PrivateKey: i.key}
		}
	})
	return i.cert, i.err
}

// peerOf is the id that the other end of a connection has proved: in TLS 1.3 it has signed
// this handshake with the key of its certificate.
func peerOf(s tls.ConnectionState) (core.AgentID, error) {
	if s.Version != tls.VersionTLS13 || len(s.PeerCertificates) != 1 {
		return "", errors.New("it shows no identity")
	}
	public, ok := s.PeerCertificates[0].PublicKey.(ed25519.PublicKey)
	if !ok {
		return "", fmt.Errorf("it shows a key of type %T, want an ed25519 key", s.PeerCertificates[0].PublicKey)
	}
	return digest(public), nil
}

// serverTLS is for the server's end of the connection inside an upgraded one.
func (i *Identity) serverTLS() (*tls.Config, error) {
	cert, err := i.certificate()
	if err != nil {
		return nil, fmt.Errorf("the certificate of this agent's identity: %w", err)
	}
	return &tls.Config{
		Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequireAnyClientCert, MinVersion: tls.VersionTLS13,
		SessionTicketsDisabled: true,
		VerifyConnection: func(s tls.ConnectionState) error {
			_, err := peerOf(s)
			return err
		},
	}, nil
}

// clientTLS is for the client's end. show chooses the identity when the server has told
// its own. No authority is asked: the server's key is its identity, and the proofs that
// follow are bound to this connection.
func clientTLS(show func(server core.AgentID) *Identity) *tls.Config {
	var server core.AgentID
	return &tls.Config{
		InsecureSkipVerify: true, MinVersion: tls.VersionTLS13,
		VerifyConnection: func(s tls.ConnectionState) (err error) {
			server, err = peerOf(s)
			return err
		},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			cert, err := show(server).certificate()
			return &cert, err
		},
	}
}
