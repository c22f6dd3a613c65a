package node

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/devices"
	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/tcp"
)

// ErrTransport: the transport that the configuration forces is not available.
var ErrTransport = errors.New("transport is not available")

// openRDMA makes the rdma transport; an error says why there is none.
type openRDMA func(cfg rdma.Config, id core.AgentID, layout *core.Layout, s core.Sink, signal core.Signal) (core.Signaller, error)

// opener opens transports over the registered memory.
type opener struct {
	id         core.AgentID
	cfg        *Config
	log        *zap.Logger
	allow      *allowList
	advertised func() (host string, err error)
	signal     func(transport string) core.Signal
	rdma       openRDMA
	devices    *devices.Devices // nil: all regions lie in host memory
}

// openAll adds the transports that the configuration names to t, the preferred one
// first. On an error it has closed them.
func (o *opener) openAll(t *transports, layout *core.Layout) error {
	for _, name := range o.cfg.transports() {
		w, err := o.open(name, layout, t.sink(name))
		switch {
		case err == nil:
			t.add(w)
			continue
		case name == viaTCP, errors.Is(err, core.ErrInvalid):
		case o.cfg.Transport == viaAuto:
			t.lack(name, err)
			log := o.log.Info
			if len(o.cfg.RDMADevices) > 0 { // somebody wants them
				log = o.log.Warn
			}
			log(fmt.Sprintf("going on without %s: %v", name, err), zap.String("transport", name))
			continue
		default:
			err = fmt.Errorf("%w: transport is %q: %w", ErrTransport, o.cfg.Transport, err)
		}
		_ = t.Close()
		return err
	}
	return nil
}

func (o *opener) open(name string, layout *core.Layout, to core.Sink) (core.Transport, error) {
	if name == viaRDMA {
		if o.devices != nil {
			return nil, errors.New("some regions lie in device memory, which rdma does not carry yet: use tcp")
		}
		w, err := o.rdma(o.cfg.rdmaConfig(o.log.Named(viaRDMA)), o.id, layout, to, o.signal(viaRDMA))
		if err != nil {
			return nil, err // and no Signaller that is nil within
		}
		return w, nil
	}
	host, err := o.advertised()
	if err != nil {
		return nil, err
	}
	cfg := tcp.Config{
		Listen: o.cfg.prefills(), ListenHost: o.cfg.TCPListenHost, ListenPort: o.cfg.TCPPort, AdvertiseHost: host,
		Streams: o.cfg.TCPStreams, StallTimeout: time.Duration(o.cfg.StallTimeout), DialTimeout: time.Duration(o.cfg.ConnectTimeout),
		Guard: o.allow.checkDial, Logger: o.log.Named(viaTCP),
	}
	if o.devices != nil {
		cfg.Mover = o.devices
	}
	w, err := tcp.New(cfg, layout, to)
	if err != nil {
		return nil, err
	}
	return w, nil
}

// newRDMA opens the rdma transport.
func newRDMA(cfg rdma.Config, id core.AgentID, layout *core.Layout, s core.Sink, signal core.Signal) (core.Signaller, error) {
	return rdma.New(cfg, id, layout, s, signal)
}
