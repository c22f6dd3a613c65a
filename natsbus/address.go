package natsbus

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"syscall"
)

// Address is a bootstrap address in parts.
type Address struct {
	TLS  bool
	Host string // with the port, as it is dialled
	Name string // without the port
}

// String writes the address in its one canonical form.
func (a Address) String() string {
	if a.TLS {
		return "https://" + a.Host
	}
	return "http://" + a.Host
}

// ParseAddress reads a bootstrap address: http:// or https://, a host, a port.
func ParseAddress(addr string) (Address, error) {
	bad := func(why string) (Address, error) {
		return Address{}, fmt.Errorf("bootstrap address %q: %s; it must be like http://host:port", addr, why)
	}
	if len(addr) > 512 {
		return Address{}, fmt.Errorf("bootstrap address of %d bytes, at most 512 are read", len(addr))
	}
	u, err := url.Parse(addr)
	if err != nil {
		var ue *url.Error
		if errors.As(err, &ue) {
			err = ue.Err
		}
		return bad(err.Error())
	}
	switch {
	case u.Scheme != "http" && u.Scheme != "https" || u.Opaque != "":
		return bad("no http:// in front")
	case u.Hostname() == "":
		return bad("no host")
	case strings.ContainsAny(u.Hostname(), "[]"): // net/url lets some of them be part of a name
		return bad("a bracket in the host")
	case u.Port() == "":
		return bad("no port")
	case u.User != nil || u.RawQuery != "" || u.Fragment != "" || strings.Trim(u.Path, "/") != "":
		return bad("more than a host and a port")
	}
	port, err := strconv.ParseUint(u.Port(), 10, 16)
	if err != nil || port == 0 {
		return bad("port " + u.Port() + " is not one of 1 to 65535")
	}
	// One spelling, since each address has a connection of its own, and these are few.
	name := strings.ToLower(u.Hostname())
	if zone := strings.IndexByte(u.Hostname(), '%'); zone >= 0 {
		name = strings.ToLower(u.Hostname()[:zone]) + u.Hostname()[zone:]
	}
	return Address{TLS: u.Scheme == "https", Host: net.JoinHostPort(name, strconv.FormatUint(port, 10)), Name: name}, nil
}

// Control is net.Dialer's: it sees the address of a resolved name, and can refuse it
// before a packet is sent.
type Control = func(network, address string, c syscall.RawConn) error
