package local

import (
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

const deviceBytes = 4 << 20 // two mappings

// onGPU is an agent over one region of memory that was mapped by handles, on a device of its own.
type onGPU struct {
	*agent
	gpu
	at      uintptr
	memory  *engine.Mapping
	devices *devices
	closed  bool
}

// startGPU starts one; none: its region lies in host memory, and it has no device.
func startGPU(t *testing.T, id core.AgentID, device int, cfg Config, o cuda.Options) *onGPU {
	t.Helper()
	a := &onGPU{agent: &agent{t: t, id: id, sink: coretest.NewRecorder(t, string(id))}, gpu: newGPU(t, device)}
	a.Delay(0)
	a.memory = a.Map(deviceBytes)
	a.at = a.memory.At
	if err := a.open(cfg, o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.close)
	return a
}

func (a *onGPU) layout() (*kv.Layout, error) {
	return kv.NewLayout([]kv.Region{{Name: "cache of " + string(a.id), Base: uint64(a.at), BlockStride: deviceBytes / 4, BlockBytes: deviceBytes / 4, NumBlocks: 4, Memory: kv.DeviceMemory(0)}})
}

func (a *onGPU) open(cfg Config, o cuda.Options) error {
	l, err := a.layout()
	if err != nil {
		return err
	}
	o.RingBytes, o.SlotBytes = 1<<20, 64<<10
	if a.devices, err = openDevices(l, false, o); err != nil {
		return err
	}
	cfg.Listen, cfg.Devices = true, a.devices
	if a.tr, err = open(cfg, l, a.sink, linux{}); err != nil {
		return errors.Join(err, a.devices.close())
	}
	a.tr.receiver.redial = 0
	return nil
}

func (a *onGPU) close() {
	if !a.closed {
		a.closed = true
		for _, d := range a.devices.list {
			d.Closing()
		}
		_ = a.tr.Close()
		if err := a.devices.close(); err != nil {
			a.t.Error(err)
		}
	}
}

// twoGPUs are agents that have met. P looks at its memory when it is asked alone.
func twoGPUs(t *testing.T, o cuda.Options) (p, d *onGPU) {
	t.Helper()
	p, d = startGPU(t, "p", 0, Config{lookAfter: time.Hour}, cuda.Options{}), startGPU(t, "d", 1, Config{CloseGrace: 100 * time.Millisecond}, o)
	before := p.opens()
	t.Cleanup(func() {
		p.close()
		d.close()
		if n := p.opens(); n != before {
			t.Errorf("%d mappings are open, and there were %d", n, before)
		}
	})
	p.meets(d)
	return p, d
}

// opens counts what the double has mapped, and has opened of others.
func (a *onGPU) opens() uint64 { return a.Count("mapped") + a.Count("ipc") }

func (p *onGPU) meets(d *onGPU) {
	p.t.Helper()
	d.connect(p.agent)
	if err := d.tr.Usable(p.t.Context(), p.id); err != nil {
		p.t.Fatal(err)
	}
	comes(p.t, "P knows the link too", func() bool {
		s := &p.tr.sender
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.peers[d.id].link != nil
	})
}

// loads begins a transfer of all blocks, whose bytes are a pattern's.
func (p *onGPU) loads(id core.TransferID, d *onGPU, pattern uint64) {
	p.t.Helper()
	p.Fill(p.at, deviceBytes, pattern)
	grant, err := d.tr.Expect(id, p.id, []kv.Segment{{Length: deviceBytes}})
	if err != nil {
		p.t.Fatal(err)
	}
	p.tr.Write(core.WriteOp{ID: id, Peer: d.id, Grant: grant, Pairs: []kv.Pair{{Length: deviceBytes}}})
}

// goes wants a transfer to go well.
func (p *onGPU) goes(id core.TransferID, d *onGPU, pattern uint64) {
	p.t.Helper()
	p.loads(id, d, pattern)
	for _, o := range []coretest.Outcome{d.sink.Wait("received", id, 1), p.sink.Wait("written", id, 1)} {
		if o.Err != nil || o.Stats.Bytes != deviceBytes {
			p.t.Errorf("%s: %d bytes, %v", o.Kind, o.Stats.Bytes, o.Err)
		}
	}
	if wrong := d.Wrong(d.at, deviceBytes, pattern); wrong > 0 {
		p.t.Errorf("%q: %d bytes are wrong", id, wrong)
	}
}

// comes waits until something is so.
func comes(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("it did not come to it: %s", what)
		}
	}
}

// copying says that the transport has a copy of a transfer under way.
func (a *onGPU) copying(id core.TransferID) bool {
	r := &a.tr.receiver
	r.mu.Lock()
	defer r.mu.Unlock()
	in := r.byID[id]
	return in != nil && in.flying > 0
}

// stuck says that a transfer's copies may land for ever.
func (a *onGPU) stuck(id core.TransferID) bool {
	r := &a.tr.receiver
	r.mu.Lock()
	defer r.mu.Unlock()
	in := r.byID[id]
	return in != nil && in.stuck
}

// fenced says that somebody waits for a transfer's copies.
func (a *onGPU) fenced() bool {
	r := &a.tr.receiver
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, in := range r.byGrant {
		if in.gone && in.quiet != nil {
			return true
		}
	}
	return false
}

// remaps has P's engine sleep and wake: other memory lies at the addresses.
func (p *onGPU) remaps(pattern uint64) {
	p.t.Helper()
	p.memory.Sleep()
	p.memory.Wake()
	p.Fill(p.at, deviceBytes, pattern)
}

// renews has P, and its transport, take the memory of now.
func (p *onGPU) renews() {
	p.t.Helper()
	p.takes()
	p.tr.Renew()
}

// takes has P take the memory of now.
func (p *onGPU) takes() {
	p.t.Helper()
	for _, d := range p.devices.list {
		n, err := d.Look()
		if err != nil {
			p.t.Fatal(err)
		}
		n.Take()
	}
}

// TestDeviceFence: Revoke waits for a copy that D's device has not done yet, and for nothing of P's. When it has returned no
// byte lands.
func TestDeviceFence(t *testing.T) {
	p, d := twoGPUs(t, cuda.Options{})
	p.goes("first", d, 1)
	d.Halt(true)
	p.loads("t", d, 2)
	comes(t, "the device has a copy", func() bool { return d.Count("queued") > 0 })
	returned := make(chan struct{})
	go func() {
		defer close(returned)
		d.tr.Revoke("t")
	}()
	comes(t, "Revoke waits", func() bool { return d.fenced() || isClosed(returned) })
	for range 100 { // who calls the copy done while the device halts does so now
		if isClosed(returned) {
			t.Error("Revoke has returned in the middle of a copy")
			break
		}
		time.Sleep(time.Millisecond)
	}
	d.Halt(false)
	<-returned
	d.Fill(d.at, deviceBytes, 9) // the blocks are the engine's again
	comes(t, "the device has nothing to do", func() bool { return d.Count("queued") == 0 })
	if wrong := d.Wrong(d.at, deviceBytes, 9); wrong > 0 {
		t.Errorf("%d bytes have landed after Revoke", wrong)
	}
	wants(t, p.sink.Wait("written", "t", 1).Err, core.ErrNotExpected.Error())
	p.goes("next", d, 3)
	if len(d.sink.All("received", "t")) > 0 {
		t.Error("a transfer that was revoked has been received")
	}
}

func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// TestDeviceNeverHad: a device ends no copy. A transfer of which it has none ends all the same: nothing of it can land.
func TestDeviceNeverHad(t *testing.T) {
	p := startGPU(t, "p", 0, Config{lookAfter: time.Hour}, cuda.Options{})
	d := startGPU(t, "d", 1, Config{Workers: 1, CloseGrace: 100 * time.Millisecond}, cuda.Options{StallTimeout: 100 * time.Millisecond, CloseTimeout: 20 * time.Second})
	p.meets(d)
	d.Halt(true)
	defer d.Halt(false)
	p.loads("first", d, 2)
	p.loads("second", d, 2)
	comes(t, "the second one ends, or never will", func() bool { return len(d.sink.All("received", "second")) > 0 || d.stuck("second") })
	if d.stuck("second") {
		t.Fatal("nobody hears of the end of a transfer of which no copy can land")
	}
	if o := d.sink.Wait("received", "second", 1); o.Err == nil || errors.Is(o.Err, core.ErrConnectionLost) {
		t.Errorf("%+v", o)
	}
	p.sink.Wait("written", "second", 1)
	d.tr.Revoke("second")
	if all := d.sink.All("received", "first"); len(all) > 0 {
		t.Errorf("an end was told of the transfer in whose blocks a copy may land: %+v", all)
	}
}

// TestDeviceRemapped: P's engine sleeps and wakes while D copies, so that D has read memory that is P's no more. It counts for nothing, both
// sides hear why, D has nothing of it open, and the next transfer is of the new memory.
func TestDeviceRemapped(t *testing.T) {
	p, d := twoGPUs(t, cuda.Options{})
	p.goes("first", d, 1)
	d.Halt(true)
	p.loads("t", d, 2)
	comes(t, "a copy is under way", func() bool { return d.copying("t") && d.Count("queued") > 0 })
	p.remaps(3)
	p.takes()
	d.Halt(false)
	if o := d.sink.Wait("received", "t", 1); !errors.Is(o.Err, core.ErrConnectionLost) {
		t.Errorf("memory that is P's no more was counted: %v", o.Err)
	}
	wants(t, p.sink.Wait("written", "t", 1).Err, "region cache of p", "mapped anew")
	p.goes("next", d, 4)
	if all := d.sink.All("down", ""); len(all) > 0 {
		t.Errorf("D hears that the two have parted, and they have met anew: %+v", all)
	}
}

// TestDeviceRemappedOften: an engine may sleep again soon after it woke.
func TestDeviceRemappedOften(t *testing.T) {
	p, d := twoGPUs(t, cuda.Options{})
	r := &d.tr.receiver
	r.mu.Lock()
	r.redial = time.Hour // a slow machine sleeps as often
	r.mu.Unlock()
	for i := range uint64(4) {
		p.remaps(2 * i)
		p.renews()
		p.goes(core.TransferID(fmt.Sprint("t", i)), d, 2*i+1)
	}
	if all := d.sink.All("down", ""); len(all) > 0 {
		t.Errorf("D hears that the two have parted, and they have met anew: %+v", all)
	}
}

// meetsAgain waits until D has met P anew.
func (p *onGPU) meetsAgain(d *onGPU) {
	p.t.Helper()
	comes(p.t, "the two meet anew", func() bool { return d.tr.Usable(p.t.Context(), p.id) == nil })
}

// TestDeviceAsleep: when P's engine sleeps, D closes what it has open of the engine's memory, though no transfer is under way. Else the
// engine's GPU would get nothing back. As long as the engine sleeps the two do not meet, and the reason is P's.
func TestDeviceAsleep(t *testing.T) {
	p, d := twoGPUs(t, cuda.Options{})
	awake := p.opens()
	p.memory.Sleep()
	p.tr.sender.outdated()
	d.down("region cache of p", "freed or mapped anew") // from the next meeting
	comes(t, "D has closed what it had of P's two mappings, which are gone", func() bool { return p.opens() == awake-4 })
	p.memory.Wake()
	p.renews()
	p.meetsAgain(d)
	p.goes("t", d, 1)
}

// TestDeviceDismissed: what D has open of an engine that lives on is closed when D's agent forgets it, before P hears that D's end is closed. D opens it anew
// when the two meet again.
func TestDeviceDismissed(t *testing.T) {
	p, d := twoGPUs(t, cuda.Options{})
	met := p.opens()
	p.goes("first", d, 1)
	d.tr.Dismiss(p.id)
	p.down("closed the socket")
	if n := p.opens(); n != met-2 {
		t.Errorf("%d mappings are open, want %d: D has forgotten P, which has two", n, met-2)
	}
	p.meets(d)
	if n := p.opens(); n != met {
		t.Errorf("%d mappings are open, want %d: D has met P again", n, met)
	}
	p.goes("next", d, 2)
}

// TestDeviceLooks: P looks by itself.
func TestDeviceLooks(t *testing.T) {
	p, d := startGPU(t, "p", 0, Config{lookAfter: time.Millisecond}, cuda.Options{}), startGPU(t, "d", 1, Config{}, cuda.Options{})
	p.meets(d)
	p.memory.Sleep()
	d.down("region cache of p")
	wants(t, p.await("down", "").Err, "region cache of p")
	p.memory.Wake()
}
