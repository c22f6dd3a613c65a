package node

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/natsbus"
	"github.com/kvconn/kvconn/rig/leaktest"
)

func allowing(t testing.TB, entries ...string) *allowList {
	t.Helper()
	l, err := parseAllow(entries)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// resolves returns what the list says of a host that resolves to ip. An empty ip stands
// for the host itself.
func (l *allowList) resolves(host, ip string) error {
	control, err := l.enter(host)
	if err != nil {
		return err
	}
	if ip == "" {
		ip = strings.Trim(host, "[]")
	}
	if _, err := netip.ParseAddr(ip); err != nil {
		return nil // a name, which is decided later
	}
	return control("tcp", net.JoinHostPort(ip, "1"), nil)
}

func TestAllowList(t *testing.T) {
	lists := map[string]*allowList{
		"none":   allowing(t),
		"cidr":   allowing(t, "10.0.0.0/8", "fd12::/16"),
		"names":  allowing(t, "Prefill-1.", "*.cluster.local"),
		"mixed":  allowing(t, "prefill-1", "10.1.2.3"),
		"all":    allowing(t, "0.0.0.0/0", "::/0"),
		"inside": allowing(t, "169.254.0.0/16", "fe80::/10", "10.0.0.0/8"),
		"meta":   allowing(t, "169.254.169.254", "224.1.2.3/32", "fd00:ec2::254"),
	}
	for _, c := range []struct {
		host, ip string // as written, and what a name is resolved to
		ok       string // lists that let it pass, separated by blanks
		why      string // in the error of list none
	}{
		{"10.1.2.3", "", "none cidr mixed all inside", ""},
		{"192.168.1.1", "", "none all", ""},
		{"127.0.0.1", "", "none all", ""},
		{"::1", "", "none all", ""},
		{"localhost", "127.0.0.1", "none all", ""},
		{"fd12::1", "", "none cidr all", ""},
		{"8.8.8.8", "", "none all", ""},
		{"[2001:db8::1]", "", "none all", ""},

		// Names, in any spelling, at a private address.
		{"prefill-1", "192.168.9.9", "none names mixed all", ""},
		{"PREFILL-1.", "192.168.9.9", "none names mixed all", ""},
		{"p.ns.cluster.local", "192.168.9.9", "none names all", ""},
		{"P.Cluster.Local.", "192.168.9.9", "none names all", ""},
		{"cluster.local", "192.168.9.9", "none all", ""},
		{"evilcluster.local", "192.168.9.9", "none all", ""},
		{"p.cluster.local.evil.com", "192.168.9.9", "none all", ""},
		{"other", "10.1.2.3", "none cidr mixed all inside", ""},
		{"other", "192.168.9.9", "none all", ""},

		// A name that is allowed, at an address that is not.
		{"prefill-1", "169.254.169.254", "meta", "metadata"},
		{"p.cluster.local", "169.254.1.1", "inside", "link-local"},
		{"p.cluster.local", "fe80::1%eth0", "inside", "link-local"},

		// The refused classes, in all their spellings.
		{"169.254.1.1", "", "inside", "link-local"},
		{"169.254.169.254", "", "meta", "metadata"},
		{"::ffff:169.254.169.254", "", "meta", "metadata"},
		{"[::ffff:a9fe:a9fe]", "", "meta", "metadata"},
		{"64:ff9b::a9fe:a9fe", "", "", "metadata"},
		{"2002:a9fe:a9fe::1", "", "", "metadata"},
		{"::169.254.169.254", "", "", "metadata"},
		{"fd00:ec2::254", "", "meta", "metadata"},
		{"100.100.100.200", "", "", "metadata"},
		{"168.63.129.16", "", "", "metadata"},
		{"metadata.google.internal", "169.254.169.254", "meta", "metadata"},
		{"fe80::1", "", "inside", "link-local"},
		{"fe80::1%eth0", "", "inside", "link-local"},
		{"224.1.2.3", "", "meta", "multicast"},
		{"ff02::1", "", "", "multicast"},
		{"0.0.0.0", "", "", "unspecified"},
		{"0.1.2.3", "", "", "unspecified"},
		{"::", "", "", "unspecified"},
		{"255.255.255.255", "", "", "broadcast"},
		{"240.0.0.1", "", "", "reserved"},

		// Names that some resolvers take for an address.
		{"0x7f.0.0.1", "", "", "four decimal"},
		{"0xa9fea9fe", "", "", "four decimal"},
		{"0251.0376.0251.0376", "", "", "four decimal"},
		{"2852039166", "", "", "four decimal"},
		{"127.1", "", "", "four decimal"},
		{"10.1.2.3.", "", "", "four decimal"},
		{"010.1.2.3", "", "", "four decimal"},
		{"10.1.2.0x3", "", "", "four decimal"},
		{"1.2.3.4.5", "", "", "four decimal"},
		{"", "", "", "not a host name"},
		{".", "", "", "not a host name"},
		{"a..b", "", "", "not a host name"},
		{"..", "", "", "not a host name"},
		{"u@h", "", "", "not a host name"},
		{"user:pass@10.1.2.3", "", "", "not a host name"},
		{"10.1.2.3#", "", "", "not a host name"},
		{"h%00", "", "", "not a host name"},
		{"１６９.254.169.254", "", "", "not a host name"},
		{"169。254。169。254", "", "", "not a host name"},
		{"h\x00", "", "", "not a host name"},
		{strings.Repeat("a.", 200) + "b", "", "", "401 bytes"},
	} {
		for name, l := range lists {
			err := l.resolves(c.host, c.ip)
			if want := strings.Contains(" "+c.ok+" ", " "+name+" "); (err == nil) != want {
				t.Errorf("list %s, host %q at %q: %v, want it to pass: %v", name, c.host, c.ip, err, want)
			}
			if err == nil {
				continue
			}
			if lookupCode(err) != core.Refused || !strings.Contains(err.Error(), "bootstrap_allow") {
				t.Errorf("list %s, host %q: %v is %v without the key", name, c.host, err, lookupCode(err))
			}
			if name == "none" && !strings.Contains(err.Error(), c.why) {
				t.Errorf("host %q at %q: %v, want %q in it", c.host, c.ip, err, c.why)
			}
		}
	}
}

func TestAllowEntries(t *testing.T) {
	for entry, want := range map[string]string{
		"": "not a host name", "*": "not a host name", "*.": "not a host name", "a*.b": "not a host name", "*.*.b": "not a host name",
		"http://h": "not a host name", "h:8998": "not a host name", "h/": "not a host name", "10.0.0.1/8": "write 10.0.0.0/8",
		"10.0.0.0/33": "not a host name", "::ffff:10.0.0.0/104": "IPv4 range", "fe80::1%eth0": "not a host name", "127.1": "not a host name",
		"*.1.2.3.4": "not a host name",
	} {
		if _, err := parseAllow([]string{"ok", entry}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("entry %q: %v, want %q", entry, err, want)
		}
	}
}

// A refused address sees no connection: neither as a bootstrap address, nor as
// the endpoint of a prefill agent that may be contacted itself.
func TestRefusedAddressSeesNothing(t *testing.T) {
	leaktest.Check(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	seen := make(chan net.Conn, 16)
	accepted := make(chan struct{})
	go func() {
		defer close(accepted)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			seen <- c
		}
	}()
	_, port, _ := net.SplitHostPort(l.Addr().String())

	cfg := testConfig(RoleDecode)
	cfg.BootstrapAllow = []string{"10.9.8.7", "192.168.0.0/16"}
	d := open(t, cfg)
	for i, from := range []string{"http://127.0.0.1:" + port, "http://localhost:" + port, "https://LOCALHOST:" + port, "http://[::ffff:127.0.0.1]:" + port,
		"http://0177.1:" + port, "http://2130706433:" + port} {
		id := core.TransferID("refused-" + from)
		d.load(id, from, kv.BlockID(i))
		d.want(id, core.Refused, "bootstrap_allow")
	}
	// As before with nothing but classes, and a name.
	d2 := open(t, testConfig(RoleDecode))
	for i, from := range []string{"http://169.254.169.254:80", "http://[fe80::1%25lo]:" + port, "http://0.0.0.0:" + port, "http://[::]:" + port} {
		id := core.TransferID("class-" + from)
		d2.load(id, from, kv.BlockID(i))
		d2.want(id, core.Refused, "bootstrap_allow")
	}

	// P itself may be contacted, at a bridge; its data may not be fetched.
	p := testConfig(RolePrefill)
	p.AdvertiseHost = "169.254.169.254"
	prefill := open(t, p)
	d3 := open(t, testConfig(RoleDecode))
	at := strings.Replace(prefill.BootstrapAddress(), "169.254.169.254", "127.0.0.1", 1)
	d3.load("endpoint", at, 1)
	d3.want("endpoint", core.Refused, "metadata", "bootstrap_allow")

	_ = l.Close()
	<-accepted
	if len(seen) != 0 {
		t.Errorf("%d connections came to the refused address", len(seen))
	}
}

// A name whose address changes after it was checked is caught when it is dialled.
func TestEndpointIsCheckedAgain(t *testing.T) {
	l := allowing(t, "*.cluster.local", "10.0.0.0/8")
	for _, c := range []struct {
		endpoint, address string
		ok                bool
	}{
		{"p.cluster.local:7000", "192.168.1.1:7000", true},
		{"p.cluster.local:7000", "169.254.169.254:7000", false},
		{"other:7000", "10.0.0.1:7000", true},
		{"other:7000", "127.0.0.1:7000", false},
		{"10.0.0.1:7000", "10.0.0.1:7000", true},
		{"bad", "10.0.0.1:7000", false},
	} {
		if err := l.checkDial(c.endpoint, c.address); (err == nil) != c.ok {
			t.Errorf("%s at %s: %v", c.endpoint, c.address, err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	for _, endpoint := range []string{"10.0.0.1", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:http", "localhost:7000", "[::1]:7000"} {
		var refused *refusedError
		if err := l.checkEndpoint(ctx, endpoint); !errors.As(err, &refused) {
			t.Errorf("%s: %v", endpoint, err)
		}
	}
	if err := l.checkEndpoint(ctx, "10.0.0.1:7000"); err != nil {
		t.Error(err)
	}
}

// FuzzAllow: an address that may be dialled is never of a refused class, and never
// outside of the list.
func FuzzAllow(f *testing.F) {
	for _, s := range []string{"http://10.0.0.1:8998", "https://p.cluster.local.:1/", "http://[::ffff:a9fe:a9fe]:80", "http://u:p@h:1",
		"http://0x7f.1:1", "http://[fe80::1%25eth0]:1", "http://%31:1", "http://169.254.169.254:80", "http://a.b.c:99999", "HTTP://H:1"} {
		f.Add(s, "169.254.169.254")
		f.Add(s, "10.1.1.1")
	}
	open, listed := allowing(f), allowing(f, "10.0.0.0/8", "*.cluster.local", "fd12::/16")
	f.Fuzz(func(t *testing.T, addr, resolved string) {
		at, err := natsbus.ParseAddress(addr)
		if err != nil {
			return
		}
		if host, port, err := net.SplitHostPort(at.Host); err != nil || host == "" || port == "" || host != at.Name {
			t.Fatalf("%q has host %q, which is %q %q %v", addr, at.Host, host, port, err)
		}
		if again, err := natsbus.ParseAddress(at.String()); err == nil && again.Name != at.Name {
			t.Fatalf("%q is %v, and then %v", addr, at, again)
		}
		ip, err := netip.ParseAddr(at.Name)
		if err != nil {
			if ip, err = netip.ParseAddr(resolved); err != nil {
				return
			}
		}
		for _, l := range []*allowList{open, listed} {
			if l.resolves(at.Name, ip.String()) != nil {
				continue
			}
			plain := ip.Unmap().WithZone("")
			if plain.IsLinkLocalUnicast() || plain.IsMulticast() || plain.IsUnspecified() || plain == netip.MustParseAddr("169.254.169.254") {
				t.Fatalf("%q at %v passes", addr, ip)
			}
			name := strings.ToLower(strings.TrimSuffix(at.Name, "."))
			if l == listed && !listed.nets[0].Contains(plain) && !listed.nets[1].Contains(plain) && !strings.HasSuffix(name, ".cluster.local") {
				t.Fatalf("%q at %v passes a list that does not hold it", addr, ip)
			}
		}
	})
}
