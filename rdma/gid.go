// How two ports address each other: by which of each side's GIDs, or by LID.

package rdma

import (
	"bytes"
	"cmp"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strings"

	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// gid is an entry of a port's GID table.
type gid struct {
	Index  int
	Raw    [16]byte
	Type   verbs.GIDType
	NetDev string // the network interface whose address it is; empty if unknown
}

// gidTable is a port's table as verbs gives it.
func gidTable(entries []verbs.GID) []gid {
	table := make([]gid, len(entries))
	for i, e := range entries {
		table[i] = gid{Index: e.Index, Raw: e.GID, Type: e.Type, NetDev: e.NetDev}
	}
	return table
}

// addr is the GID as an IP address, which it is in RoCE; IPv4-mapped is IPv4.
func (g *gid) addr() netip.Addr { return netip.AddrFrom16(g.Raw).Unmap() }

func (g gid) String() string {
	s := fmt.Sprintf("%d: %v (%v, %v", g.Index, g.addr(), g.Type, g.scope())
	if g.NetDev != "" {
		s += ", " + g.NetDev
	}
	return s + ")"
}

// scope is how far an address reaches; more is better.
type scope uint8

const (
	scopeNone      scope = iota // no address of a host
	scopeLinkLocal              // 169.254/16, fe80::/10
	scopePrivate                // RFC 1918, 100.64/10, fc00::/7, fec0::/10
	scopeGlobal
)

func (s scope) String() string {
	return [...]string{"unusable", "link-local", "private", "routable"}[min(s, scopeGlobal)]
}

var (
	thisNetwork = netip.MustParsePrefix("0.0.0.0/8")
	sharedSpace = netip.MustParsePrefix("100.64.0.0/10")
	reserved    = netip.MustParsePrefix("240.0.0.0/4") // with 255.255.255.255
	siteLocal   = netip.MustParsePrefix("fec0::/10")
)

func (g *gid) scope() scope {
	switch a := g.addr(); {
	case a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || thisNetwork.Contains(a) || reserved.Contains(a):
		return scopeNone
	case a.IsLinkLocalUnicast():
		return scopeLinkLocal
	case a.IsPrivate() || sharedSpace.Contains(a) || siteLocal.Contains(a):
		return scopePrivate
	}
	return scopeGlobal
}

// usable says whether a RoCE queue pair can have this GID.
func (g *gid) usable() bool {
	return (g.Type == verbs.GIDRoCEv1 || g.Type == verbs.GIDRoCEv2) && g.scope() != scopeNone
}

// compareGIDs orders usable GIDs, the better first: by version (RoCE v2 before v1, which
// no router forwards), then by scope, then by place in the table.
func compareGIDs(a, b gid) int {
	return cmp.Or(
		cmp.Compare(b.Type, a.Type),
		cmp.Compare(b.scope(), a.scope()),
		cmp.Compare(a.Index, b.Index),
		bytes.Compare(a.Raw[:], b.Raw[:]),
		cmp.Compare(a.NetDev, b.NetDev),
	)
}

// rankGIDs returns the usable GIDs of a table, the best first.
func rankGIDs(table []gid) []gid {
	out := slices.DeleteFunc(slices.Clone(table), func(g gid) bool { return !g.usable() })
	slices.SortFunc(out, compareGIDs)
	return out
}

// forceGID is the entry that the configuration demands, even if another one is better.
func forceGID(table []gid, index int, port string) (gid, error) {
	for _, g := range table {
		if g.Index == index && g.Raw != [16]byte{} {
			return g, nil
		}
	}
	return gid{}, fmt.Errorf("port %s has no GID with index %d (rdma_gid_index); it has %s: choose one of these or leave the index out",
		port, index, listGIDs(table))
}

// listGIDs is the first entries of a table, as text for messages.
func listGIDs(table []gid) string {
	const most = 16
	var s []string
	for _, g := range table {
		if g.Raw == [16]byte{} {
			continue
		}
		if len(s) == most {
			s = append(s, "and more")
			break
		}
		s = append(s, g.String())
	}
	if s == nil {
		return "none"
	}
	return strings.Join(s, "; ")
}

// portAddress is what the other side must know of a port to send to it.
type portAddress struct {
	Name  string // "mlx5_0:1", for messages
	Link  verbs.LinkLayer
	LID   uint16
	GRH   bool // the port takes no packet without a global routing header
	GIDs  []gid
	Index int // of the forced GID; below 0 when any will do
}

// route is how two ports address each other. Without GRH only LID counts.
type route struct {
	GRH           bool
	Local, Remote gid
	LID           uint16 // of the remote port; 0 on Ethernet
}

func (p route) String() string {
	if !p.GRH {
		return fmt.Sprintf("LID %d", p.LID)
	}
	s := fmt.Sprintf("GID %v to %v", p.Local, p.Remote)
	if p.LID != 0 {
		s += fmt.Sprintf(", LID %d", p.LID)
	}
	return s
}

// chooseRoute says how local reaches remote, or why it cannot. A peer may have written
// both. Only a probe proves that bytes get through.
func chooseRoute(local, remote *portAddress) (route, error) {
	switch {
	case local.Link != remote.Link:
		return route{}, fmt.Errorf("%s is %v here, %s is %v at the peer: different link layers cannot reach each other",
			local.Name, local.Link, remote.Name, remote.Link)
	case local.Link == verbs.LinkInfiniBand:
		return routeByLID(local, remote)
	case local.Link == verbs.LinkEthernet:
		return routeByGID(local, remote)
	}
	return route{}, fmt.Errorf("%s here and %s at the peer have a link layer of no known kind: %v", local.Name, remote.Name, local.Link)
}

func routeByLID(local, remote *portAddress) (route, error) {
	for _, p := range []*portAddress{local, remote} {
		if p.LID == 0 || p.LID >= 0xc000 {
			return route{}, fmt.Errorf("%s has LID %d, which no host has: is a subnet manager running?", p.Name, p.LID)
		}
	}
	l, lok := subnetGID(local)
	r, rok := subnetGID(remote)
	if lok && rok && !bytes.Equal(l.Raw[:8], r.Raw[:8]) {
		return route{}, fmt.Errorf("%s is in the subnet of %v here, %s in that of %v at the peer: between subnets rdma is not supported",
			local.Name, l.addr(), remote.Name, r.addr())
	}
	p := route{LID: remote.LID}
	if local.GRH || remote.GRH {
		if !lok || !rok {
			return route{}, fmt.Errorf("%s to %s needs a global routing header, but a side has no GID: here %s, at the peer %s",
				local.Name, remote.Name, listGIDs(local.GIDs), listGIDs(remote.GIDs))
		}
		p.GRH, p.Local, p.Remote = true, l, r
	}
	return p, nil
}

// subnetGID is the GID that names an InfiniBand port within its subnet: the
// forced one, or the first.
func subnetGID(p *portAddress) (gid, bool) {
	g, err := forceGID(p.GIDs, max(p.Index, 0), p.Name)
	return g, err == nil
}

// maxGIDs is how many of a port's GIDs, the best ones, chooseRoute looks at. So a long
// list of a peer's costs no more time.
const maxGIDs = 256

func routeByGID(local, remote *portAddress) (route, error) {
	candidates := func(p *portAddress) ([]gid, error) {
		if p.Index >= 0 {
			g, err := forceGID(p.GIDs, p.Index, p.Name)
			return []gid{g}, err
		}
		ranked := rankGIDs(p.GIDs)
		return ranked[:min(len(ranked), maxGIDs)], nil
	}
	ls, err := candidates(local)
	if err != nil {
		return route{}, err
	}
	rs, err := candidates(remote)
	if err != nil {
		return route{}, fmt.Errorf("at the peer: %w", err)
	}
	best, found := route{GRH: true}, false
	for _, l := range ls {
		for _, r := range rs {
			p := route{GRH: true, Local: l, Remote: r}
			if match(&l, &r) && (!found || compareRoutes(&p, &best) < 0) {
				best, found = p, true
			}
		}
	}
	if !found {
		return route{}, fmt.Errorf("%s and %s have no two GIDs of the same type and address family: here %s; at the peer %s",
			local.Name, remote.Name, listGIDs(local.GIDs), listGIDs(remote.GIDs))
	}
	return best, nil
}

// match says whether packets from one GID can be addressed to the other at all. A
// link-local address reaches only link-local addresses.
func match(l, r *gid) bool {
	return l.Type == r.Type && l.addr().Is4() == r.addr().Is4() &&
		(l.scope() == scopeLinkLocal) == (r.scope() == scopeLinkLocal)
}

// compareRoutes orders pairs of GIDs, the better first: by their type, by the
// scope of the worse side, then what is likely in one subnet, then by the tables.
func compareRoutes(a, b *route) int {
	worse := func(p *route) scope { return min(p.Local.scope(), p.Remote.scope()) }
	return cmp.Or(
		cmp.Compare(b.Local.Type, a.Local.Type),
		cmp.Compare(worse(b), worse(a)),
		cmp.Compare(commonBits(b), commonBits(a)),
		compareGIDs(a.Local, b.Local),
		compareGIDs(a.Remote, b.Remote),
	)
}

// commonBits is the length of the prefix that both addresses share. All IPv4-mapped
// addresses share 96 bits, so IPv6 goes first only when it is nearer.
func commonBits(p *route) int {
	for i := range p.Local.Raw {
		if x := p.Local.Raw[i] ^ p.Remote.Raw[i]; x != 0 {
			return i*8 + bits.LeadingZeros8(x)
		}
	}
	return 128
}
