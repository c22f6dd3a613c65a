package rdma

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// device is an open RDMA device. Its ports can be used once the memory is registered.
type device struct {
	name  string
	verbs *verbs.Device
	pd    *verbs.PD
	ports []*localPort
	limit writeLimits

	mu        sync.Mutex // held while the memory is registered, and by close
	closed    bool
	memory    atomic.Pointer[memory] // nil: not registered
	lacksGPUs atomic.Bool            // it lacks the GPUs' memory
	keeps     bool                   // the device could not deregister the old memory
}

// localPort is a port that the configuration selects.
type localPort struct {
	dev   *device
	index int // in the transport's list
	num   int // of the device, from 1
	name  string
	near  distance // to the registered host memory

	nearGPU []distance
	state   atomic.Pointer[portState]
}

// usable says whether lanes can be made at the port now.
func (p *localPort) usable() bool {
	return p.state.Load().up && p.dev.memory.Load() != nil && !p.dev.lacksGPUs.Load()
}

// inactive says why the port cannot be used, and the remedy; nil if it is active.
func (p *localPort) inactive() error {
	switch s := p.state.Load(); s.is {
	case verbs.PortActive:
		return nil
	case verbs.PortInit, verbs.PortArmed:
		return fmt.Errorf("port %s is %v, want active: is a subnet manager (opensm) running?", p.name, s.is)
	default:
		return fmt.Errorf("port %s is %v, want active: is its cable plugged in and its interface up (ip link set … up)?", p.name, s.is)
	}
}

// unusable says why no port can be used now; nil if one can.
func (t *Transport) unusable() error {
	var why []error
	for _, p := range t.ports {
		if p.usable() {
			return nil
		}
		err := p.inactive()
		if err == nil {
			err = fmt.Errorf("port %s: its device has not taken the memory, the log says why", p.name)
		}
		why = append(why, err)
	}
	return fmt.Errorf("rdma: no port of agent %s can be used now: %w", t.id, allOf(why...))
}

// portState is what look has read of a port. It does not change.
type portState struct {
	up      bool // active
	is      verbs.PortState
	mtu     int    // bytes
	speed   uint64 // bytes a second
	address portAddress
}

// maxMR is the most bytes of one registration.
func (d *device) maxMR() uint64 {
	if most := d.verbs.Attr().MaxMRSize; mrLimit == 0 || most < mrLimit {
		return most
	}
	return mrLimit
}

// mrLimit is set by tests; 0: none.
var mrLimit uint64

// maxWrite is the most bytes of one write. Larger writes gain nothing; smaller ones let
// lanes share a port fairly, and one completion stand for many.
const maxWrite = 256 << 10

// maxChain is the most writes behind one doorbell.
const maxChain = 64

// open opens the devices and registers the memory with all of them at once.
func (t *Transport) open() error {
	lib, err := verbs.Load()
	if err != nil {
		return fmt.Errorf("rdma: %w", err)
	}
	list, err := lib.Devices()
	if err != nil {
		return fmt.Errorf("rdma: %w", err)
	}
	if len(list) == 0 {
		return errors.New("rdma: this machine has no RDMA device: is the driver of the network card loaded (rdma link show)?")
	}
	var problems []error
	var names []string
	for _, info := range list {
		names = append(names, info.Name)
		d, err := t.openDevice(lib, info.Name)
		if err != nil {
			problems = append(problems, err)
		}
		if d != nil {
			t.devices = append(t.devices, d)
			for _, p := range d.ports {
				p.index = len(t.ports)
				t.ports = append(t.ports, p)
			}
		}
	}
	if missing := t.cfg.Missing(names); len(missing) > 0 { // the configuration counts on these devices
		t.closeDevices()
		return fmt.Errorf("%w: config key \"rdma_devices\" has %q, but no device matches: this machine has %s", core.ErrInvalid, missing, strings.Join(names, ", "))
	}
	if len(t.devices) == 0 {
		if len(problems) == 0 {
			problems = append(problems, fmt.Errorf("rdma_devices %v and rdma_deny %v leave no device to use: this machine has %v", t.cfg.Devices, t.cfg.Deny, names))
		}
		return fmt.Errorf("rdma: %w", allOf(problems...))
	}
	for _, err := range problems {
		t.log.Warn("rdma device or port is not used", zap.Error(err))
	}
	if err = t.memory.init(t.layout, t.cfg.GPUs); err == nil {
		err = t.checkGPUs()
	}
	if err == nil {
		err = t.openAreas()
	}
	if err == nil {
		err = t.register()
	}
	if err != nil {
		t.closeDevices()
		return fmt.Errorf("rdma: %w", err)
	}
	return nil
}

// openDevice opens a device with its selected ports, active or not; nil without an
// error if none is selected.
func (t *Transport) openDevice(lib *verbs.Library, name string) (_ *device, err error) {
	any := false
	for n := 1; n <= 255 && !any; n++ {
		any = t.cfg.Selects(name, n)
	}
	if !any {
		return nil, nil
	}
	v, err := lib.Open(name)
	if err != nil {
		return nil, err
	}
	d := &device{name: name, verbs: v}
	defer func() {
		if err != nil || len(d.ports) == 0 {
			err = errors.Join(err, v.Close())
		}
	}()
	var problems []error
	for n := 1; n <= v.Attr().Ports; n++ {
		if !t.cfg.Selects(name, n) {
			continue
		}
		p := &localPort{dev: d, num: n, name: fmt.Sprintf("%s:%d", name, n)}
		if err := t.look(p); err != nil {
			problems = append(problems, err)
			continue
		}
		d.ports = append(d.ports, p)
	}
	if len(d.ports) == 0 {
		return nil, allOf(problems...)
	}
	for _, err := range problems {
		t.log.Warn("rdma port is not used", zap.Error(err))
	}
	d.limit = writeLimits{maxPieces: min(v.Attr().MaxSGE, 30), maxWrite: maxWrite}
	if d.pd, err = v.NewPD(); err != nil {
		return nil, err
	}
	return d, nil
}

// look reads what a port is like now.
func (t *Transport) look(p *localPort) error {
	a, err := p.dev.verbs.Port(p.num)
	if err != nil {
		return err
	}
	table, err := p.dev.verbs.GIDs(p.num)
	if err != nil {
		return err
	}
	up := a.State == verbs.PortActive
	address := portAddress{Name: p.name, Link: verbs.LinkInfiniBand, LID: a.LID, Index: t.cfg.GIDIndex, GIDs: gidTable(table)}
	if a.LinkLayer == verbs.LinkEthernet {
		address.Link = verbs.LinkEthernet
	}
	if up && address.Link == verbs.LinkEthernet && t.cfg.GIDIndex >= 0 { // a port that is down may lack its addresses
		if _, err := forceGID(address.GIDs, t.cfg.GIDIndex, p.name); err != nil {
			return err
		}
	}
	s := &portState{up: up, is: a.State, mtu: a.ActiveMTU, speed: a.Speed / 8, address: address}
	if t.cfg.MTU > 0 {
		s.mtu = min(s.mtu, t.cfg.MTU)
	}
	if p.state.Swap(s); up {
		t.log.Info("rdma port", zap.String("port", p.name), zap.Stringer("link", address.Link), zap.Int("mtu", s.mtu),
			zap.Uint64("bytes_per_s", s.speed), zap.String("gids", listGIDs(rankGIDs(address.GIDs))))
	}
	return nil
}

// describe names the ports, regions and keys that P needs to write to this agent.
func (t *Transport) describe() *reply {
	rep := &reply{GPUs: t.gpuCount()}
	indexes := map[*device]int{}
	for _, p := range t.ports {
		s, m := p.state.Load(), p.dev.memory.Load()
		if !s.up || m == nil || p.dev.lacksGPUs.Load() {
			continue
		}
		index, listed := indexes[p.dev]
		if !listed {
			index = len(rep.Devices)
			indexes[p.dev] = index
			keys := deviceKeys{Scratch: keyInfo{m.scratch.Addr, m.scratch.Length, m.scratch.RKey}}
			for _, a := range m.areas {
				keys.Areas = append(keys.Areas, keyInfo{a.Addr, a.Length, a.RKey})
			}
			for _, k := range m.keys {
				keys.Keys = append(keys.Keys, keyInfo{k.Base, k.Length, k.Key})
			}
			rep.Devices = append(rep.Devices, keys)
		}
		a := &s.address
		info := portInfo{Index: p.index, Device: index, Name: p.name, Link: uint8(a.Link), LID: a.LID, GRH: a.GRH, MTU: s.mtu, Speed: s.speed, Forced: a.Index}
		gids := a.GIDs
		if a.Index < 0 {
			gids = rankGIDs(gids)
			if a.Link == verbs.LinkInfiniBand {
				gids = a.GIDs
			}
		}
		for _, g := range gids[:min(len(gids), maxGIDs)] {
			info.GIDs = append(info.GIDs, gidInfo{g.Index, g.Raw, uint8(g.Type)})
		}
		rep.Ports = append(rep.Ports, info)
	}
	for _, r := range t.memory.regions {
		rep.Regions = append(rep.Regions, span(r))
	}
	return rep
}

// address is a port of D as chooseRoute wants it.
func (p *portInfo) address() *portAddress {
	a := &portAddress{Name: p.Name, Link: verbs.LinkLayer(p.Link), LID: p.LID, GRH: p.GRH, Index: p.Forced}
	for _, g := range p.GIDs {
		a.GIDs = append(a.GIDs, gid{Index: g.Index, Raw: g.Raw, Type: verbs.GIDType(g.Type)})
	}
	return a
}

// events handles a device's events: ports that go down and become active again.
func (t *Transport) events(d *device) {
	for {
		e, err := d.verbs.NextEvent()
		if err != nil {
			if t.ctx.Err() == nil {
				t.log.Error("rdma device tells no more events", zap.Error(err))
			}
			return
		}
		t.log.Info("rdma event", zap.String("device", d.verbs.Info().Name), zap.Stringer("event", e.Type), zap.Int("port", e.Port))
		for _, p := range d.ports {
			switch {
			case e.Type == verbs.EventDeviceFatal, e.Type == verbs.EventPortError && e.Port == p.num:
				s := *p.state.Load()
				s.up, s.is = false, verbs.PortDown
				p.state.Store(&s)
				cause := fmt.Errorf("rdma: port %s: %v", p.name, e.Type)
				t.sender.portDown(p, cause)
				t.receiver.portDown(p, cause)
			case e.Port == p.num && (e.Type == verbs.EventPortActive || e.Type == verbs.EventGIDChange || e.Type == verbs.EventLIDChange):
				t.returned(p)
			}
		}
	}
}

// returned is called when a port became active or got another address. It makes both
// halves try the port at once.
func (t *Transport) returned(p *localPort) {
	err := t.look(p)
	if err == nil && p.state.Load().up {
		err = t.registerLate(p.dev)
	}
	switch {
	case t.ctx.Err() != nil:
	case err != nil:
		t.log.Warn("rdma port is not used", zap.String("port", p.name), zap.Error(err))
	case p.usable():
		t.sender.portUp(p)
		t.receiver.portUp(p)
	}
}

func (t *Transport) closeDevices() error {
	var errs []error
	for _, d := range t.devices {
		errs = append(errs, d.close())
	}
	err := errors.Join(errs...)
	if err == nil { // otherwise the memory may still be registered
		err = t.memory.close()
	}
	return err
}

// close gives a device back; its queue pairs are gone.
func (d *device) close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	var errs []error
	if m := d.memory.Load(); m != nil {
		errs = append(errs, m.close())
	}
	if d.pd != nil {
		errs = append(errs, d.pd.Close())
	}
	return errors.Join(append(errs, d.verbs.Close())...)
}
