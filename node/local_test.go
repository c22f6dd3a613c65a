package node

import (
	"fmt"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestLocal: two agents of one host exchange caches by the transport for that.
func TestLocal(t *testing.T) {
	leaktest.Check(t)
	p, d := open(t, forced(RolePrefill, viaLocal)), open(t, forced(RoleDecode, viaLocal))
	src, dst := []kv.BlockID{3, 4, 9}, []kv.BlockID{1, 7, 2}
	p.fill(9, src...)
	for i := range 3 {
		id := core.TransferID(fmt.Sprint("t", i))
		if i == 1 { // decode asks first
			announce(t, p, id)
			d.load(id, p.BootstrapAddress(), dst...)
			p.offer(id, src...)
		} else {
			p.offer(id, src...)
			d.load(id, p.BootstrapAddress(), dst...)
		}
		r, w := d.want(id, core.OK), p.want(id, core.OK)
		if r.Transport != viaLocal || w.Transport != viaLocal || r.Stats.Bytes != layers*3*blockBytes {
			t.Errorf("decode's report %+v, prefill's %+v", r, w)
		}
		same(t, p, src, d, dst)
		clear(d.cache)
	}
	s := d.Stats()
	if s.Transport != viaLocal || s.Transports[viaLocal].Loads != 3 || len(s.Pairs) != 1 || s.Pairs[0].Transport != viaLocal {
		t.Errorf("decode counts %+v", s)
	}
}

// TestLocalAlone: an agent that has no other transport has none in common with one that lacks it.
func TestLocalAlone(t *testing.T) {
	leaktest.Check(t)
	p, d := open(t, forced(RolePrefill, viaTCP)), open(t, forced(RoleDecode, viaLocal))
	p.offer("t", 1)
	d.load("t", p.BootstrapAddress(), 1)
	d.want("t", core.Refused, "no transport in common", `"local"`, `"tcp"`)
}

// TestLocalProcesses: the same between processes, and a prefill process that is killed and started
// again.
func TestLocalProcesses(t *testing.T) {
	leaktest.Check(t)
	t.Setenv("KVCONN_TEST_TRANSPORT", viaLocal)
	port := freePort(t)
	address, p := prefillProcess(t, port, "")
	d := open(t, forced(RoleDecode, viaLocal))
	loads := func(id core.TransferID) {
		t.Helper()
		d.load(id, address, 3, 4)
		if r := d.want(id, core.OK); r.Transport != viaLocal {
			t.Errorf("%+v", r)
		}
		for l := range layers {
			if b := d.block(l, 4); b[0] != 7 || b[blockBytes-1] != 7 {
				t.Errorf("layer %d has %d", l, b[0])
			}
		}
		clear(d.cache)
	}
	loads("offered")
	p.kill()
	_, again := prefillProcess(t, port, "")
	delete(d.seen, "offered")
	loads("offered")
	again.kill()
}

// TestElsewhere: a transport that only goes to the same host is passed over without a word if the peer is
// on another one. If there is no other transport, the load says why.
func TestElsewhere(t *testing.T) {
	leaktest.Check(t)
	n := coretest.NewNetwork()
	p, d := openFakeAgent(t, n, testConfig(RolePrefill), nil), openFakeAgent(t, n, testConfig(RoleDecode), nil)
	d.fake.connectErr = fmt.Errorf("boot ids differ: %w", core.ErrElsewhere)
	goesBy(t, p, d, "t", viaTCP)
	if s := d.Stats(); len(s.Pairs) != 1 || len(s.Pairs[0].Fallbacks) != 0 || s.Pairs[0].Reason != "" || len(s.Transports[viaRDMA].Fallbacks) != 0 {
		t.Errorf("decode counts %+v", s)
	}
	if d.said("pair goes over tcp: ") != 0 || d.said("pair goes over tcp") != 1 {
		t.Errorf("decode said %v", d.logs.All())
	}
	e := openFakeAgent(t, n, forced(RoleDecode, viaRDMA), nil)
	e.fake.connectErr = d.fake.connectErr
	p.offer("u", 1)
	e.load("u", p.BootstrapAddress(), 1)
	e.want("u", core.Unreachable, "boot ids differ")
}
