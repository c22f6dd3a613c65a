package local

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/testdouble"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
	"github.com/kvconn/kvconn/rig/timed"
)

// doomedEnv tells a test binary to be a prefill agent over device memory that is allocated or mapped.
const doomedEnv = "KVCONN_TEST_DOOMED"

// doomedPattern is what lies in its memory.
const doomedPattern = 7

// doomed is that process. It says its endpoint and a ticket, and writes all of its region under each grant that it is told.
func doomed() {
	kind := os.Getenv(doomedEnv)
	if kind == "" {
		return
	}
	e := engine.New(testdouble.Program{}, 0)
	at := uintptr(0)
	if kind == "mapped" {
		at = e.Map(deviceBytes).At
	} else {
		at = e.Alloc(deviceBytes)
	}
	e.Fill(at, deviceBytes, doomedPattern)
	p := &onGPU{agent: &agent{id: "p"}, gpu: gpu{e}, at: at}
	l, err := p.layout()
	if err != nil {
		panic(err)
	}
	devices, err := openDevices(l, false, cuda.Options{RingBytes: 1 << 20, SlotBytes: 64 << 10})
	if err != nil {
		panic(err)
	}
	tr, err := New(Config{Listen: true, Devices: devices}, l, deafSink{})
	if err != nil {
		panic(err)
	}
	ticket, err := tr.Admit("d")
	if err != nil {
		panic(err)
	}
	fmt.Printf("%s\n%x\n", tr.Endpoint(), ticket)
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		grant, _ := hex.DecodeString(in.Text())
		tr.Write(core.WriteOp{ID: core.TransferID(in.Text()), Peer: "d", Grant: grant, Pairs: []kv.Pair{{Length: deviceBytes}}})
	}
	os.Exit(0)
}

// endsSink notes what the double has open whenever D's engine is told an end.
type endsSink struct {
	*coretest.Recorder
	d      *onGPU
	before uint64
}

func (s endsSink) look(what string) {
	if n := s.d.opens(); n != s.before {
		s.d.t.Errorf("%s is told while %d mappings of the dead process are open", what, n-s.before)
	}
}

func (s endsSink) Received(id core.TransferID, st core.TransferStats, err error) {
	if err != nil {
		s.look("the end of transfer " + string(id))
	}
	s.Recorder.Received(id, st, err)
}

func (s endsSink) PeerDown(peer core.AgentID, err error) {
	s.look("the loss of " + string(peer))
	s.Recorder.PeerDown(peer, err)
}

// TestDeviceMemoryOfTheDead: a prefill engine's process is killed whose device memory D has open: by an IPC handle, or by handles that were exported. D closes all
// of it and is asked for nothing meanwhile: at once where nothing moves, else as soon as its device has ended the copy, and not before. D's engine hears of the loss after that.
// All of it is closed within three seconds, or within three seconds of the copy's end.
// The next prefill engine's memory is opened and read. All bytes come by the device.
func TestDeviceMemoryOfTheDead(t *testing.T) {
	for kind, pieces := range map[string]uint64{"allocated": 1, "mapped": 2} {
		for _, while := range []string{"idle", "copying"} {
			t.Run(kind+", "+while, func(t *testing.T) {
				timed.Within(t, freedSoon, "closing what a dead process had", func() time.Duration {
					return deviceMemoryOfTheDead(t, kind, pieces, while == "copying")
				})
			})
		}
	}
}

// freedSoon is how soon the memory of a dead engine is free.
const freedSoon = 3 * time.Second

// deviceMemoryOfTheDead returns how long D took to close what it had open, as far as D's device let it.
func deviceMemoryOfTheDead(t *testing.T, kind string, pieces uint64, copying bool) (took time.Duration) {
	t.Helper()
	d := startGPU(t, "d", 1, Config{}, cuda.Options{StallTimeout: time.Hour}) // a device that is halted is not stuck
	before, violations := d.opens(), d.Count("violations")
	d.tr.sink = endsSink{d.sink, d, before}
	meet := func() *child {
		t.Helper()
		p := startChild(t, doomedEnv+"="+kind)
		endpoint, ticket := p.met()
		if err := d.tr.Connect("p", endpoint, ticket); err != nil {
			t.Fatal(err)
		}
		if err := d.tr.Usable(t.Context(), "p"); err != nil {
			t.Fatal(err)
		}
		if n := d.opens() - before; n != pieces {
			t.Fatalf("D has %d mappings of P's open, want %d", n, pieces)
		}
		return p
	}
	begin := func(p *child, id core.TransferID) {
		t.Helper()
		grant, err := d.tr.Expect(id, "p", []kv.Segment{{Length: deviceBytes}})
		if err != nil {
			t.Fatal(err)
		}
		p.told(hex.EncodeToString(grant))
	}
	loads := func(p *child, id core.TransferID) {
		t.Helper()
		d.Fill(d.at, deviceBytes, 1)
		came := d.tr.Counters()
		begin(p, id)
		if o := d.sink.Wait("received", id, 1); o.Err != nil || d.Wrong(d.at, deviceBytes, doomedPattern) > 0 {
			t.Errorf("%q: %v, %d bytes are wrong", id, o.Err, d.Wrong(d.at, deviceBytes, doomedPattern))
		}
		came["bytes_by_device"] += deviceBytes
		if how, now := d.tr.How("p"), d.tr.Counters(); how != "device" || !maps.Equal(now, came) {
			t.Errorf("%q came by %q, and counts are %v, want the device and %v", id, how, now, came)
		}
	}

	p := meet()
	loads(p, "first")
	if copying {
		d.Halt(true)
		defer d.Halt(false)
		begin(p, "cut")
		comes(t, "a copy is under way", func() bool { return d.copying("cut") && d.Count("queued") > 0 })
	}
	p.kill()
	free := time.Now()
	if copying {
		comes(t, "D knows that P is dead, and waits for the copy", func() bool {
			r := &d.tr.receiver
			r.mu.Lock()
			defer r.mu.Unlock()
			src := r.sources["p"]
			return src.state == sourceDown && src.quiet != nil || d.opens() == before
		})
		if n := d.opens() - before; n != pieces {
			t.Errorf("D has %d mappings of P's open while it copies, want %d", n, pieces)
		}
		free = time.Now()
		d.Halt(false)
	}
	comes(t, "D has closed what it had of the dead process", func() bool { return d.opens() == before })
	took = time.Since(free)
	if copying {
		if o := d.sink.Wait("received", "cut", 1); !errors.Is(o.Err, core.ErrConnectionLost) {
			t.Errorf("the transfer that was cut: %v", o.Err)
		}
	}
	d.down("")
	loads(meet(), "next")
	if n := d.Count("violations") - violations; n > 0 {
		t.Errorf("%d violations", n)
	}
	return took
}

// TestDeviceMemoryOfTheClosed: a prefill agent's Close returns when D has closed what it had open of P's memory, and not before, also if D copies:
// then P's engine may free it.
func TestDeviceMemoryOfTheClosed(t *testing.T) {
	for _, copying := range []bool{false, true} {
		t.Run(fmt.Sprint("D copies: ", copying), func(t *testing.T) {
			p, d := startGPU(t, "p", 0, Config{StopGrace: time.Minute}, cuda.Options{}), startGPU(t, "d", 1, Config{}, cuda.Options{StallTimeout: time.Hour})
			before := d.opens()
			p.meets(d)
			p.goes("first", d, 1)
			if d.opens() == before {
				t.Fatal("D has nothing of P's open")
			}
			if copying {
				d.Halt(true)
				defer d.Halt(false)
				p.loads("cut", d, 2)
				comes(t, "a copy is under way", func() bool { return d.copying("cut") && d.Count("queued") > 0 })
			}
			closed := make(chan error, 1)
			go func() {
				err := p.tr.Close()
				if n := d.opens() - before; n > 0 {
					t.Errorf("P is closed, and D has %d mappings of its memory", n)
				}
				closed <- err
			}()
			if copying {
				comes(t, "P's close has begun", func() bool {
					p.tr.sender.mu.Lock()
					defer p.tr.sender.mu.Unlock()
					return p.tr.sender.closed
				})
				d.Halt(false)
			}
			select {
			case err := <-closed:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(time.Minute):
				t.Fatal("P's Close has not returned")
			}
		})
	}
}
