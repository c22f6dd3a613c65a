package natsbus

import (
	"strings"
	"sync"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// names are the identities that tests gave names to. A decode agent has another id at each
// server. These ids are derived when a name or a server is new: handlers look names up, and
// an id takes so long to derive that a handler which derived all would answer too late.
var names struct {
	sync.Mutex
	byName  map[string]*Identity
	byID    map[core.AgentID]string
	servers []core.AgentID // of all tests
}

// named is the identity of that name.
func named(name string) *Identity {
	names.Lock()
	defer names.Unlock()
	i := names.byName[name]
	if i == nil {
		if names.byName == nil {
			names.byName, names.byID = map[string]*Identity{}, map[core.AgentID]string{}
		}
		i = NewIdentity()
		names.byName[name], names.byID[i.ID()] = i, name
		for _, server := range names.servers {
			names.byID[i.At(server).ID()] = name
		}
	}
	return i
}

// namedAt makes the names known at a server too.
func namedAt(server core.AgentID) {
	names.Lock()
	defer names.Unlock()
	names.servers = append(names.servers, server)
	for name, i := range names.byName {
		names.byID[i.At(server).ID()] = name
	}
}

// shortName is the name of an id, here or at any server; the id itself if it has none.
func shortName[T ~string](id T) string {
	names.Lock()
	defer names.Unlock()
	if name, ok := names.byID[core.AgentID(id)]; ok {
		return name
	}
	return string(id)
}

// reach is the id by which a bus reaches the agent of that name.
func reach(b *Bus, name string) core.AgentID {
	if name == string(hostID) {
		return hostID
	}
	i := named(name)
	if !strings.HasPrefix(name, "D") || b.opt.ClusterURL != "" {
		return i.ID()
	}
	if s := b.opt.Server; s != nil {
		s.authenticator.mu.Lock()
		var in []core.AgentID
		for _, c := range s.authenticator.users {
			in = append(in, c.id)
		}
		s.authenticator.mu.Unlock()
		for _, id := range in {
			if shortName(id) == name {
				return id
			}
		}
		return i.At(s.opt.Identity.ID()).ID()
	}
	if home := b.homeLink(); home != nil && home.handshake != nil {
		return i.At(home.handshake.server()).ID()
	}
	return i.ID()
}

// A handler that looks names up must answer soon, however many servers and names earlier
// tests have made: TestHomeIsOpenedAgain gives each request 200 ms.
func TestShortNameDerivesNoID(t *testing.T) {
	leaktest.Check(t)
	before, p := named("D before its server"), newPort(t, "127.0.0.1:0", ServerOptions{})
	late := named("D after its server")
	for want, id := range map[string]core.AgentID{
		"D before its server": before.At(p.opt.Identity.ID()).ID(),
		"D after its server":  late.At(p.opt.Identity.ID()).ID(),
		"nobody":              "nobody",
	} {
		if got := shortName(id); got != want {
			t.Errorf("%s is called %q, want %q", id, got, want)
		}
		least := 1.0 // of several runs: the server beside it allocates now and then
		for range 20 {
			least = min(least, testing.AllocsPerRun(100, func() { shortName(id) }))
		}
		if least != 0 {
			t.Errorf("the look-up of %q allocates each time: it derives ids", want)
		}
	}
}
