package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/bootstrap"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/httpserve"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/natsbus"
)

// controlPlane is the bus of an agent and, on a prefill engine's first rank, the
// bootstrap port. HTTP and the embedded NATS server share the port's listener.
type controlPlane struct {
	cfg     *Config
	sec     *security
	bus     *natsbus.Bus
	nats    *natsbus.Server   // nil where no port is served, and with nats_url
	listing *rankListing      // nil where no port is served
	http    *httpserve.Server // the same
	served  chan struct{}
	joined  *joinedRanks // ranks that have joined; nil without nats
}

// busTimes are of the control plane's connections: what a client may take to prove itself, and the time between two pings. 0 are
// natsbus's own.
type busTimes struct{ auth, ping time.Duration }

// openControlPlane's metrics are nil where no port is served.
func openControlPlane(identity *natsbus.Identity, c *Config, sec *security, log *zap.Logger, metrics *metrics, bus busTimes) (_ *controlPlane, err error) {
	p := &controlPlane{cfg: c, sec: sec}
	defer func() {
		if err != nil {
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(c.CloseTimeout))
			defer cancel()
			_ = p.close(ctx)
		}
	}()
	extra := map[string]http.Handler{}
	if c.servesNATS() {
		p.nats, err = natsbus.StartServer(natsbus.ServerOptions{Identity: identity, Token: p.sec.token, JoinToken: p.sec.join, NKeys: c.NATSNKeys, Logger: log.Named("nats"),
			AuthTimeout: bus.auth, PingInterval: bus.ping})
		if err != nil {
			return nil, err
		}
		extra["/nats"] = p.nats.Handler()
	}
	if c.servesPort() {
		proved := p.nats != nil && p.nats.ProvesRanks() && !fault.On("node-joins-unproved")
		p.listing = &rankListing{&bootstrap.Table{JoinsProved: proved}, p.address}
		extra["/metrics"] = metrics.handler()
		access := &bootstrap.Access{Token: p.sec.token, Closed: len(c.NATSNKeys) > 0, Logger: log.Named("bootstrap")}
		p.http = bootstrap.NewServer(bootstrap.NewHandler(p.listing.table, access, extra), p.sec.server, log.Named("bootstrap"))
		if err := p.http.Listen(net.JoinHostPort(c.BootstrapHost, strconv.Itoa(c.BootstrapPort))); err != nil {
			return nil, err
		}
		p.served = make(chan struct{})
		safe.Go("bootstrap", func() {
			defer close(p.served)
			if err := p.http.Serve(); err != nil {
				log.Error(fmt.Sprintf("the bootstrap port ended: %v", err))
			}
		})
	}
	p.bus, err = natsbus.Open(natsbus.Options{Identity: identity, Server: p.nats, ClusterURL: c.NATSURL, Join: c.BootstrapJoin, JoinTimeout: time.Duration(c.JoinTimeout),
		Replicas: c.NATSReplicas, JSPrefix: c.NATSJSPrefix, Token: p.sec.token, JoinToken: p.sec.join, Seed: p.sec.seed, TLS: p.sec.client, OnlyTLS: c.TLSCAFile != "", Allow: p.sec.allow.enter,
		ConnectTimeout: time.Duration(c.ConnectTimeout), Logger: log.Named("bus"), PingInterval: bus.ping})
	if err != nil {
		return nil, err
	}
	if p.nats != nil {
		p.joined = newJoinedRanks(c, log, p.listing, p.bus)
	}
	return p, nil
}

// address is where this engine's bootstrap port is reached.
func (p *controlPlane) address() string {
	if p.cfg.BootstrapJoin != "" {
		return p.cfg.BootstrapJoin
	}
	if p.http == nil || p.http.Addr() == nil {
		return ""
	}
	at := p.http.Addr().(*net.TCPAddr)
	host := p.cfg.AdvertiseHost
	if host == "" {
		host = at.IP.String()
		if at.IP.IsUnspecified() {
			host = outboundHost()
		}
	}
	scheme := "http://"
	if p.sec.server != nil {
		scheme = "https://"
	}
	return scheme + net.JoinHostPort(host, strconv.Itoa(at.Port))
}

// advertised is the host that peers are told. "" means the host of the bootstrap port. A
// rank that has joined from another host is not there.
func (p *controlPlane) advertised() (string, error) {
	if p.cfg.AdvertiseHost != "" || p.cfg.BootstrapJoin == "" {
		return p.cfg.AdvertiseHost, nil
	}
	at, err := natsbus.ParseAddress(p.cfg.BootstrapJoin)
	if err != nil {
		return "", err
	}
	c, err := net.Dial("udp", at.Host) // sends nothing
	if err != nil {
		return "", fmt.Errorf("the address by which this host reaches %s is not known: %w: set advertise_host", p.cfg.BootstrapJoin, err)
	}
	defer c.Close()
	from, to := c.LocalAddr().(*net.UDPAddr).IP, c.RemoteAddr().(*net.UDPAddr).IP
	if from.Equal(to) || from.IsLoopback() && to.IsLoopback() {
		return "", nil
	}
	return from.String(), nil
}

// outboundHost is this host's address towards others. It is a guess for display, if
// the configuration names no host.
func outboundHost() string {
	c, err := net.Dial("udp", "192.0.2.1:9") // sends nothing
	if err != nil {
		return "127.0.0.1"
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).IP.String()
}

// close ends the parts that are open. The bus is first, since it deregisters
// through the others.
func (p *controlPlane) close(ctx context.Context) error {
	var errs []error
	if p.joined != nil {
		p.joined.close()
	}
	if p.bus != nil {
		errs = append(errs, p.bus.Close(ctx))
	}
	if p.nats != nil {
		errs = append(errs, p.nats.Close())
	}
	if p.http != nil {
		errs = append(errs, p.http.Close(ctx))
	}
	if p.served != nil {
		select {
		case <-p.served:
		case <-ctx.Done():
			errs = append(errs, errors.New("the bootstrap port did not stop in time"))
		}
	}
	return errors.Join(errs...)
}
