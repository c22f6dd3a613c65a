package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nkeys"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
)

// nkeyFile writes the seed of a new nkey.
func nkeyFile(t *testing.T) (file, public string) {
	t.Helper()
	key, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	seed, _ := key.Seed()
	public, _ = key.PublicKey()
	file = filepath.Join(t.TempDir(), "seed")
	if err := os.WriteFile(file, seed, 0o600); err != nil {
		t.Fatal(err)
	}
	return file, public
}

// TestClusterWithKeys: agents whose rights are those of examples/nats/kvconn.conf transfer,
// also after one of a user's agents was replaced, and hear when the other is gone.
func TestClusterWithKeys(t *testing.T) {
	leaktest.Check(t)
	ps, pk := nkeyFile(t)
	ds, dk := nkeyFile(t)
	es, ek := nkeyFile(t)
	c := nettest.NewNATS(t, "-c", nettest.ClusterUsers(t, pk, dk, ek))
	config := func(role, seed string) Config {
		cfg := testConfig(role)
		cfg.NATSURL, cfg.NATSNKeySeedFile = c.URL(), seed
		if role == RolePrefill {
			cfg.AdvertiseHost, cfg.EngineID = "127.0.0.1", pk+"-p0"
		} else {
			cfg.NATSJSPrefix = "kvconn.v1.registry"
		}
		return cfg
	}
	p := open(t, config(RolePrefill, ps))
	from := p.BootstrapAddress()
	d, e := open(t, config(RoleDecode, ds)), open(t, config(RoleDecode, es))
	for key, a := range map[string]*side{pk: p, dk: d, ek: e} {
		if !strings.HasPrefix(string(a.ID()), key+"-") {
			t.Errorf("an agent with the key %s is called %s", key, a.ID())
		}
	}
	transfer(t, p, d, "first", from)
	transfer(t, p, e, "second", from)
	// Nobody is told another's id.
	p.Announce([]core.TransferID{"third"})
	d.load("third", from, 1)
	until(t, "prefill has the load", func() bool { return d.Stats().LoadsWaiting == 1 })
	e.load("third", from, 1)
	if r := e.report("third"); r.Code != core.Refused || strings.Contains(r.Reason, dk) {
		t.Errorf("another's transfer: %v, %s", r.Code, r.Reason)
	}
	again := open(t, config(RoleDecode, ds)) // of the same user
	if again.ID() == d.ID() {
		t.Error("two agents of one user have one id")
	}
	transfer(t, p, again, "fourth", from)
	p.fill(3, 5)
	p.offer("third", 5)
	d.want("third", core.OK)
	p.want("third", core.OK)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	d.load("fifth", from, 1)
	if r := d.report("fifth"); r.Code == core.OK {
		t.Errorf("a load from an agent that has closed: %+v", r)
	}
}

// TestClusterOfBothRoles: engines of role "both" have the account of a prefill engine in examples/nats/kvconn.conf, each
// with a line for the other. They load from each other.
func TestClusterOfBothRoles(t *testing.T) {
	leaktest.Check(t)
	as, ak := nkeyFile(t)
	bs, bk := nkeyFile(t)
	keys := []string{ak, bk}
	c := nettest.NewNATS(t, "-c", nettest.ClusterOf(t, keys, keys))
	engine := func(seed, id string) *side {
		t.Helper()
		cfg := testConfig(RoleBoth)
		cfg.EngineID, cfg.NATSURL, cfg.NATSNKeySeedFile, cfg.AdvertiseHost = id, c.URL(), seed, "127.0.0.1"
		return open(t, cfg)
	}
	a, b := engine(as, ak+"-one"), engine(bs, bk+"-two")
	for id, pair := range map[core.TransferID][2]*side{"there": {a, b}, "back": {b, a}} {
		p, d := pair[0], pair[1]
		p.fill(byte(len(id)), 3)
		p.offer(id, 3)
		if _, err := d.StartLoad([]core.LoadRequest{{ID: id, From: from("", p.cfg.EngineID), Selection: kv.Selection{Blocks: [][]kv.BlockID{{4}}}}}); err != nil {
			t.Fatal(err)
		}
		d.want(id, core.OK)
		p.want(id, core.OK)
		same(t, p, []kv.BlockID{3}, d, []kv.BlockID{4})
	}
}
