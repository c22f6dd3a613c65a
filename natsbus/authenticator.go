// Who may use the embedded server, and which subjects: a client that has proved itself gets a user for one connection.

package natsbus

import (
	"crypto/subtle"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// homeUser is the user by which this process enters its own server; the password is
// random.
const homeUser = "kvconn-home"

// replyWithin is how long an agent may take to answer a request.
const replyWithin = time.Minute

// authenticator decides which clients may use the embedded server, and which subjects.
type authenticator struct {
	home    string // password of homeUser
	secrets secrets
	local   string          // the join secret of this host, see store.go
	keys    map[string]bool // public nkeys whose owners are let in without the token

	mu        sync.Mutex
	users     map[string]client // by the user's name, for clients that have proved themselves
	connected map[core.AgentID]presence
}

// client is the agent that a connection has proved to be, and what it may do.
type client struct {
	id      core.AgentID
	right   right
	account core.Account
}

// presence is an agent's connections.
type presence struct {
	account     core.Account // of the first of those that are open
	connections int
}

func newAuthenticator(k secrets, local string, keys []string) (*authenticator, error) {
	g := &authenticator{home: randomName(), secrets: k, local: local, keys: map[string]bool{}, users: map[string]client{}, connected: map[core.AgentID]presence{}}
	for _, key := range keys {
		if !nkeys.IsValidPublicUserKey(key) {
			return nil, fmt.Errorf("embedded nats server: %q is not a public user nkey, which begins with U", key)
		}
		g.keys[key] = true
	}
	return g, nil
}

// addUser makes a user for a client that has proved itself, for one connection. connect is the
// text that introduces this user to the embedded server.
func (g *authenticator) addUser(c client) (connect string, leave func(), err error) {
	user := fault.Pick("bus-user-shared", randomName(), "agent")
	options, err := json.Marshal(map[string]any{"user": user, "pass": "-", "name": clientName + string(c.id), "lang": "go", "version": "1",
		"protocol": 1, "echo": true, "headers": true, "no_responders": true, "verbose": false, "pedantic": false})
	if err != nil {
		return "", nil, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.users[user] = c
	at, there := g.connected[c.id]
	if !there {
		at.account = c.account
	}
	at.connections++
	g.connected[c.id] = at
	return "CONNECT " + string(options) + "\r\n", func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		delete(g.users, user)
		at := g.connected[c.id]
		if at.connections--; at.connections == 0 {
			delete(g.connected, c.id)
			return
		}
		g.connected[c.id] = at
	}, nil
}

// accountOf is the account that an agent's places count under: its nkey if it has proved one, else the address that it comes from. All
// agents that have gone share one account.
func (g *authenticator) accountOf(id core.AgentID) core.Account {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.connected[id].account
}

// Check implements server.Authentication.
func (g *authenticator) Check(c server.ClientAuthentication) bool {
	o := c.GetOpts()
	if o.Username == homeUser {
		return subtle.ConstantTimeCompare([]byte(o.Password), []byte(g.home)) == 1
	}
	g.mu.Lock()
	who, ok := g.users[o.Username]
	g.mu.Unlock()
	if ok {
		c.RegisterUser(&server.User{Permissions: clientPermissions(who)})
	}
	return ok
}

// clientPermissions lets a peer ask agents in its own name, answer them and read the
// registry, which only this process writes. A rank may also register.
func clientPermissions(c client) *server.Permissions {
	publish := []string{subject("*", c.id), "$JS.API.STREAM.INFO." + stream, "$JS.API.DIRECT.GET." + stream + ".>"}
	if c.right == rightJoin {
		publish = append(publish, subject(hostID, c.id))
	}
	subscribe := []string{subject(c.id, "*"), inboxOf(c.id) + ".>"}
	switch {
	case fault.On("bus-publishes-for-others"):
		publish = append(publish, subject("*", "*"))
	case fault.On("bus-subscribes-to-others"):
		subscribe = append(subscribe, ">")
	case fault.On("bus-answers-for-others"):
		publish = append(publish, inboxRoot+">")
	}
	return &server.Permissions{
		Publish:   &server.SubjectPermission{Allow: publish},
		Subscribe: &server.SubjectPermission{Allow: subscribe},
		Response:  &server.ResponsePermission{MaxMsgs: 1, Expires: replyWithin},
	}
}
