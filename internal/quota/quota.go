// Package quota says who gives up a place when all are taken. It is not who comes last, but who has the most.
package quota

import "net/netip"

// Counts are how many places each address has. Identities cost nothing to make, addresses do.
type Counts = CountsOf[netip.Prefix]

// CountsOf are how many places each owner has: something that costs more to be than a place costs to take.
type CountsOf[O comparable] map[O]int

// Add counts n places more, or fewer.
func (c CountsOf[O]) Add(of O, n int) {
	if c[of] += n; c[of] == 0 {
		delete(c, of)
	}
}

// Over is how many places the owners have that have the most, and whether that is at least two more than another has: then
// they are no worse off when one of them gives one to the other.
func (c CountsOf[O]) Over(than O) (most int, over bool) {
	for _, n := range c {
		most = max(most, n)
	}
	return most, most > c[than]+1
}

// AddressOf is what a connection's other end counts under, if that is a *net.TCPAddr; see Of.
func AddressOf(a any) netip.Prefix {
	if tcp, ok := a.(interface{ AddrPort() netip.AddrPort }); ok {
		return Of(tcp.AddrPort().Addr())
	}
	return netip.Prefix{}
}

// Of is what an IP address counts under: an IPv4 address itself, or the /64 network of an IPv6 address, which is
// one host's or one customer's, or on a network where hosts make their own addresses all of its hosts'. It is the zero Prefix for an address that is not valid.
func Of(ip netip.Addr) netip.Prefix {
	ip = ip.Unmap().WithZone("")
	bits := 64
	if ip.Is4() {
		bits = 32
	}
	p, err := ip.Prefix(bits)
	if err != nil { // not valid
		return netip.Prefix{}
	}
	return p
}
