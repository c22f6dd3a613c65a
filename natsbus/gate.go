package natsbus

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base32"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/kvconn/kvconn/core"
)

// homeUser is the user by which this process enters its own server; the password is
// random.
const homeUser = "kvconn-home"

// clientName begins the name under which an agent connects; its id and the
// prefix of its inboxes follow.
const clientName = "kvconn"

// replyWithin is how long an agent may take to answer a request.
const replyWithin = time.Minute

// gate decides which clients may use the embedded server, and which subjects.
type gate struct {
	secret string // of homeUser
	token  string
	owner  core.AgentID    // the server's own agent, which enters as homeUser
	keys   map[string]bool // public keys, the token's among them; nil: all clients are let in
}

func newGate(opt *ServerOptions) (*gate, error) {
	g := &gate{secret: randomName(), token: opt.Token, owner: opt.Owner}
	if opt.Token != "" || len(opt.NKeys) > 0 {
		g.keys = map[string]bool{}
	}
	for _, key := range opt.NKeys {
		if !nkeys.IsValidPublicUserKey(key) {
			return nil, fmt.Errorf("embedded nats server: %q is not a public user nkey, which begins with U", key)
		}
		g.keys[key] = true
	}
	if opt.Token != "" {
		_, public, err := tokenKey(opt.Token)
		if err != nil {
			return nil, err
		}
		g.keys[public] = true
	}
	return g, nil
}

// Check implements server.Authentication.
func (g *gate) Check(c server.ClientAuthentication) bool {
	o := c.GetOpts()
	if o.Username == homeUser {
		return subtle.ConstantTimeCompare([]byte(o.Password), []byte(g.secret)) == 1
	}
	if g.keys != nil && !g.proven(o, c.GetNonce()) {
		return false
	}
	c.RegisterUser(&server.User{Permissions: clientPermissions(o.Name, g.owner)})
	return true
}

// proven: the client has shown a signature or, as other NATS clients do, the token.
func (g *gate) proven(o *server.ClientOpts, nonce []byte) bool {
	if o.Nkey == "" {
		return g.token != "" && subtle.ConstantTimeCompare([]byte(o.Token), []byte(g.token)) == 1
	}
	if !g.keys[o.Nkey] {
		return false
	}
	sig, err := base64.RawURLEncoding.DecodeString(o.Sig)
	if err != nil {
		return false
	}
	key, err := nkeys.FromPublicKey(o.Nkey)
	return err == nil && key.Verify(nonce, sig) == nil
}

// clientPermissions lets a peer ask agents, answer them and read the registry, which
// only this process writes. A peer listens under the id that it names. It cannot
// listen in another's place, since an agent tells its id only to its peers.
func clientPermissions(name string, owner core.AgentID) *server.Permissions {
	id, inbox, ok := parseClientName(name)
	if !ok || id == subject(owner) || id == subject(hostID) { // every client reads the owner's id in the registry
		nothing := &server.SubjectPermission{Deny: []string{">"}}
		return &server.Permissions{Publish: nothing, Subscribe: nothing}
	}
	return &server.Permissions{
		Publish: &server.SubjectPermission{Allow: []string{
			subject("*"), "$JS.API.STREAM.INFO." + stream, "$JS.API.STREAM.MSG.GET." + stream,
			"$JS.API.DIRECT.GET." + stream, "$JS.API.DIRECT.GET." + stream + ".>",
		}},
		Subscribe: &server.SubjectPermission{Allow: []string{id, inbox + ".>"}},
		Response:  &server.ResponsePermission{MaxMsgs: 1, Expires: replyWithin},
	}
}

// parseClientName returns the subjects of a client's id and inboxes.
func parseClientName(name string) (id, inbox string, ok bool) {
	parts := strings.Split(name, " ")
	if len(parts) != 3 || parts[0] != clientName || !legalID.MatchString(parts[1]) || !legalID.MatchString(parts[2]) {
		return "", "", false
	}
	return subject(core.AgentID(parts[1])), inboxPrefix(parts[2]), true
}

func inboxPrefix(random string) string { return "_INBOX." + random }

func randomName() string {
	var b [20]byte
	rand.Read(b[:])
	return base32.StdEncoding.EncodeToString(b[:])
}

// tokenKey derives a signing key from a token. By it a client proves that it knows
// the token, and the server behind a bootstrap port never sees it.
func tokenKey(token string) (nkeys.KeyPair, string, error) {
	seed := sha256.Sum256([]byte("kvconn token " + token))
	key, err := nkeys.FromRawSeed(nkeys.PrefixByteUser, seed[:])
	if err != nil {
		return nil, "", fmt.Errorf("the token's key: %w", err)
	}
	public, err := key.PublicKey()
	if err != nil {
		return nil, "", fmt.Errorf("the token's key: %w", err)
	}
	return key, public, nil
}

// CheckSeed checks the seed of a user nkey. Its error does not contain the seed.
func CheckSeed(seed string) error {
	_, _, err := seedKey(seed)
	return err
}

// CheckNKey checks a public user nkey.
func CheckNKey(public string) error {
	if !nkeys.IsValidPublicUserKey(public) {
		return errors.New("not a public user nkey, which begins with U")
	}
	return nil
}

func seedKey(seed string) (nkeys.KeyPair, string, error) {
	key, err := nkeys.FromSeed([]byte(seed))
	if err != nil {
		return nil, "", errors.New("not an nkey seed, which begins with SU")
	}
	public, err := key.PublicKey()
	if err != nil || !nkeys.IsValidPublicUserKey(public) {
		return nil, "", errors.New("not the seed of a user nkey, which begins with SU")
	}
	return key, public, nil
}

// credentials prove this agent's identity on a link.
func (b *Bus) credentials(kind linkKind) ([]nats.Option, error) {
	switch {
	case kind == homeLink:
		return []nats.Option{nats.UserInfo(homeUser, b.opt.Server.gate.secret)}, nil
	case b.opt.Seed != "":
		key, public, err := seedKey(b.opt.Seed)
		if err != nil {
			return nil, err
		}
		return []nats.Option{nats.Nkey(public, key.Sign)}, nil
	case b.opt.Token == "":
		return nil, nil
	case kind == clusterLink: // a cluster's servers know the token, not its key
		return []nats.Option{nats.Token(b.opt.Token)}, nil
	}
	key, public, err := tokenKey(b.opt.Token)
	if err != nil {
		return nil, err
	}
	return []nats.Option{nats.Nkey(public, key.Sign)}, nil
}
