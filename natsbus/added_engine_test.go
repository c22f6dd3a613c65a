package natsbus

import (
	"os"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
)

// TestEngineThatIsAdded: an engine that gets its account while the server runs finds the others and is found, when the server has read
// its configuration again twice, as the file says. Those that were there go on.
func TestEngineThatIsAdded(t *testing.T) {
	leaktest.Check(t)
	up, ud, un := newUser(t), newUser(t), newUser(t)
	file := nettest.ClusterOf(t, []string{up.key}, []string{ud.key})
	c := nettest.NewNATS(t, "-c", file)
	bus := func(u user, name, prefix string) *Bus {
		b := newBus(t, Options{Identity: u.named(t, name), ClusterURL: c.URL(), Seed: u.seed, JSPrefix: prefix})
		serve(b)
		return b
	}
	p, d := bus(up, "ZP", ""), bus(ud, "ZD", registryPrefix)
	register(t, p, up.engine("e"))
	answers := func(from, to *Bus) {
		t.Helper()
		self, other := shortName(from.opt.Identity.ID()), shortName(to.opt.Identity.ID())
		ask(t, from, "", core.AgentID(other), other+" via : hello "+self)
	}
	answers(d, p)
	text, err := os.ReadFile(nettest.ClusterOf(t, []string{up.key}, []string{ud.key, un.key}))
	if err == nil {
		err = os.WriteFile(file, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		c.Reload()
		answers(d, p)
		answers(p, d)
	}
	added := bus(un, "ZN", registryPrefix)
	if found, _, err := added.Lookup(ctxOf(t, within), core.Target{EngineID: up.engine("e")}); err != nil || found == nil {
		t.Errorf("it finds %+v, %v", found, err)
	}
	answers(added, p)
	answers(p, added)
	answers(d, p)
}
