package natsbus

import (
	"crypto/subtle"
	"encoding/base64"
	"fmt"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"

	"github.com/kvconn/kvconn/core"
)

// homeUser is the user by which this process enters its own server; the password is
// random.
const homeUser = "kvconn-home"

// replyWithin is how long an agent may take to answer a request.
const replyWithin = time.Minute

// gate decides which clients may use the embedded server, and which subjects.
type gate struct {
	secret string // of homeUser
	token  string
	owner  core.AgentID    // the server's own agent, which enters as homeUser
	keys   map[string]bool // public keys, the token's among them; nil: all clients are let in
}

func newGate(owner core.AgentID, token string, keys []string) (*gate, error) {
	g := &gate{secret: randomName(), token: token, owner: owner}
	if token != "" || len(keys) > 0 {
		g.keys = map[string]bool{}
	}
	for _, key := range keys {
		if !nkeys.IsValidPublicUserKey(key) {
			return nil, fmt.Errorf("embedded nats server: %q is not a public user nkey, which begins with U", key)
		}
		g.keys[key] = true
	}
	if token != "" {
		_, public, err := tokenKey(token)
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
