package node

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestAllowGID: what the list says of RoCE addresses, which have no names.
func TestAllowGID(t *testing.T) {
	lists := map[string]*allowList{
		"none":  allowing(t),
		"cidr":  allowing(t, "10.0.0.0/8", "fd12::/16"),
		"names": allowing(t, "prefill-1", "*.cluster.local"),
		"all":   allowing(t, "0.0.0.0/0", "::/0"),
		"links": allowing(t, "fe80::/10", "169.254.0.0/16"),
	}
	for _, c := range []struct {
		ip, ok, why string // why: in the error of list cidr
	}{
		{"10.1.2.3", "none cidr all", ""},
		{"::ffff:10.1.2.3", "none cidr all", ""},
		{"fd12::1", "none cidr all", ""},
		{"192.168.1.1", "none all", "192.168.1.1 is not in the list"},
		{"::ffff:192.168.1.1", "none all", "192.168.1.1 is not in the list"},
		{"2001:db8::1", "none all", "2001:db8::1 is not in the list"},
		{"fe80::1", "none links", "link-local"},
		{"169.254.1.1", "none links", "link-local"},
		{"169.254.169.254", "", "metadata"},
		{"fd00:ec2::254", "", "metadata"},
		{"64:ff9b::a9fe:a9fe", "", "metadata"},
		{"2002:a9fe:0101::1", "", "link-local"},
		{"ff02::1", "", "multicast"},
		{"::", "", "unspecified"},
	} {
		for name, l := range lists {
			err := l.checkGID(netip.MustParseAddr(c.ip))
			if want := strings.Contains(" "+c.ok+" ", " "+name+" "); (err == nil) != want {
				t.Errorf("list %s, %s: %v, want it to pass: %v", name, c.ip, err, want)
			}
			if err != nil && (!strings.HasPrefix(err.Error(), "RoCE address ") || !strings.Contains(err.Error(), "bootstrap_allow")) {
				t.Errorf("list %s, %s: %v does not say what to do", name, c.ip, err)
			}
			if name == "cidr" && err != nil && !strings.Contains(err.Error(), c.why) {
				t.Errorf("%s: %v, want %q", c.ip, err, c.why)
			}
		}
	}
}

// TestGuardOfRDMA: rdma is given the agent's list, on either side.
func TestGuardOfRDMA(t *testing.T) {
	leaktest.Check(t)
	for _, role := range []string{RolePrefill, RoleDecode} {
		cfg := testConfig(role)
		cfg.BootstrapAllow = append(cfg.BootstrapAllow, "127.0.0.1", "10.9.0.0/16")
		var guard func(netip.Addr) error
		a, err := Open(cfg, Options{rdma: func(c rdma.Config, _ core.AgentID, _ *kv.Layout, _ core.Sink, _ core.Signal) (core.Signaller, error) {
			guard = c.Guard
			return nil, core.ErrTransportClosed
		}})
		if err != nil {
			t.Fatal(err)
		}
		if err := a.RegisterKVCaches(regions(make([]byte, layers*numBlocks*blockBytes))); err != nil {
			t.Fatal(err)
		}
		if guard == nil || guard(netip.MustParseAddr("10.9.0.1")) != nil || guard(netip.MustParseAddr("10.8.0.1")) == nil {
			t.Errorf("role %s: rdma is not held to bootstrap_allow", role)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
}
