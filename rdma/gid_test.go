package rdma

import (
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

func gidOf(index int, typ verbs.GIDType, addr string) gid {
	return gid{Index: index, Raw: netip.MustParseAddr(addr).As16(), Type: typ}
}

func TestGIDScope(t *testing.T) {
	for addr, want := range map[string]scope{
		"::":                   scopeNone,
		"::1":                  scopeNone,
		"0.0.0.0":              scopeNone,
		"0.1.2.3":              scopeNone,
		"127.0.0.1":            scopeNone,
		"127.200.0.1":          scopeNone,
		"224.0.0.1":            scopeNone,
		"ff02::1":              scopeNone,
		"ff0e::1":              scopeNone,
		"240.0.0.1":            scopeNone,
		"255.255.255.255":      scopeNone,
		"169.254.1.1":          scopeLinkLocal,
		"fe80::1":              scopeLinkLocal,
		"febf:ffff::1":         scopeLinkLocal,
		"10.0.0.1":             scopePrivate,
		"172.16.0.1":           scopePrivate,
		"172.31.255.255":       scopePrivate,
		"192.168.1.1":          scopePrivate,
		"100.64.0.1":           scopePrivate,
		"100.127.255.255":      scopePrivate,
		"fc00::1":              scopePrivate,
		"fdff::1":              scopePrivate,
		"fec0::1":              scopePrivate,
		"172.32.0.1":           scopeGlobal,
		"100.128.0.1":          scopeGlobal,
		"8.8.8.8":              scopeGlobal,
		"2001:db8::1":          scopeGlobal,
		"::ffff:8.8.8.8":       scopeGlobal,
		"::ffff:10.0.0.1":      scopePrivate,
		"2a00:1450:4001::200e": scopeGlobal,
	} {
		g := gidOf(0, verbs.GIDRoCEv2, addr)
		if got := g.scope(); got != want {
			t.Errorf("%s is %v, want %v", addr, got, want)
		}
	}
}

func TestRankGIDs(t *testing.T) {
	table := []gid{
		gidOf(0, verbs.GIDRoCEv1, "fe80::1"),
		gidOf(1, verbs.GIDRoCEv2, "fe80::1"),
		gidOf(2, verbs.GIDRoCEv1, "192.168.0.5"),
		gidOf(3, verbs.GIDRoCEv2, "192.168.0.5"),
		gidOf(4, verbs.GIDRoCEv1, "2001:db8::5"),
		gidOf(5, verbs.GIDRoCEv2, "2001:db8::5"),
		gidOf(6, verbs.GIDRoCEv2, "127.0.0.1"),
		gidOf(7, verbs.GIDRoCEv2, "::"),
		gidOf(8, verbs.GIDInfiniBand, "2001:db8::6"),
		gidOf(9, verbs.GIDType(9), "2001:db8::7"),
		gidOf(10, verbs.GIDRoCEv2, "9.9.9.9"),
		gidOf(11, verbs.GIDRoCEv2, "fd00::5"),
		gidOf(12, verbs.GIDRoCEv2, "ff02::1"),
		gidOf(13, verbs.GIDRoCEv2, "169.254.3.4"),
	}
	want := []int{5, 10, 3, 11, 1, 13, 4, 2, 0}
	indices := func(gs []gid) (out []int) {
		for _, g := range gs {
			out = append(out, g.Index)
		}
		return out
	}
	if got := indices(rankGIDs(table)); !reflect.DeepEqual(got, want) {
		t.Errorf("ranked %v, want %v", got, want)
	}
	slices.Reverse(table)
	if got := indices(rankGIDs(table)); !reflect.DeepEqual(got, want) {
		t.Errorf("the other way round %v, want %v", got, want)
	}
	if got := rankGIDs(nil); len(got) != 0 {
		t.Errorf("an empty table ranks as %v", got)
	}
}

func TestForceGID(t *testing.T) {
	table := []gid{gidOf(0, verbs.GIDRoCEv1, "fe80::1"), gidOf(1, verbs.GIDRoCEv2, "10.0.0.1"), gidOf(2, verbs.GIDRoCEv2, "::")}
	table[1].NetDev = "eth7"
	if g, err := forceGID(table, 0, "mlx5_0:1"); err != nil || g != table[0] {
		t.Errorf("%v, %v", g, err)
	}
	for _, index := range []int{2, 3, -1, 1 << 40} {
		_, err := forceGID(table, index, "mlx5_0:1")
		if err == nil {
			t.Errorf("index %d is accepted", index)
			continue
		}
		for _, want := range []string{"port mlx5_0:1 has no GID with index ", "rdma_gid_index", "0: fe80::1 (RoCE v1, link-local); 1: 10.0.0.1 (RoCE v2, private, eth7)", "leave the index out"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%v: want %q", err, want)
			}
		}
	}
	if _, err := forceGID(nil, 0, "x"); err == nil || !strings.Contains(err.Error(), "it has none") {
		t.Errorf("an empty table: %v", err)
	}
	if _, err := forceGID(slices.Repeat(table[:1], 1000), 5, "x"); err == nil || len(err.Error()) > 2000 {
		t.Errorf("a long table: %d bytes, %v", len(err.Error()), err)
	}
}

func roce(name string, gids ...gid) *portAddress {
	return &portAddress{Name: name, Link: verbs.LinkEthernet, GIDs: gids, Index: -1}
}

func TestChooseRoute(t *testing.T) {
	ib := func(name string, lid uint16, subnet string) *portAddress {
		p := &portAddress{Name: name, Link: verbs.LinkInfiniBand, LID: lid, Index: -1}
		if subnet != "" {
			p.GIDs = []gid{gidOf(0, verbs.GIDInfiniBand, subnet)}
		}
		return p
	}
	forced := func(p *portAddress, index int) *portAddress { p.Index = index; return p }
	withGRH := func(p *portAddress) *portAddress { p.GRH = true; return p }
	for _, c := range []struct {
		name          string
		local, remote *portAddress
		want          string // route, or a part of the error
	}{
		{"one each", roce("a:1", gidOf(1, verbs.GIDRoCEv2, "10.0.0.1")), roce("b:1", gidOf(3, verbs.GIDRoCEv2, "10.0.0.2")),
			"GID 1: 10.0.0.1 (RoCE v2, private) to 3: 10.0.0.2 (RoCE v2, private)"},
		{"v2 although v1 reaches farther", roce("a:1", gidOf(0, verbs.GIDRoCEv1, "9.0.0.1"), gidOf(1, verbs.GIDRoCEv2, "fe80::1")),
			roce("b:1", gidOf(0, verbs.GIDRoCEv1, "9.0.0.2"), gidOf(1, verbs.GIDRoCEv2, "fe80::2")),
			"GID 1: fe80::1 (RoCE v2, link-local) to 1: fe80::2 (RoCE v2, link-local)"},
		{"v1 when a side has no other", roce("a:1", gidOf(0, verbs.GIDRoCEv1, "9.0.0.1"), gidOf(1, verbs.GIDRoCEv2, "9.0.0.1")), roce("b:1", gidOf(0, verbs.GIDRoCEv1, "9.0.0.2")),
			"GID 0: 9.0.0.1 (RoCE v1, routable) to 0: 9.0.0.2 (RoCE v1, routable)"},
		{"the family that both have", roce("a:1", gidOf(1, verbs.GIDRoCEv2, "9.0.0.1"), gidOf(2, verbs.GIDRoCEv2, "fd00::1")), roce("b:1", gidOf(1, verbs.GIDRoCEv2, "fd00::2")),
			"GID 2: fd00::1 (RoCE v2, private) to 1: fd00::2 (RoCE v2, private)"},
		{"the scope of the worse side", roce("a:1", gidOf(1, verbs.GIDRoCEv2, "9.0.0.1"), gidOf(2, verbs.GIDRoCEv2, "2001:db8::1")), roce("b:1", gidOf(1, verbs.GIDRoCEv2, "10.0.0.2"), gidOf(2, verbs.GIDRoCEv2, "2001:db8::2")),
			"GID 2: 2001:db8::1 (RoCE v2, routable) to 2: 2001:db8::2 (RoCE v2, routable)"},
		{"IPv4 before IPv6 of the same scope", roce("a:1", gidOf(1, verbs.GIDRoCEv2, "2001:db8:0:1::1"), gidOf(2, verbs.GIDRoCEv2, "9.0.0.1")), roce("b:1", gidOf(1, verbs.GIDRoCEv2, "2001:db8:0:2::1"), gidOf(2, verbs.GIDRoCEv2, "7.0.0.2")),
			"GID 2: 9.0.0.1 (RoCE v2, routable) to 2: 7.0.0.2 (RoCE v2, routable)"},
		{"but not when IPv6 is nearer", roce("a:1", gidOf(1, verbs.GIDRoCEv2, "2001:db8::a:1"), gidOf(2, verbs.GIDRoCEv2, "9.0.0.1")), roce("b:1", gidOf(1, verbs.GIDRoCEv2, "2001:db8::b:1"), gidOf(2, verbs.GIDRoCEv2, "7.0.0.2")),
			"GID 1: 2001:db8::a:1 (RoCE v2, routable) to 1: 2001:db8::b:1 (RoCE v2, routable)"},
		{"the subnet that both are in", roce("a:1", gidOf(1, verbs.GIDRoCEv2, "10.1.0.1"), gidOf(2, verbs.GIDRoCEv2, "192.168.9.1")), roce("b:1", gidOf(1, verbs.GIDRoCEv2, "192.168.9.2"), gidOf(2, verbs.GIDRoCEv2, "10.200.0.2")),
			"GID 2: 192.168.9.1 (RoCE v2, private) to 1: 192.168.9.2 (RoCE v2, private)"},
		{"link-local reaches only such", roce("a:1", gidOf(1, verbs.GIDRoCEv2, "fe80::1")), roce("b:1", gidOf(1, verbs.GIDRoCEv2, "fd00::2")), "no two GIDs of the same type and address family: here 1: fe80::1"},
		{"two families", roce("a:1", gidOf(1, verbs.GIDRoCEv2, "10.0.0.1")), roce("b:1", gidOf(1, verbs.GIDRoCEv2, "fd00::2")), "a:1 and b:1 have no two GIDs"},
		{"two types", roce("a:1", gidOf(1, verbs.GIDRoCEv2, "10.0.0.1")), roce("b:1", gidOf(1, verbs.GIDRoCEv1, "10.0.0.2")), "no two GIDs"},
		{"none usable", roce("a:1", gidOf(1, verbs.GIDRoCEv2, "127.0.0.1")), roce("b:1"), "at the peer none"},
		{"a forced one", forced(roce("a:1", gidOf(1, verbs.GIDRoCEv2, "10.0.0.1"), gidOf(0, verbs.GIDRoCEv1, "fe80::1")), 0), roce("b:1", gidOf(1, verbs.GIDRoCEv2, "10.0.0.2"), gidOf(5, verbs.GIDRoCEv1, "fe80::2")),
			"GID 0: fe80::1 (RoCE v1, link-local) to 5: fe80::2 (RoCE v1, link-local)"},
		{"a forced one that is not there", forced(roce("a:1", gidOf(1, verbs.GIDRoCEv2, "10.0.0.1")), 4), roce("b:1"), "port a:1 has no GID with index 4"},
		{"one at the peer", roce("a:1", gidOf(1, verbs.GIDRoCEv2, "10.0.0.1")), forced(roce("b:1"), 4), "at the peer: port b:1 has no GID with index 4"},
		{"LID", ib("a:1", 3, "fe80::1"), ib("b:1", 17, "fe80::2"), "LID 17"},
		{"LID without GIDs", ib("a:1", 3, ""), ib("b:1", 17, ""), "LID 17"},
		{"LID and GRH", withGRH(ib("a:1", 3, "fe80::1")), ib("b:1", 17, "fe80::2"), "GID 0: fe80::1 (IB, link-local) to 0: fe80::2 (IB, link-local), LID 17"},
		{"GRH of the peer", ib("a:1", 3, "fe80::1"), withGRH(ib("b:1", 17, "fe80::2")), "GID 0: fe80::1 (IB, link-local) to"},
		{"GRH without a GID", withGRH(ib("a:1", 3, "fe80::1")), ib("b:1", 17, ""), "needs a global routing header, but a side has no GID"},
		{"two subnets", ib("a:1", 3, "fe80::1"), ib("b:1", 17, "fec0::2"), "a:1 is in the subnet of fe80::1 here, b:1 in that of fec0::2 at the peer"},
		{"no LID", ib("a:1", 0, "fe80::1"), ib("b:1", 17, "fe80::2"), "a:1 has LID 0, which no host has: is a subnet manager running?"},
		{"a multicast LID", ib("a:1", 3, "fe80::1"), ib("b:1", 0xc000, "fe80::2"), "b:1 has LID 49152"},
		{"two link layers", ib("a:1", 3, "fe80::1"), roce("b:1", gidOf(1, verbs.GIDRoCEv2, "fe80::2")), "a:1 is InfiniBand here, b:1 is Ethernet at the peer"},
		{"no known link layer", &portAddress{Name: "a:1", Link: 9}, &portAddress{Name: "b:1", Link: 9}, "link layer 9"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, err := chooseRoute(c.local, c.remote)
			got := p.String()
			if err != nil {
				got = err.Error()
			}
			if !strings.Contains(got, c.want) || (err == nil && got != c.want && !strings.HasPrefix(got, c.want)) {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
		})
	}
}

// FuzzGIDs: two ports of any content. Nothing panics. The ranking is a total order of
// usable GIDs that the table's order does not change. A path's GIDs are its ports' and
// match, and no matching pair is better.
func FuzzGIDs(f *testing.F) {
	seed := func(ports ...*portAddress) (b []byte) {
		for _, p := range ports {
			b = append(b, byte(p.Link), byte(p.LID>>8), byte(p.LID), byte(p.Index), 0, byte(len(p.GIDs)))
			for _, g := range p.GIDs {
				b = append(append(b, byte(g.Index), byte(g.Type)), g.Raw[:]...)
			}
		}
		return b
	}
	f.Add(seed(roce("", gidOf(0, verbs.GIDRoCEv1, "fe80::1"), gidOf(1, verbs.GIDRoCEv2, "10.0.0.1")), roce("", gidOf(0, verbs.GIDRoCEv2, "10.0.0.2"), gidOf(1, verbs.GIDRoCEv2, "9.9.9.9"))))
	f.Add(seed(roce("", gidOf(0, verbs.GIDRoCEv2, "2001:db8::3"), gidOf(0, verbs.GIDRoCEv2, "2001:db8::1")), roce("", gidOf(0, verbs.GIDRoCEv2, "fd00::2"), gidOf(1, verbs.GIDRoCEv2, "2001:db8::2"))))
	f.Add(seed(&portAddress{Link: verbs.LinkInfiniBand, LID: 3, GIDs: []gid{gidOf(0, verbs.GIDInfiniBand, "fe80::1")}}, &portAddress{Link: verbs.LinkInfiniBand, LID: 4}))
	f.Add(seed(roce(""), roce("")))
	f.Fuzz(func(t *testing.T, in []byte) {
		n := &numbers{in}
		port := func(name string) *portAddress {
			p := &portAddress{Name: name, Link: verbs.LinkLayer(n.byte()), LID: uint16(n.two()), Index: int(int8(n.byte()))}
			p.GRH = n.byte()%8 == 7
			p.GIDs = make([]gid, n.byte()%12)
			for i := range p.GIDs {
				p.GIDs[i].Index, p.GIDs[i].Type = int(int8(n.byte())), verbs.GIDType(n.byte())
				for j := range p.GIDs[i].Raw {
					p.GIDs[i].Raw[j] = n.byte()
				}
			}
			return p
		}
		local, remote := port("a"), port("b")
		for _, p := range []*portAddress{local, remote} {
			ranked := rankGIDs(p.GIDs)
			for i := range ranked {
				if g := &ranked[i]; g.scope() == scopeNone || g.Type != verbs.GIDRoCEv1 && g.Type != verbs.GIDRoCEv2 {
					t.Fatalf("%v is ranked", g)
				}
				for j := range ranked {
					want := 0
					if ranked[i] != ranked[j] {
						if want = -1; i > j {
							want = 1
						}
					}
					if got := compareGIDs(ranked[i], ranked[j]); got != want {
						t.Fatalf("%v to %v: %d, want %d", ranked[i], ranked[j], got, want)
					}
				}
			}
			reversed := slices.Clone(p.GIDs)
			slices.Reverse(reversed)
			if again := rankGIDs(reversed); !slices.Equal(again, ranked) {
				t.Fatalf("%v is ranked %v, and from the end %v", p.GIDs, ranked, again)
			}
		}
		p, err := chooseRoute(local, remote)
		if err != nil {
			if strings.TrimSpace(err.Error()) == "" {
				t.Fatal("an error without words")
			}
			return
		}
		if p.GRH && (!slices.Contains(local.GIDs, p.Local) || !slices.Contains(remote.GIDs, p.Remote)) {
			t.Fatalf("%v is not between %v and %v", p, local.GIDs, remote.GIDs)
		}
		if local.Link != remote.Link || (p.LID == 0) != (local.Link == verbs.LinkEthernet) {
			t.Fatalf("%v between %+v and %+v", p, local, remote)
		}
		if local.Link != verbs.LinkEthernet {
			return
		}
		if !p.GRH || !match(&p.Local, &p.Remote) {
			t.Fatalf("%v between %+v and %+v", p, local, remote)
		}
		if local.Index >= 0 && p.Local.Index != local.Index || remote.Index >= 0 && p.Remote.Index != remote.Index {
			t.Fatalf("%v, forced were %d and %d", p, local.Index, remote.Index)
		}
		if local.Index >= 0 || remote.Index >= 0 {
			return
		}
		for _, l := range rankGIDs(local.GIDs) {
			for _, r := range rankGIDs(remote.GIDs) {
				if match(&l, &r) && (l.Type > p.Local.Type || l.Type == p.Local.Type && min(l.scope(), r.scope()) > min(p.Local.scope(), p.Remote.scope())) {
					t.Fatalf("%v is chosen, not %v to %v", p, l, r)
				}
			}
		}
	})
}
