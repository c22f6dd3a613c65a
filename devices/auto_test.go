package devices_test

import (
	"bytes"
	"strings"
	"testing"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/node"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

func auto(role string) node.Config {
	c := config(role)
	c.Transport = "auto"
	return c
}

// TestAuto: agents of one host whose caches lie on GPUs and who may choose go by local where decode's device opens prefill's memory. Where
// it does not, they go by tcp, and decode says which memory could not be opened, or shared, and why.
func TestAuto(t *testing.T) {
	for name, c := range map[string]struct {
		mode  string // of the double
		alloc func(t *testing.T, e *engine.Engine) uintptr
		by    string
		says  []string // by decode of the pair
		lacks string   // by prefill of itself
	}{
		"opened": {alloc: onHandles, by: "local"},
		"apart": {mode: "apart", alloc: onHandles, by: "tcp",
			says: []string{"local: ", `region "layer.0"`, "on GPU-", "topo -p2p"}},
		"not shared": {alloc: pooled, by: "tcp", says: []string{"local: ", "has none"}, lacks: "cudaMallocAsync"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("KVGPU_IPC", c.mode)
			p := open(t, auto(node.RolePrefill), 0, c.alloc(t, engine.New(t, 0)))
			d := open(t, auto(node.RoleDecode), 1, onHandles(t, engine.New(t, 1)))
			goesOn(p, d, "first")
			goesOn(p, d, "second")
			pairs := d.Stats().Pairs
			if len(pairs) != 1 || pairs[0].Transport != c.by || pairs[0].Transfers[c.by] != 2 || len(pairs[0].Transfers) != 1 {
				t.Fatalf("decode counts %+v, want both by %s", pairs, c.by)
			}
			if why := pairs[0].Reason; c.says == nil && (why != "" || pairs[0].How != "device") {
				t.Errorf("it went by %q, and not better since %q", pairs[0].How, why)
			}
			for _, part := range c.says {
				if !strings.Contains(pairs[0].Reason, part) {
					t.Errorf("decode says %q, want %q in it", pairs[0].Reason, part)
				}
			}
			its := p.Stats().Transports["local"]
			if its.Available != (c.lacks == "") || !strings.Contains(its.Reason, c.lacks) {
				t.Errorf("prefill says of local: %+v, want %q", its, c.lacks)
			}
		})
	}
}

// TestAutoInHostMemory: a decode agent that has no cache on a device opens none of prefill's, starts no driver for it, and goes by tcp.
func TestAutoInHostMemory(t *testing.T) {
	p := open(t, auto(node.RolePrefill), 0, onHandles(t, engine.New(t, 0)))
	cache := make([]byte, blocks*blockBytes)
	a, err := node.Open(auto(node.RoleDecode), node.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })
	if err := a.RegisterKVCaches(regions(addressOf(cache), kv.HostMemory)); err != nil {
		t.Fatal(err)
	}
	d := &side{Agent: a, t: t, seen: map[core.TransferID]core.Report{}}
	p.Fill(p.at(0), blocks*blockBytes, 6)
	p.offer("t", 0, blocks, 0)
	d.load("t", p, 0, blocks, 0)
	d.well("t")
	p.well("t")
	if !bytes.Equal(cache, p.Pattern(blocks*blockBytes, 6)) {
		t.Error("wrong bytes")
	}
	if pairs := a.Stats().Pairs; len(pairs) != 1 || pairs[0].Transport != "tcp" || !strings.Contains(pairs[0].Reason, "starts no CUDA driver") {
		t.Errorf("decode counts %+v", pairs)
	}
}

// onHandles is memory that others can open; pooled is memory that they cannot.
func onHandles(_ *testing.T, e *engine.Engine) uintptr { return e.Map(blocks * blockBytes).At }

func pooled(t *testing.T, e *engine.Engine) uintptr {
	stream := e.Stream()
	at := e.Out("cuMemAllocAsync", blocks*blockBytes, stream)
	t.Cleanup(func() { e.Must("cuMemFreeAsync", at, stream) })
	return at
}

func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(&b[0])) }
