package rdma

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// device is an opened RDMA device with the registered memory.
type device struct {
	index int
	verbs *verbs.Device
	pd    *verbs.PD
	mrs   []*verbs.MR
	keys  []keyRange // remote keys, for peers
	local *keyTable
	ports []*localPort
	limit writeLimits
}

// localPort is a port that may be used.
type localPort struct {
	dev   *device
	index int // in the transport's list
	num   int // of the device, from 1
	name  string
	near  distance // to the registered memory
	state atomic.Pointer[portState]
}

// portState is what a port was like when it was looked at. It does not change.
type portState struct {
	up      bool
	mtu     int    // bytes
	speed   uint64 // bytes a second
	address portAddress
}

// maxWrite is the most bytes of one write: large enough that more gains nothing,
// small enough that lanes share a port fairly, and that a signal is for many.
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
			d.index = len(t.devices)
			t.devices = append(t.devices, d)
			for _, p := range d.ports {
				p.index = len(t.ports)
				t.ports = append(t.ports, p)
			}
		}
	}
	if missing := t.cfg.Missing(names); len(missing) > 0 { // somebody counts on it
		t.closeDevices()
		return fmt.Errorf("%w: config key \"rdma_devices\" has %q, which no device fits: this machine has %s", core.ErrInvalid, missing, strings.Join(names, ", "))
	}
	if len(t.devices) == 0 {
		if len(problems) == 0 {
			problems = append(problems, fmt.Errorf("rdma_devices %v and rdma_deny %v leave none of %v", t.cfg.Devices, t.cfg.Deny, names))
		}
		return fmt.Errorf("rdma: %w", allOf(problems...))
	}
	for _, err := range problems {
		t.log.Warn("rdma device or port is not used", zap.Error(err))
	}
	return t.register()
}

// openDevice opens a device with its selected ports that are active; nil without
// an error if none is selected.
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
	d := &device{verbs: v}
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
		p, err := t.openPort(d, n)
		if err != nil {
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

func (t *Transport) openPort(d *device, n int) (*localPort, error) {
	p := &localPort{dev: d, num: n, name: fmt.Sprintf("%s:%d", d.verbs.Info().Name, n)}
	if err := t.look(p); err != nil {
		return nil, err
	}
	s := p.state.Load()
	if !s.up {
		a, _ := d.verbs.Port(n)
		return nil, fmt.Errorf("port %s is %v, want active: is its cable plugged in and its interface up (ip link set … up)?", p.name, a.State)
	}
	t.log.Info("rdma port", zap.String("port", p.name), zap.Stringer("link", s.address.Link), zap.Int("mtu", s.mtu),
		zap.Uint64("bytes_per_s", s.speed), zap.String("gids", listGIDs(rankGIDs(s.address.GIDs))))
	return p, nil
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
	address := portAddress{Name: p.name, Link: linkInfiniBand, LID: a.LID, Index: t.cfg.GIDIndex}
	if a.LinkLayer == verbs.LinkEthernet {
		address.Link = linkEthernet
	}
	for _, g := range table {
		entry := gid{Index: g.Index, Raw: g.GID, NetDev: g.NetDev, Type: gidIB}
		switch g.Type {
		case verbs.GIDRoCEv1:
			entry.Type = gidRoCEv1
		case verbs.GIDRoCEv2:
			entry.Type = gidRoCEv2
		}
		address.GIDs = append(address.GIDs, entry)
	}
	if address.Link == linkEthernet && t.cfg.GIDIndex >= 0 {
		if _, err := forceGID(address.GIDs, t.cfg.GIDIndex, p.name); err != nil {
			return err
		}
	}
	s := &portState{up: a.State == verbs.PortActive, mtu: a.ActiveMTU, speed: a.Speed / 8, address: address}
	if t.cfg.MTU > 0 {
		s.mtu = min(s.mtu, t.cfg.MTU)
	}
	p.state.Store(s)
	return nil
}

// register makes the agent's memory known to all devices.
func (t *Transport) register() (err error) {
	defer func() {
		if err != nil {
			t.closeDevices()
		}
	}()
	began := time.Now()
	regions := regionRanges(t.layout)
	whole := mergeRanges(regions, math.MaxUint64)
	if lock, err := readMemlock(); err == nil {
		if err := lock.check(rangeBytes(whole) * uint64(len(t.devices))); err != nil {
			return fmt.Errorf("rdma: %w", err)
		}
	}
	if err := pretouch(whole, touching); err != nil {
		return fmt.Errorf("rdma: %w", err)
	}
	touched := time.Now()
	t.place(whole)
	access := verbs.LocalWrite | verbs.RemoteWrite
	errs := make([]error, len(t.devices))
	var wg sync.WaitGroup
	for i, d := range t.devices {
		wg.Go(func() { errs[i] = d.register(regions, access, t.cfg.RelaxedOrdering) })
	}
	wg.Wait()
	if err := allOf(errs...); err != nil {
		return fmt.Errorf("rdma: %w", err)
	}
	t.log.Info("rdma memory registered", zap.Uint64("bytes", rangeBytes(whole)), zap.Int("ranges", len(t.devices[0].keys)), zap.Int("devices", len(t.devices)),
		zap.Duration("touching", touched.Sub(began)), zap.Duration("registering", time.Since(touched)))
	return nil
}

const (
	touching   = 8 // goroutines that have the kernel give pages their memory
	registrars = 4 // goroutines that register ranges with one device
)

// place says how near each port is to the memory, which most often is of one NUMA
// node: that of the largest range.
func (t *Transport) place(whole []memRange) {
	if len(whole) == 0 {
		return
	}
	memory := memoryPlace(slices.MaxFunc(whole, func(a, b memRange) int { return cmp.Compare(a.Length, b.Length) }))
	for _, p := range t.ports {
		p.near = farUnknown
		if at, err := devicePlace(os.DirFS("/sys"), p.dev.verbs.Info().Name); err == nil {
			p.near = at.distanceTo(memory)
			t.log.Info("rdma port and memory", zap.String("port", p.name), zap.Stringer("at", at), zap.Stringer("memory", memory), zap.Stringer("distance", p.near))
		}
	}
}

func (d *device) register(regions []memRange, access verbs.Access, order string) error {
	switch {
	case order == OrderRelaxed && !d.verbs.Attr().RelaxedOrdering:
		return fmt.Errorf("device %s has no relaxed ordering, which rdma_relaxed_ordering demands: set it to auto", d.verbs.Info().Name)
	case order != OrderStrict:
		access |= verbs.RelaxedOrdering
	}
	ranges := mergeRanges(regions, d.verbs.Attr().MaxMRSize)
	mrs, errs := make([][]*verbs.MR, len(ranges)), make([]error, len(ranges))
	var wg sync.WaitGroup
	var next atomic.Int64
	for range min(registrars, len(ranges)) {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(ranges); i = int(next.Add(1)) - 1 {
				if mrs[i], errs[i] = d.registerRange(ranges[i], access); errs[i] != nil {
					next.Store(int64(len(ranges))) // the others would fail too
				}
			}
		})
	}
	wg.Wait()
	var local []keyRange
	for _, mr := range slices.Concat(mrs...) {
		r := memRange{mr.Addr, mr.Length}
		d.mrs = append(d.mrs, mr)
		local, d.keys = append(local, keyRange{r, mr.LKey}), append(d.keys, keyRange{r, mr.RKey})
	}
	if err := allOf(errs...); err != nil {
		return err
	}
	var err error
	d.local, err = newKeyTable("here", regions, local)
	return err
}

// leastSplit is the size below which a range that cannot be registered is not cut.
const leastSplit = 256 << 20

// registerRange registers a range, in halves where the device's driver takes less
// at once than the device says.
func (d *device) registerRange(r memRange, access verbs.Access) ([]*verbs.MR, error) {
	mr, err := d.pd.Register(uintptr(r.Base), r.Length, access)
	if err == nil {
		return []*verbs.MR{mr}, nil
	}
	if r.Length < 2*leastSplit || !errors.Is(err, syscall.ENOMEM) && !errors.Is(err, syscall.E2BIG) {
		return nil, err
	}
	half := r.Length / 2 &^ (2<<20 - 1)
	mrs, err := d.registerRange(memRange{r.Base, half}, access)
	if err == nil {
		var rest []*verbs.MR
		rest, err = d.registerRange(memRange{r.Base + half, r.Length - half}, access)
		mrs = append(mrs, rest...)
	}
	return mrs, err // those that there are, to be closed
}

// describe is what P must know to write to us.
func (t *Transport) describe() *reply {
	rep := &reply{}
	for _, p := range t.ports {
		s := p.state.Load()
		if !s.up {
			continue
		}
		a := &s.address
		info := portInfo{Index: p.index, Device: p.dev.index, Name: p.name, Link: uint8(a.Link), LID: a.LID, GRH: a.GRH, MTU: s.mtu, Speed: s.speed, Forced: a.Index}
		gids := a.GIDs
		if a.Index < 0 {
			gids = rankGIDs(gids)
			if a.Link == linkInfiniBand {
				gids = a.GIDs
			}
		}
		for _, g := range gids[:min(len(gids), maxGIDs)] {
			info.GIDs = append(info.GIDs, gidInfo{g.Index, g.Raw, uint8(g.Type)})
		}
		rep.Ports = append(rep.Ports, info)
	}
	for _, d := range t.devices {
		var keys deviceKeys
		for _, k := range d.keys {
			keys.Keys = append(keys.Keys, keyInfo{k.Base, k.Length, k.Key})
		}
		rep.Devices = append(rep.Devices, keys)
	}
	for _, r := range regionRanges(t.layout) {
		rep.Regions = append(rep.Regions, span(r))
	}
	return rep
}

// address is a port of D as choosePath wants it.
func (p *portInfo) address() *portAddress {
	a := &portAddress{Name: p.Name, Link: linkLayer(p.Link), LID: p.LID, GRH: p.GRH, Index: p.Forced}
	for _, g := range p.GIDs {
		a.GIDs = append(a.GIDs, gid{Index: g.Index, Raw: g.Raw, Type: gidType(g.Type)})
	}
	return a
}

// events waits for what a device has to say: links that go down and come back.
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
				s.up = false
				p.state.Store(&s)
				cause := fmt.Errorf("rdma: port %s: %v", p.name, e.Type)
				t.sender.portDown(p, cause)
				t.receiver.portDown(p, cause)
			case e.Port == p.num && (e.Type == verbs.EventPortActive || e.Type == verbs.EventGIDChange || e.Type == verbs.EventLIDChange):
				if err := t.look(p); err != nil {
					t.log.Warn("rdma port cannot be read", zap.Error(err))
				}
			}
		}
	}
}

func (t *Transport) closeDevices() error {
	var errs []error
	for _, d := range t.devices {
		errs = append(errs, d.close())
	}
	t.devices, t.ports = nil, nil
	return errors.Join(errs...)
}

// close gives a device back; its queue pairs are gone.
func (d *device) close() error {
	var errs []error
	for _, mr := range d.mrs {
		errs = append(errs, mr.Close())
	}
	if d.pd != nil {
		errs = append(errs, d.pd.Close())
	}
	return errors.Join(append(errs, d.verbs.Close())...)
}
