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

// welcome is the server's half. It returns what the client may do, and the nkey that it has proved; "" if it has
// proved none.
func (g *gate) welcome(c io.ReadWriter, s tls.ConnectionState) (r right, key string, err error) {
	bound, err := binding(s)
	if err != nil {
		return "", "", err
	}
	if _, err := fmt.Fprintf(c, "kvconn %s %s\n", knows(g.secrets.token, "server", rightAsk, bound), knows(g.secrets.join, "server", rightJoin, bound)); err != nil {
		return "", "", err
	}
	line, err := readLine(c)
	if err != nil {
		return "", "", err
	}
	words := strings.Split(line, " ")
	if len(words) != 4 || words[0] != string(rightAsk) && words[0] != string(rightJoin) {
		_, _ = io.WriteString(c, "no it answers the greeting as no kvconn agent does\n")
		return "", "", fmt.Errorf("it answers the greeting with %.60q", line)
	}
	r = right(words[0])
	if key, err = g.admits(r, words[1], words[2], words[3], bound); err != nil {
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

// admits says why a client does not get a right, or which nkey it has proved for it.
func (g *gate) admits(r right, method, public, proof string, bound []byte) (key string, err error) {
	if r == rightJoin {
		if g.local != "" && method == methodLocal && proved(g.local, "client", r, bound, proof) ||
			method == methodToken && proved(g.secrets.join, "client", r, bound, proof) ||
			!g.closed() && g.secrets.join == "" {
			return "", nil
		}
		return "", errNoJoin
	}
	switch {
	case method == methodNKey && g.signed(r, public, proof, bound):
		return public, nil
	case !g.closed(), method == methodToken && proved(g.secrets.token, "client", r, bound, proof):
		return "", nil
	}
	return "", errNoProof
}

// closed says whether some clients are not let in.
func (g *gate) closed() bool { return g.secrets.token != "" || len(g.keys) > 0 }

// provesRanks says whether a rank that joins has proved a secret: else anybody may say that it joins.
func (g *gate) provesRanks() bool { return g.closed() || g.secrets.join != "" }

func (g *gate) signed(r right, public, proof string, bound []byte) bool {
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
