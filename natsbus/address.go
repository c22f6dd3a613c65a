package natsbus

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"
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

// dialUpgrade returns a function that connects to the control plane behind a bootstrap
// port, with TLS if secure is not nil.
func dialUpgrade(at Address, secure *tls.Config, control Control) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) {
		for {
			conn, err := dialOnce(ctx, at, secure, control)
			// A burst of agents is let in one after another.
			if !errors.Is(err, errBusy) || pause(ctx, busyPause+rand.N(busyPause)) != nil {
				return conn, err
			}
		}
	}
}

const busyPause = 50 * time.Millisecond

func dialOnce(ctx context.Context, at Address, secure *tls.Config, control Control) (net.Conn, error) {
	nd := net.Dialer{Control: control}
	conn, err := nd.DialContext(ctx, "tcp", at.Host)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	up, err := upgradeOver(ctx, conn, at, secure)
	if !stop() && err == nil {
		err = ctx.Err() // the deadline is set, or about to be
	}
	if err != nil {
		_ = conn.Close()
		if ctx.Err() != nil {
			err = fmt.Errorf("it does not answer GET %s: %w", Path, ctx.Err())
		}
		return nil, err
	}
	return up, nil
}

func upgradeOver(ctx context.Context, conn net.Conn, at Address, secure *tls.Config) (net.Conn, error) {
	if secure == nil {
		return clientUpgrade(conn, at.Host)
	}
	cfg := secure.Clone()
	cfg.ServerName, _, _ = strings.Cut(at.Name, "%") // a zone belongs to this host
	t := tls.Client(conn, cfg)
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, explainTLS(err)
	}
	return clientUpgrade(t, at.Host)
}

func tlsError(err error) bool {
	var verify *tls.CertificateVerificationError
	var plain tls.RecordHeaderError
	return errors.As(err, &verify) || errors.As(err, &plain)
}

// explainTLS adds the remedy to an error of a TLS handshake.
func explainTLS(err error) error {
	var (
		plain   tls.RecordHeaderError
		unknown x509.UnknownAuthorityError
		name    x509.HostnameError
		invalid x509.CertificateInvalidError
		roots   x509.SystemRootsError
	)
	switch {
	case errors.As(err, &plain):
		return fmt.Errorf("the port speaks no TLS: write http:// in front and set no tls_ca_file here, or give the prefill engine tls_cert_file and tls_key_file: %w", err)
	case errors.As(err, &unknown), errors.As(err, &roots):
		return fmt.Errorf("its certificate is of an authority that is not known here: set tls_ca_file to the file with that authority's certificate: %w", err)
	case errors.As(err, &name):
		return fmt.Errorf("its certificate is for another host: reach it under a name of the certificate, or give it one with this name: %w", err)
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return fmt.Errorf("its certificate is not valid at this time: give the prefill engine a new tls_cert_file, or set this host's clock: %w", err)
	}
	return fmt.Errorf("TLS handshake: %w", err)
}
