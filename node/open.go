package node

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/tcp"
)

// ErrTransport: the transport that the configuration forces is not available.
var ErrTransport = errors.New("transport is not available")

// openRDMA makes the rdma transport; an error says why there is none.
type openRDMA func(cfg rdma.Config, id core.AgentID, layout *core.Layout, s core.Sink, signal core.Signal) (core.Signaller, error)

// openTransports opens what the configuration names over the registered memory,
// the preferred one first.
func (a *Agent) openTransports(layout *core.Layout) (*transports, error) {
	t := newTransports(a)
	for _, name := range a.cfg.transports() {
		w, err := a.openTransport(t, name, layout)
		switch {
		case err == nil:
			t.add(w)
			continue
		case name == viaTCP, errors.Is(err, core.ErrInvalid):
		case a.cfg.Transport == viaAuto:
			t.lack(name, err)
			log := a.log.Info
			if len(a.cfg.RDMADevices) > 0 { // somebody wants them
				log = a.log.Warn
			}
			log(fmt.Sprintf("going on without %s: %v", name, err), zap.String("transport", name))
			continue
		default:
			err = fmt.Errorf("%w: transport is %q: %w", ErrTransport, a.cfg.Transport, err)
		}
		_ = t.Close()
		return nil, err
	}
	return t, nil
}

func (a *Agent) openTransport(t *transports, name string, layout *core.Layout) (core.Transport, error) {
	to := sink{a, t, name}
	if name == viaRDMA {
		w, err := a.rdma(a.cfg.rdmaConfig(a.log.Named(viaRDMA)), a.id, layout, to, a.signalOf(viaRDMA))
		if err != nil {
			return nil, err // and no Signaller that is nil within
		}
		return w, nil
	}
	host, err := a.plane.advertised()
	if err != nil {
		return nil, err
	}
	w, err := tcp.New(tcp.Config{
		Listen: a.cfg.prefills(), ListenHost: a.cfg.TCPListenHost, ListenPort: a.cfg.TCPPort, AdvertiseHost: host,
		Streams: a.cfg.TCPStreams, StallTimeout: time.Duration(a.cfg.StallTimeout), DialTimeout: time.Duration(a.cfg.ConnectTimeout),
		Guard: a.allow.checkDial, Logger: a.log.Named(viaTCP),
	}, layout, to)
	if err != nil {
		return nil, err
	}
	return w, nil
}

// transports are those that may be used, the preferred one first.
func (c *Config) transports() []string {
	if c.Transport == viaAuto {
		return []string{viaRDMA, viaTCP}
	}
	return []string{c.Transport}
}
