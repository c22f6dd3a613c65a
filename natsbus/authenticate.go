package natsbus

import (
	"crypto/ed25519"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/nats-io/nkeys"
)

// authenticate is the server's half of the handshake. It returns what the client may do, and the nkey that the client has
// proved; "" if it has proved none.
func (g *authenticator) authenticate(c io.ReadWriter, s tls.ConnectionState) (r right, key string, err error) {
	bound, err := binding(s)
	if err != nil {
		return "", "", err
	}
	if _, err := fmt.Fprintf(c, "kvconn %s %s\n", proofOf(g.secrets.token, "server", rightAsk, bound), proofOf(g.secrets.join, "server", rightJoin, bound)); err != nil {
		return "", "", err
	}
	line, err := readLine(c)
	if err != nil {
		return "", "", err
	}
	words := strings.Split(line, " ")
	if len(words) != 4 || words[0] != string(rightAsk) && words[0] != string(rightJoin) {
		_, _ = io.WriteString(c, "no it answers the handshake as no kvconn agent does\n")
		return "", "", fmt.Errorf("it answers the handshake with %.60q", line)
	}
	r = right(words[0])
	if key, err = g.authorize(r, words[1], words[2], words[3], bound); err != nil {
		_, _ = fmt.Fprintf(c, "no %v\n", err)
		return "", "", err
	}
	_, err = io.WriteString(c, "ok\n")
	return r, key, err
}

var (
	errNoProof = errors.New("nats_token, or the key of nats_nkey_seed_file, is not one that it admits")
	errNoJoin  = errors.New("a rank that joins from another host or user proves join_token: set it to the same secret on all ranks of this prefill engine, and on no decode engine")
)

// authorize says why a client does not get a right, or which nkey it has proved for it.
func (g *authenticator) authorize(r right, method, public, proof string, bound []byte) (key string, err error) {
	if r == rightJoin {
		if g.local != "" && method == methodLocal && validProof(g.local, "client", r, bound, proof) ||
			method == methodToken && validProof(g.secrets.join, "client", r, bound, proof) ||
			!g.restricted() && g.secrets.join == "" {
			return "", nil
		}
		return "", errNoJoin
	}
	switch {
	case method == methodNKey && g.signed(r, public, proof, bound):
		return public, nil
	case !g.restricted(), method == methodToken && validProof(g.secrets.token, "client", r, bound, proof):
		return "", nil
	}
	return "", errNoProof
}

// restricted says whether some clients are not let in.
func (g *authenticator) restricted() bool { return g.secrets.token != "" || len(g.keys) > 0 }

// provesRanks says whether a rank that joins has proved a secret: else anybody may say that it joins.
func (g *authenticator) provesRanks() bool { return g.restricted() || g.secrets.join != "" }

func (g *authenticator) signed(r right, public, proof string, bound []byte) bool {
	if !g.keys[public] {
		return false
	}
	sig, err := base64.RawURLEncoding.DecodeString(proof)
	if err != nil || len(sig) != ed25519.SignatureSize {
		return false
	}
	key, err := nkeys.FromPublicKey(public)
	return err == nil && key.Verify(nkeyText(r, bound), sig) == nil
}
