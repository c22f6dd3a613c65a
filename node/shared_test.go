package node

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"unsafe"

	"go.uber.org/zap/zaptest/observer"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/shmem"
)

const cacheBytes = layers * numBlocks * blockBytes

// shared is a cache in memory of kvconn's own, and leaves nothing.
func shared(t *testing.T) []byte {
	t.Helper()
	before, _ := shmem.Allocated()
	m, err := shmem.Alloc(cacheBytes)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = shmem.Free(m.Base()) // unless the test has
		if after, _ := shmem.Allocated(); after > before {
			t.Errorf("%d memories, %d before", after, before)
		}
	})
	return m.Bytes()
}

func freed(t *testing.T, cache []byte) {
	t.Helper()
	if err := shmem.Free(uint64(uintptr(unsafe.Pointer(&cache[0])))); err != nil {
		t.Error(err)
	}
}

// TestHow: log and statistics of both sides say how bytes go by local.
func TestHow(t *testing.T) {
	for name, c := range map[string]struct {
		shared    bool
		transport string
		how       string
	}{
		"shared":          {true, viaLocal, "mapping"},
		"ordinary memory": {false, viaLocal, "process_vm_readv"},
		"shared, by tcp":  {true, viaTCP, ""},
	} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			cache := make([]byte, cacheBytes)
			if c.shared {
				cache = shared(t)
			}
			p, pLogs := openOver(t, forced(RolePrefill, c.transport), cache)
			d, dLogs := openOver(t, forced(RoleDecode, c.transport), shared(t))
			transfer(t, p, d, "t", p.BootstrapAddress())
			for who, s := range map[string]Stats{"prefill": p.Stats(), "decode": d.Stats()} {
				if len(s.Pairs) != 1 || s.Pairs[0].How != c.how {
					t.Errorf("%s counts %+v, want %q", who, s.Pairs, c.how)
				}
			}
			for who, logs := range map[string]*observer.ObservedLogs{"prefill": pLogs, "decode": dLogs} {
				said := logs.FilterMessage("pair goes over " + c.transport).All()
				if len(said) != 1 {
					t.Fatalf("%s says %v", who, logs.All())
				}
				if got, has := said[0].ContextMap()["how"]; has != (c.how != "") || has && got != c.how {
					t.Errorf("%s says %v, want %q", who, said[0], c.how)
				}
			}
			if c.how == "" {
				return
			}
			bytes := d.Stats().Transports[viaLocal].BytesIn
			want := map[string]uint64{"bytes_by_mapping": 0, "bytes_by_process_vm_readv": 0, "bytes_by_device": 0, "bytes_past_caches": 0, "peers_memory_mapped_bytes": 0, "own_memory_shared_bytes": cacheBytes}
			want["bytes_by_"+c.how] = bytes
			if c.shared {
				want["peers_memory_mapped_bytes"] = cacheBytes
			}
			if got := d.Stats().Transports[viaLocal].Counters; bytes == 0 || fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("decode counts %v of %d bytes, want %v", got, bytes, want)
			}
		})
	}
}

// TestSharedProcesses: two processes, both with caches in memory of kvconn's own.
func TestSharedProcesses(t *testing.T) {
	leaktest.Check(t)
	t.Setenv("KVCONN_TEST_TRANSPORT", viaLocal)
	for _, how := range []string{"mapping", "process_vm_readv"} {
		if how == "mapping" {
			t.Setenv("KVCONN_TEST_SHARED", "1")
		} else {
			t.Setenv("KVCONN_TEST_SHARED", "")
		}
		address, p := prefillProcess(t, freePort(t), "")
		d, _ := openOver(t, forced(RoleDecode, viaLocal), shared(t))
		d.load("offered", address, 3, 4)
		r := d.want("offered", core.OK)
		for l := range layers {
			for _, id := range []kv.BlockID{3, 4} {
				for i, b := range d.block(l, id) {
					if b != 7 {
						t.Fatalf("layer %d, block %d, byte %d is %d", l, id, i, b)
					}
				}
			}
		}
		s := d.Stats()
		if r.Transport != viaLocal || s.Pairs[0].How != how || s.Transports[viaLocal].Counters["bytes_by_"+how] != r.Stats.Bytes {
			t.Errorf("%+v and %+v, want %q", r, s, how)
		}
		p.kill()
	}
}

// TestFreedWhileRegistered: memory that an engine frees too early stays until the agent is closed, whatever its transport is.
func TestFreedWhileRegistered(t *testing.T) {
	leaktest.Check(t)
	mine, other := shared(t), shared(t)
	p, _ := openOver(t, forced(RolePrefill, viaTCP), mine)
	d, _ := openOver(t, forced(RoleDecode, viaTCP), other)
	freed(t, mine)
	freed(t, other)
	transfer(t, p, d, "t", p.BootstrapAddress())
	late, err := Open(forced(RoleDecode, viaTCP), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer late.Close()
	if err := late.RegisterKVCaches(regions(other)); err == nil || !strings.Contains(err.Error(), "was freed") {
		t.Errorf("freed memory is registered: %v", err)
	}
	before, _ := shmem.Allocated()
	_, _ = p.Close(), d.Close()
	if after, _ := shmem.Allocated(); after != before-2 {
		t.Errorf("%d memories, %d before", after, before)
	}
	if err := late.RegisterKVCaches(regions(make([]byte, cacheBytes))); err != nil {
		t.Error(err)
	}
}

// TestNotRegistered: an agent that has not registered memory does not keep it.
func TestNotRegistered(t *testing.T) {
	leaktest.Check(t)
	cache := shared(t)
	a, err := Open(forced(RoleDecode, viaRDMA), Options{rdma: func(rdma.Config, core.AgentID, *kv.Layout, core.Sink, core.Signal) (core.Signaller, error) {
		return nil, errors.New("no device")
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if err := a.RegisterKVCaches(regions(cache)); err == nil || !strings.Contains(err.Error(), "no device") {
		t.Fatal(err)
	}
	before, _ := shmem.Allocated()
	freed(t, cache)
	if after, _ := shmem.Allocated(); after != before-1 {
		t.Errorf("%d memories, %d before", after, before)
	}
}
