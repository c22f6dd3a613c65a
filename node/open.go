// The transports that the configuration names are opened. If one cannot be and another may take its place, the reason
// is kept.

package node

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/devices"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/local"
	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/tcp"
)

// ErrTransport: the transport that the configuration forces is not available.
var ErrTransport = errors.New("transport is not available")

// openRDMA makes the rdma transport; an error says why there is none.
type openRDMA func(cfg rdma.Config, id core.AgentID, layout *kv.Layout, s core.Sink, signal core.Signal) (core.Signaller, error)

// openLocal makes the local transport; an error says why there is none.
type openLocal func(cfg local.Config, id core.AgentID, layout *kv.Layout, s core.Sink, signal core.Signal) (core.Transport, error)

// opener opens transports over the registered memory.
type opener struct {
	id         core.AgentID
	cfg        *Config
	log        *zap.Logger
	allow      *allowList
	advertised func() (host string, err error)
	signal     func(transport string) core.Signal
	rdma       openRDMA
	near       openLocal
	devices    *devices.Devices // nil: all regions lie in host memory
}

// openAll adds the transports that the configuration names to t, the preferred one
// first. On an error it has closed them.
func (o *opener) openAll(t *transports, layout *kv.Layout) error {
	for _, name := range o.cfg.transports() {
		w, err := o.open(name, layout, t.sink(name))
		switch {
		case err == nil:
			t.add(w)
			if name == viaRDMA && o.cfg.mustEncrypt() {
				o.log.Warn("KV data that goes over rdma is not encrypted: set require_encryption to do without rdma", zap.String("tcp_encrypt", o.cfg.TCPEncrypt))
			}
			continue
		case name == viaTCP, errors.Is(err, core.ErrInvalid):
		case o.cfg.fallsBack():
			t.lack(name, err)
			log := o.log.Info
			if name == viaRDMA && len(o.cfg.RDMADevices) > 0 { // somebody wants them
				log = o.log.Warn
			}
			log(fmt.Sprintf("going on without %s: %v", name, err), zap.String("transport", name))
			continue
		default:
			err = fmt.Errorf("%w: transport is %q: %w", ErrTransport, o.cfg.Transport, err)
		}
		t.drop()
		return err
	}
	if len(t.list) == 0 {
		return fmt.Errorf("%w: transport is %q: this agent has %s", ErrTransport, o.cfg.Transport, t.have(nil))
	}
	return nil
}

func (o *opener) open(name string, layout *kv.Layout, to core.Sink) (core.Transport, error) {
	if err := o.cfg.confidential(name); err != nil {
		return nil, err
	}
	if name == viaRDMA {
		cfg := o.cfg.rdmaConfig(o.log.Named(viaRDMA))
		cfg.SendsOnly, cfg.Guard = !o.cfg.decodes(), o.allow.checkGID
		if o.devices != nil {
			cfg.GPUs = o.devices
		}
		w, err := o.rdma(cfg, o.id, layout, to, o.signal(viaRDMA))
		if err != nil {
			return nil, err // and no Signaller that is nil within
		}
		return w, nil
	}
	if name == viaLocal {
		return o.local(layout, to)
	}
	host, err := o.advertised()
	if err != nil {
		return nil, err
	}
	cfg := tcp.Config{
		Listen: o.cfg.prefills(), ListenHost: o.cfg.TCPListenHost, ListenPort: o.cfg.TCPPort, AdvertiseHost: host,
		Streams: o.cfg.TCPStreams, StallTimeout: time.Duration(o.cfg.StallTimeout), DialTimeout: time.Duration(o.cfg.ConnectTimeout),
		Encrypt: o.cfg.tcpEncryption(), Guard: o.allow.checkDial, Logger: o.log.Named(viaTCP),
	}
	if o.devices != nil {
		cfg.Mover, cfg.CloseGrace = o.devices, o.cfg.deviceCloseTime()/2
	}
	w, err := tcp.New(cfg, layout, to)
	if err != nil {
		return nil, err
	}
	return w, nil
}

// local opens the transport between agents of one host.
func (o *opener) local(layout *kv.Layout, to core.Sink) (core.Transport, error) {
	cfg := local.Config{
		Listen: o.cfg.prefills(), ConnectTimeout: time.Duration(o.cfg.ConnectTimeout), StallTimeout: time.Duration(o.cfg.StallTimeout), Logger: o.log.Named(viaLocal),
	}
	if o.devices != nil {
		cfg.Devices, cfg.CloseGrace = o.devices, o.cfg.deviceCloseTime()/2
	}
	return o.near(cfg, o.id, layout, to, o.signal(viaLocal))
}

// newLocal opens the local transport.
func newLocal(cfg local.Config, _ core.AgentID, layout *kv.Layout, s core.Sink, _ core.Signal) (core.Transport, error) {
	w, err := local.New(cfg, layout, s)
	if err != nil {
		return nil, err // and no Transport that is nil within
	}
	return w, nil
}

// newRDMA opens the rdma transport.
func newRDMA(cfg rdma.Config, id core.AgentID, layout *kv.Layout, s core.Sink, signal core.Signal) (core.Signaller, error) {
	return rdma.New(cfg, id, layout, s, signal)
}
