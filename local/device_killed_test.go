package local

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/cuda/testdouble"
)

// deviceSharingEnv tells a test binary to be a prefill agent over device memory of a kind.
const deviceSharingEnv = "KVCONN_TEST_DEVICE_SHARING"

// The kinds of device memory, by how another process opens it.
const (
	byHandle     = "allocated" // by an IPC handle
	byDescriptor = "mapped"    // by an exported handle
)

// deviceSharing is that process. It says its endpoint and a ticket, and writes all its memory under each grant that it is told.
func deviceSharing() {
	kind := os.Getenv(deviceSharingEnv)
	if kind == "" {
		return
	}
	g := newGPU(testdouble.Program{}, 0)
	var at uintptr
	if kind == byHandle {
		at = g.Alloc(deviceBytes)
	} else {
		at = g.Map(deviceBytes).At
	}
	g.Fill(at, deviceBytes, 1)
	l, err := core.NewLayout([]core.Region{{Name: "cache of p", Base: uint64(at), BlockStride: deviceBytes / 4, BlockBytes: deviceBytes / 4, NumBlocks: 4, Memory: core.DeviceMemory(0)}})
	if err != nil {
		panic(err)
	}
	d, err := openDevices(l, false, cuda.Options{RingBytes: 1 << 20, SlotBytes: 64 << 10})
	if err != nil {
		panic(err)
	}
	tr, err := New(Config{Listen: true, Devices: d}, l, deafSink{})
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
		tr.Write(core.WriteOp{ID: core.TransferID(in.Text()), Peer: "d", Grant: grant, Pairs: []core.Pair{{Length: deviceBytes}}})
	}
	os.Exit(0)
}

// TestDeviceMemoryOfTheDead: when a prefill engine's process is killed, D closes what it had open of its device memory, and nobody has
// asked it to: until then the GPU keeps that memory, and the engine's successor may find too little. So it does when a copy out of that
// memory was under way.
func TestDeviceMemoryOfTheDead(t *testing.T) {
	for _, kind := range []string{byHandle, byDescriptor} {
		for _, when := range []string{"idle", "in the middle of a copy"} {
			t.Run(kind+", "+when, func(t *testing.T) {
				d := startGPU(t, "d", 1, Config{}, cuda.Options{})
				before := d.opens()
				p := startChild(t, deviceSharingEnv+"="+kind)
				endpoint, ticket := p.met()
				if err := d.tr.Connect("p", endpoint, ticket); err != nil {
					t.Fatal(err)
				}
				expect := func(id core.TransferID) string {
					grant, err := d.tr.Expect(id, "p", []core.Segment{{Length: deviceBytes}})
					if err != nil {
						t.Fatal(err)
					}
					return hex.EncodeToString(grant)
				}
				p.told(expect("first"))
				if o := d.sink.Wait("received", "first", 1); o.Err != nil {
					t.Fatal(o.Err)
				}
				if wrong := d.Wrong(d.at, deviceBytes, 1); wrong > 0 {
					t.Errorf("%d bytes are wrong", wrong)
				}
				if d.opens() == before {
					t.Fatal("D has nothing of P's memory open")
				}
				grant := expect("t")
				if when != "idle" {
					d.Halt(true)
					p.told(grant)
					comes(t, "a copy is under way", func() bool { return d.copying("t") })
				}
				p.kill()
				d.Halt(false)
				comes(t, "D has closed the memory of a process that is gone", func() bool { return d.opens() == before })
				if o := d.sink.Wait("received", "t", 1); o.Err == nil || when == "idle" && !errors.Is(o.Err, core.ErrConnectionLost) {
					t.Errorf("a load from a process that was killed: %v", o.Err)
				}
			})
		}
	}
}
