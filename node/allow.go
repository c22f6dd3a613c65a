package node

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/kvconn/kvconn/natsbus"
)

// allowList decides which hosts this agent may contact. A client's request names a
// bootstrap address, and the agent behind that names its data endpoints.
type allowList struct {
	any   bool                // no entries: all but the refused classes
	names map[string]struct{} // lower case, no dot at the end
	ends  []string            // of *.ends, with their first dot
	nets  []netip.Prefix
}

// addressClass is a set of addresses that are refused unless an entry lies within it.
type addressClass struct {
	name string
	nets []netip.Prefix
}

func prefixes(list ...string) []netip.Prefix {
	out := make([]netip.Prefix, len(list))
	for i, s := range list {
		out[i] = netip.MustParsePrefix(s)
	}
	return out
}

const linkLocal = "link-local"

// The narrow classes come first: an entry for all of link-local does not open a
// cloud's metadata.
var refusedClasses = []addressClass{
	{"a cloud's metadata address", prefixes("169.254.169.254/32", "169.254.170.2/32", "169.254.170.23/32", "100.100.100.200/32",
		"168.63.129.16/32", "192.0.0.192/32", "fd00:ec2::254/128", "fd00:ec2::23/128", "fd20:ce::254/128")},
	{"the broadcast address", prefixes("255.255.255.255/32")},
	{linkLocal, prefixes("169.254.0.0/16", "fe80::/10")},
	{"multicast", prefixes("224.0.0.0/4", "ff00::/8")},
	{"unspecified", prefixes("0.0.0.0/8", "::/128")},
	{"reserved", prefixes("240.0.0.0/4")},
}

// IPv6 addresses that carry an IPv4 address, and where in their bytes.
var embedded = []struct {
	net netip.Prefix
	at  int
}{
	{netip.MustParsePrefix("64:ff9b::/96"), 12},   // NAT64
	{netip.MustParsePrefix("64:ff9b:1::/48"), 12}, // NAT64 of a site, with a prefix of 96 bits
	{netip.MustParsePrefix("2002::/16"), 2},       // 6to4
	{netip.MustParsePrefix("::/96"), 12},          // as IPv4-compatible
	{netip.MustParsePrefix("::ffff:0:0:0/96"), 12},
}

func parseAllow(entries []string) (*allowList, error) {
	l := &allowList{any: len(entries) == 0, names: map[string]struct{}{}}
	for _, entry := range entries {
		if p, err := netip.ParsePrefix(entry); err == nil {
			if p != p.Masked() {
				return nil, fmt.Errorf("%q has bits set beyond its prefix length: write %s", entry, p.Masked())
			}
			if p.Addr().Is4In6() {
				return nil, fmt.Errorf("%q is an IPv4 range in IPv6 form: write it in IPv4 form", entry)
			}
			l.nets = append(l.nets, p)
			continue
		}
		if ip, err := netip.ParseAddr(strings.Trim(entry, "[]")); err == nil && ip.Zone() == "" {
			ip = ip.Unmap()
			l.nets = append(l.nets, netip.PrefixFrom(ip, ip.BitLen()))
			continue
		}
		end, glob := strings.CutPrefix(entry, "*.")
		name, _, err := readHost(end)
		switch {
		case err != nil || name == "":
			return nil, fmt.Errorf("%q is not a host name, *.domain, an IP address or a CIDR range, without scheme and port", entry)
		case glob:
			l.ends = append(l.ends, "."+name)
		default:
			l.names[name] = struct{}{}
		}
	}
	return l, nil
}

// readHost reads a host as every dialler would: an address, or a name in lower
// case. A host that systems read in several ways is an error.
func readHost(host string) (name string, ip netip.Addr, err error) {
	if len(host) > 253+1 {
		return "", ip, fmt.Errorf("a host name of %d bytes", len(host))
	}
	if ip, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")); err == nil {
		return "", ip, nil
	}
	name = strings.ToLower(strings.TrimSuffix(host, "."))
	labels := strings.Split(name, ".")
	for _, label := range labels {
		if label == "" || len(label) > 63 {
			return "", ip, fmt.Errorf("%q is not a host name", host)
		}
		for _, c := range []byte(label) {
			if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' {
				return "", ip, fmt.Errorf("%q is not a host name", host)
			}
		}
	}
	// C libraries take 0x7f.1, 0177.0.0.1 and 2130706433 for addresses.
	last := labels[len(labels)-1]
	digits := strings.Trim(last, "0123456789") == ""
	if hex, ok := strings.CutPrefix(last, "0x"); ok && !digits {
		digits = strings.Trim(hex, "0123456789abcdef") == ""
	}
	if digits {
		return "", ip, fmt.Errorf("%q is not an IPv4 address of four decimal numbers", host)
	}
	return name, netip.Addr{}, nil
}

// enter decides about a host before anything is sent or resolved. The Control
// decides about the addresses of a name when they are dialled.
func (l *allowList) enter(host string) (natsbus.Control, error) {
	name, ip, err := readHost(host)
	if err != nil {
		return nil, l.refuse(host, err.Error())
	}
	if ip.IsValid() {
		if err := l.address(host, ip, false); err != nil {
			return nil, err
		}
	}
	named := l.named(name)
	if !l.any && !named && len(l.nets) == 0 {
		return nil, l.refuse(host, "it is not in the list")
	}
	return func(_, address string, _ syscall.RawConn) error {
		ap, err := netip.ParseAddrPort(address)
		if err != nil {
			return l.refuse(host, fmt.Sprintf("it is at %q, which is no IP address", address))
		}
		return l.address(host, ap.Addr(), named)
	}, nil
}

func (l *allowList) named(name string) bool {
	if _, ok := l.names[name]; ok {
		return true
	}
	for _, end := range l.ends {
		if strings.HasSuffix(name, end) && len(name) > len(end) {
			return true
		}
	}
	return false
}

// address decides about one IP address; named says that its name is allowed.
func (l *allowList) address(host string, ip netip.Addr, named bool) error {
	if why := l.wrong(ip.Unmap().WithZone(""), named); why != "" {
		return l.refuse(host, why)
	}
	return nil
}

// wrong says why an IP address is refused; "" if it is not.
func (l *allowList) wrong(ip netip.Addr, named bool) string {
	for _, inner := range append(carried(ip), ip) {
		if class := l.class(inner); class != "" {
			return fmt.Sprintf("%s is %s", ip, class)
		}
	}
	if l.any || named || slices.ContainsFunc(l.nets, func(p netip.Prefix) bool { return p.Contains(ip) }) {
		return ""
	}
	return fmt.Sprintf("%s is not in the list", ip)
}

// checkGID decides about the address of a peer's RoCE port. It has no name. Without a list it may
// be link-local: a port without an IP address has no other, and its packets do not leave the link.
func (l *allowList) checkGID(ip netip.Addr) error {
	ip = ip.Unmap()
	if l.any && l.class(ip) == linkLocal {
		return nil
	}
	if why := l.wrong(ip, false); why != "" {
		return &refusedError{fmt.Sprintf("RoCE address %s is refused: %s; bootstrap_allow says which hosts may be contacted: it wants the cards' addresses or their network's range, since names are not of cards", ip, why)}
	}
	return nil
}

// class names the refused class of an address, unless an entry within that
// class holds it.
func (l *allowList) class(ip netip.Addr) string {
	for _, c := range refusedClasses {
		for _, of := range c.nets {
			if !of.Contains(ip) {
				continue
			}
			for _, p := range l.nets {
				if p.Contains(ip) && p.Bits() >= of.Bits() {
					return ""
				}
			}
			return c.name
		}
	}
	return ""
}

// carried returns the IPv4 addresses that packets to an IPv6 address may go to.
func carried(ip netip.Addr) []netip.Addr {
	if !ip.Is6() || ip == netip.IPv6Loopback() {
		return nil
	}
	var out []netip.Addr
	b := ip.As16()
	for _, e := range embedded {
		if e.net.Contains(ip) {
			out = append(out, netip.AddrFrom4([4]byte(b[e.at:e.at+4])))
		}
	}
	return out
}

func (l *allowList) refuse(host, why string) error {
	return &refusedError{fmt.Sprintf("host %q is refused: %s; bootstrap_allow says which hosts may be contacted", host, why)}
}

// checkEndpoint decides about the host:port at which a peer says that it takes
// data: every address of a name must be allowed.
func (l *allowList) checkEndpoint(ctx context.Context, endpoint string) error {
	host, port, err := net.SplitHostPort(endpoint)
	if err != nil {
		return &refusedError{fmt.Sprintf("endpoint %q is not host:port: %v", endpoint, err)}
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return &refusedError{fmt.Sprintf("endpoint %q: its port is not from 1 to 65535", endpoint)}
	}
	control, err := l.enter(host)
	if err != nil {
		return err
	}
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return fmt.Errorf("the address of data endpoint %q: %w", endpoint, err)
	}
	for _, ip := range ips {
		if err := control("tcp", netip.AddrPortFrom(ip, 0).String(), nil); err != nil {
			return err
		}
	}
	return nil
}

// checkDial decides again when the endpoint is dialled, about its IP address: the
// addresses of a name may have changed.
func (l *allowList) checkDial(endpoint, address string) error {
	host, _, err := net.SplitHostPort(endpoint)
	if err != nil {
		return err
	}
	control, err := l.enter(host)
	if err != nil {
		return err
	}
	return control("tcp", address, nil)
}
