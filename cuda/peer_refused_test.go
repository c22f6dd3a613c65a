package cuda

import (
	"errors"
	"os"
	"strings"
	"testing"
)

// TestPeerRefused: memory that cannot be opened is refused with the reason, and the device goes on.
func TestPeerRefused(t *testing.T) {
	e, d := open(t, Options{})
	to := memory(t, e, d, grain)
	self := ThisProcess()
	elsewhere := Process{ID: self.ID, Namespace: self.Namespace + 1}
	open := func(t *testing.T, o *other, of Process, mode string) error {
		t.Helper()
		a, files := o.try(order{Do: "share"})
		if of == (Process{}) {
			of = a.Process
		}
		t.Setenv("KVGPU_IPC", mode)
		p := d.Peer("prefill 1", of)
		t.Cleanup(func() { p.Close() })
		return openEach(p, a, files)
	}
	refused := func(t *testing.T, err error, says string) {
		t.Helper()
		var r *RefusedError
		if !errors.As(err, &r) || !strings.Contains(err.Error(), "memory of prefill 1 on GPU-") || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %q", err, says)
		}
		if d.Err() != nil {
			t.Fatalf("the device has failed: %v", d.Err())
		}
	}
	for name, c := range map[string]struct {
		kind, mode string
		device     int
		of         Process
		says       string
	}{
		"another PID namespace":            {"allocate", "foreign", 0, elsewhere, "--pid=host"},
		"a process that is not found":      {"allocate", "foreign", 0, Process{}, "of one user"},
		"a device that is not visible":     {"allocate", "", 2, Process{}, "CUDA_VISIBLE_DEVICES"},
		"the same, mapped":                 {"map", "", 2, Process{}, "CUDA_VISIBLE_DEVICES"},
		"devices without a way":            {"allocate", "apart", 1, Process{}, "topo -p2p"},
		"the same devices, mapped":         {"map", "apart", 1, Process{}, "topo -p2p"},
		"mapped, in another PID namespace": {"map", "foreign", 0, elsewhere, ""},
	} {
		t.Run(name, func(t *testing.T) {
			o := start(t, c.device, "KVGPU_DEVICES=3")
			at := o.memory(c.kind, grain, 1)
			err := open(t, o, c.of, c.mode)
			if c.says == "" && err != nil {
				t.Error(err)
			} else if c.says != "" {
				refused(t, err, c.says)
			}
			_ = at
		})
	}
	t.Run("another device", func(t *testing.T) {
		all, err := Devices()
		if err != nil {
			t.Fatal(err)
		}
		for _, kind := range []string{"allocate", "map"} {
			o := start(t, 0, "CUDA_VISIBLE_DEVICES=1") // D's second is P's first
			at := o.memory(kind, grain, 3)
			if a, _ := o.try(order{Do: "share"}); a.Allocations[0].Device != all[1].UUID {
				t.Errorf("P's memory lies on %s, and D's second device is %s", a.Allocations[0].Device, all[1].UUID)
			}
			p := o.openAll(d)
			if err := pull(t, d, p, at, to, grain); err != nil || e.Wrong(to, grain, 3) > 0 {
				t.Errorf("%s: %v, %d bytes are wrong", kind, err, e.Wrong(to, grain, 3))
			}
		}
	})
	t.Run("this process", func(t *testing.T) {
		s, err := d.Share()
		if err != nil {
			t.Fatal(err)
		}
		refused(t, d.Peer("prefill 1", self).Open(s.Allocations[0], nil), "this very process")
	})
	t.Run("freed", func(t *testing.T) {
		o := start(t, 0)
		at := o.memory("allocate", grain, 1)
		a, files := o.try(order{Do: "share"})
		o.ask(order{Do: "free", Addr: at})
		refused(t, openEach(d.Peer("prefill 1", a.Process), a, files), "has given it back")
	})
	t.Run("lies", func(t *testing.T) {
		o := start(t, 0)
		o.memory("allocate", grain, 1)
		o.memory("map", grain, 1)
		a, files := o.try(order{Do: "share"})
		null, err := os.Open("/dev/null")
		if err != nil {
			t.Fatal(err)
		}
		defer null.Close()
		p := d.Peer("prefill 1", a.Process)
		defer p.Close()
		whole, mapped := a.Allocations[0], a.Allocations[1]
		longer, far, none, longerMapped, cut := whole, whole, whole, mapped, whole
		longer.Bytes *= 2
		far.Addr = ^uint64(0)
		none.Handle = nil
		longerMapped.Bytes *= 2
		cut.Handle = cut.Handle[:10]
		for what, err := range map[string]error{
			"longer":        p.Open(longer, nil),
			"far":           p.Open(far, nil),
			"no file":       p.Open(none, nil),
			"another's":     p.Open(mapped, null),
			"longer mapped": p.Open(longerMapped, files[0]),
			"cut":           p.Open(cut, nil),
		} {
			if err == nil {
				t.Errorf("%s: it was opened", what)
			}
		}
		if err := p.Open(whole, nil); err != nil {
			t.Fatal(err)
		}
		within, before, around, next := whole, whole, whole, whole
		within.Addr, within.Bytes = whole.Addr+100, 1000
		before.Addr = whole.Addr - 1
		around.Addr, around.Bytes = whole.Addr-100, 2*whole.Bytes
		next.ID++
		for _, a := range []Allocation{within, before, around, next} {
			if err := p.Open(a, nil); err == nil || !strings.Contains(err.Error(), "close the peer first") {
				t.Errorf("beside %d bytes at %#x it has opened %d at %#x: %v", whole.Bytes, whole.Addr, a.Bytes, a.Addr, err)
			}
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if p.Opened() != 0 || e.Count("ipc")+e.Count("mapped")+e.Count("reserved")+e.Count("handles") != 0 {
			t.Error("what was refused is open")
		}
	})
}

// TestPeerCopiesRefused: a copy that does not fit, writes to a peer's memory or reads what is not open is an error.
func TestPeerCopiesRefused(t *testing.T) {
	e, d := open(t, Options{})
	o := start(t, 0)
	at, to := o.memory("allocate", grain, 1), memory(t, e, d, grain)
	p := o.openAll(d)
	here, _, err := p.here([]Run{{Addr: at, Len: grain}})
	if err != nil {
		t.Fatal(err)
	}
	second, err := Open(0, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	from, slots := slot(t, d, FromDevice), slot(t, d, ToDevice)
	one := func(a uintptr) []Run { return []Run{{Addr: a, Len: 100}} }
	for name, c := range map[string]struct {
		dir  Direction
		copy Copy
	}{
		"to the peer":           {ToDevice, Copy{Slot: slots, Peer: p, Runs: one(at)}},
		"to its address":        {ToDevice, Copy{Slot: slots, Runs: one(here[0].Addr)}},
		"between its places":    {FromPeer, Copy{Peer: p, Runs: one(at), To: one(here[0].Addr + 4096)}},
		"from its address here": {FromDevice, Copy{Slot: from, Runs: one(here[0].Addr)}},
		"no peer":               {FromPeer, Copy{Runs: one(to), To: one(to + 4096)}},
		"a slot":                {FromPeer, Copy{Slot: from, Peer: p, Runs: one(at), To: one(to)}},
		"no slot":               {FromDevice, Copy{Runs: one(to)}},
		"more than there":       {FromPeer, Copy{Peer: p, Runs: one(at + grain - 50), To: one(to)}},
		"before it":             {FromPeer, Copy{Peer: p, Runs: one(at - 50), To: one(to)}},
		"less":                  {FromPeer, Copy{Peer: p, Runs: one(at), To: []Run{{Addr: to, Len: 99}}}},
		"overflow":              {FromPeer, Copy{Peer: p, Runs: []Run{{Addr: at, Len: ^uint64(0)}}, To: []Run{{Addr: to, Len: ^uint64(0)}}}},
		"overflow of all":       {FromPeer, Copy{Peer: p, Runs: []Run{{Addr: at, Len: 1 << 63}, {Addr: at, Len: 1 << 63}}, To: nil}},
		"not registered":        {FromPeer, Copy{Peer: p, Runs: one(at), To: one(to + grain)}},
	} {
		if err := run(t, d.Transfer("a", c.dir), c.copy); err == nil {
			t.Errorf("%s: it was copied", name)
		}
	}
	if err := pull(t, second, p, at, to, 100); err == nil || !strings.Contains(err.Error(), "another handle") {
		t.Errorf("another handle's peer: %v", err)
	}
	if _, err := d.Slot(t.Context(), FromPeer, "test"); err == nil {
		t.Error("there is a slot for copies that need none")
	}
	if n := o.ask(order{Do: "wrong", Addr: at, Bytes: grain, Pattern: 1}).N; n > 0 {
		t.Errorf("%d bytes of P's memory have changed", n)
	}
}

// TestPeerOpenFails: whichever call fails, nothing stays open, the error names the call, and the next time all is well.
func TestPeerOpenFails(t *testing.T) {
	e, d := open(t, Options{})
	o := start(t, 0)
	at, to := o.memory("map", grain, 1), memory(t, e, d, grain)
	other := o.memory("allocate", grain, 2)
	a, files := o.try(order{Do: "share"})
	p := d.Peer("prefill 1", a.Process)
	defer p.Close()
	for _, c := range []struct {
		call string
		code int
		says string
	}{
		{"cuMemImportFromShareableHandle", 1, "given it back"}, {"cuMemAddressReserve", noMemory, "too few addresses"}, {"cuMemMap", noMemory, "too few addresses"},
		{"cuMemSetAccess", 801, "does not open it"}, {"cuMemGetAddressRange_v2", 1, "given it back"}, {"cuPointerGetAttribute", 1, "given it back"},
		{"cuIpcOpenMemHandle_v2", 801, "does not open it"}, {"cuIpcOpenMemHandle_v2", 999, "does not open it"}, {"cuMemMap", 201, "does not find its process"},
	} {
		e.Fail(c.call, 1, c.code)
		err := openEach(p, a, files)
		var refused *RefusedError
		if !errors.As(err, &refused) || refused.Err.Call != c.call || !strings.Contains(err.Error(), c.says) || d.Err() != nil {
			t.Errorf("%s failed: %v, and the device: %v", c.call, err, d.Err())
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if n := e.Count("ipc") + e.Count("mapped") + e.Count("reserved") + e.Count("handles"); n != 0 {
			t.Errorf("%s failed, and %d are open", c.call, n)
		}
	}
	if err := openEach(p, a, files); err != nil {
		t.Fatal(err)
	}
	for from, pattern := range map[uintptr]uint64{at: 1, other: 2} {
		if err := pull(t, d, p, from, to, grain); err != nil || e.Wrong(to, grain, pattern) > 0 {
			t.Errorf("%v, %d bytes are wrong", err, e.Wrong(to, grain, pattern))
		}
	}
}

// TestPeerCopyFails: a copy that the driver refuses ends with that, by batches and one by one; one that does not end well is the device's end.
func TestPeerCopyFails(t *testing.T) {
	e, d := open(t, Options{})
	o := start(t, 0)
	at, to := o.memory("allocate", grain, 1), memory(t, e, d, grain)
	p := o.openAll(d)
	e.Fail("cuMemcpyDtoDAsync_v2", 1, 1)
	says := "copies from a peer's memory to the device for a: copying 2097152 bytes in 1 pieces"
	if err := pull(t, d, p, at, to, grain); err == nil || !strings.Contains(err.Error(), says) {
		t.Error(err)
	}
	if err := pull(t, d, p, at, to, grain); err != nil || e.Wrong(to, grain, 1) > 0 {
		t.Errorf("the next one: %v", err)
	}
	e.Stick(700)
	defer e.Stick(0)
	if err := pull(t, d, p, at, to, grain); err == nil || d.Err() == nil {
		t.Errorf("after a fault of the device: %v", err)
	}
	if err := p.Close(); err == nil {
		t.Error("a device that has failed closes nothing")
	}
}
