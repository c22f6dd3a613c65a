// After the TLS handshake each of two agents proves the secrets that it knows. The server proves
// its own first, so that a client tells nothing to a server that does not know the client's
// secret:
//
//	server: kvconn PROOF-OF-TOKEN PROOF-OF-JOIN-TOKEN
//	client: RIGHT METHOD PUBLIC-KEY PROOF
//	server: ok, or: no REASON
//
// A proof is bound to the connection by a value that TLS derives from its keys, and that
// differs on every connection. So nobody can use a proof on another connection.

package natsbus

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// right is what a client wants to do at a server.
type right string

const (
	rightAsk  right = "ask"  // ask its agents for KV caches
	rightJoin right = "join" // be one of its engine's ranks
)

const (
	nothing          = "-" // in place of a proof that the agent cannot give
	maxHandshakeLine = 512 // bytes of a line of the handshake
	methodOpen       = "open"
	methodToken      = "token"
	methodNKey       = "nkey"
	methodLocal      = "local" // the secret of a server on this host, see store.go
)

// binding is a value that only the two ends of a TLS connection know.
func binding(s tls.ConnectionState) ([]byte, error) {
	b, err := s.ExportKeyingMaterial("EXPORTER-kvconn-proof", nil, 32)
	if err != nil {
		return nil, fmt.Errorf("the connection cannot be bound: %w", err)
	}
	if fault.On("bus-proof-unbound") {
		clear(b)
	}
	return b, nil
}

// proofOf proves the knowledge of a secret to the other end of a connection.
func proofOf(secret, side string, r right, bound []byte) string {
	if secret == "" {
		return nothing
	}
	if fault.On("bus-proof-of-either-side") {
		side = ""
	}
	mac := hmac.New(sha256.New, []byte(secret))
	fmt.Fprintf(mac, "kvconn %s %s ", side, r)
	mac.Write(bound)
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

func validProof(secret, side string, r right, bound []byte, proof string) bool {
	return secret != "" && hmac.Equal([]byte(proof), []byte(proofOf(secret, side, r, bound)))
}

// nkeyText is what a client signs with its nkey.
func nkeyText(r right, bound []byte) []byte {
	return append([]byte("kvconn client "+string(r)+" "), bound...)
}

// secrets are what one side has to prove itself with.
type secrets struct {
	token string // of the deployment; "" for none
	join  string // of the ranks of one prefill engine; "" for none
	seed  string // of the agent's own nkey, in the token's place
}

// prove is the client's half. local finds the secret that a server on this host keeps for
// the ranks of its engine.
func (k secrets) prove(c io.ReadWriter, s tls.ConnectionState, want right, local func(server core.AgentID) string) error {
	bound, err := binding(s)
	if err != nil {
		return err
	}
	line, err := readLine(c)
	if err != nil {
		return err
	}
	words := strings.Split(line, " ")
	if len(words) != 3 || words[0] != "kvconn" {
		return fmt.Errorf("it begins the handshake with %.60q, as no kvconn agent does", line)
	}
	token := validProof(k.token, "server", rightAsk, bound, words[1])
	join := want == rightJoin && validProof(k.join, "server", rightJoin, bound, words[2])
	hostSecret := ""
	if want == rightJoin && !join {
		if server, err := peerOf(s); err == nil {
			hostSecret = local(server)
		}
	}
	method, public, proof := methodOpen, nothing, nothing
	switch {
	case join:
		method, proof = methodToken, proofOf(k.join, "client", rightJoin, bound)
	case hostSecret != "":
		method, proof = methodLocal, proofOf(hostSecret, "client", rightJoin, bound)
	case k.token != "" && !token:
		return errOtherToken
	case want == rightJoin && k.join != "":
		return errOtherJoinToken
	case want == rightAsk && token:
		method, proof = methodToken, proofOf(k.token, "client", want, bound)
	case k.seed != "":
		key, name, err := seedKey(k.seed)
		if err != nil {
			return err
		}
		sig, err := key.Sign(nkeyText(want, bound))
		if err != nil {
			return err
		}
		method, public, proof = methodNKey, name, base64.RawURLEncoding.EncodeToString(sig)
	}
	if _, err := fmt.Fprintf(c, "%s %s %s %s\n", want, method, public, proof); err != nil {
		return err
	}
	line, err = readLine(c)
	if err != nil {
		return err
	}
	if line != "ok" {
		return fmt.Errorf("%w: %.200s", errRefused, strings.TrimPrefix(line, "no "))
	}
	return nil
}

var (
	errRefused        = errors.New("it refuses this agent")
	errOtherToken     = fmt.Errorf("%w: it does not know this agent's nats_token: it is not of this deployment, or has another token or none", errRefused)
	errOtherJoinToken = fmt.Errorf("%w: it does not know this agent's join_token: give all ranks of a prefill engine the same one", errRefused)
)

// readLine reads a line of the handshake, and not a byte behind it.
func readLine(c io.Reader) (string, error) {
	var line []byte
	var b [1]byte
	for len(line) < maxHandshakeLine {
		if _, err := io.ReadFull(c, b[:]); err != nil {
			return "", err
		}
		if b[0] == '\n' {
			return string(line), nil
		}
		line = append(line, b[0])
	}
	return "", fmt.Errorf("it begins the handshake with a line of more than %d bytes", maxHandshakeLine)
}
