package local

import (
	"bytes"
	"net"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/lowmem"
)

const (
	blockBytes = 64 << 10
	blocks     = 16
)

// agent is a transport over two regions of so many blocks, and what its sink was told.
type agent struct {
	t    *testing.T
	id   core.AgentID
	tr   *Transport
	mem  []byte
	sink *coretest.Recorder
}

// twoRegions are those of an agent whose memory begins there.
func twoRegions(base uint64) (*kv.Layout, error) {
	return kv.NewLayout([]kv.Region{
		{Name: "k", Base: base, BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: blocks},
		{Name: "v", Base: base + blocks*blockBytes, BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: blocks},
	})
}

func start(t *testing.T, id core.AgentID, cfg Config, k kernel) *agent {
	t.Helper()
	mem := lowmem.Map(t, 2*blocks*blockBytes) // some tests unmap a part of it
	l, err := twoRegions(uint64(uintptr(unsafe.Pointer(&mem[0]))))
	if err != nil {
		t.Fatal(err)
	}
	a := &agent{t: t, id: id, mem: mem, sink: coretest.NewRecorder(t, string(id))}
	cfg.Listen = true
	if k == nil {
		k = linux{}
	}
	if a.tr, err = open(cfg, l, a.sink, k); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.tr.Close() })
	return a
}

// two are agents that have met.
func two(t *testing.T, k kernel) (p, d *agent) {
	t.Helper()
	leaktest.Check(t)
	p, d = start(t, "p", Config{}, k), start(t, "d", Config{}, k)
	d.connect(p)
	return p, d
}

func (a *agent) ticket(peer core.AgentID) []byte {
	a.t.Helper()
	ticket, err := a.tr.Admit(peer)
	if err != nil {
		a.t.Fatal(err)
	}
	return ticket
}

func (a *agent) connect(p *agent) {
	a.t.Helper()
	if err := a.tr.Connect(p.id, p.tr.Endpoint(), p.ticket(a.id)); err != nil {
		a.t.Fatal(err)
	}
}

// down waits for the first PeerDown, whose cause must have the parts.
func (a *agent) down(parts ...string) {
	a.t.Helper()
	wants(a.t, a.await("down", "").Err, parts...)
}

// await polls, since a Recorder waits for transfers only.
func (a *agent) await(kind string, id core.TransferID) coretest.Outcome {
	a.t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		if all := a.sink.All(kind, id); len(all) > 0 {
			return all[0]
		}
		if time.Now().After(end) {
			a.t.Fatalf("%s: no outcome %q", a.id, kind)
		}
	}
}

// all are the segments and pairs of both regions, in an order in which no two are adjacent.
func (a *agent) all() (into []kv.Segment, pairs []kv.Pair) {
	for r := range uint32(2) {
		for b := range uint64(blocks) {
			at := (b*7 + 3) % blocks * blockBytes
			into = append(into, kv.Segment{Region: r, Offset: b * blockBytes, Length: blockBytes})
			pairs = append(pairs, kv.Pair{SrcRegion: r, DstRegion: r, SrcOffset: at, DstOffset: b * blockBytes, Length: blockBytes})
		}
	}
	return into, pairs
}

func (a *agent) expect(id core.TransferID, p core.AgentID) []byte {
	a.t.Helper()
	into, _ := a.all()
	grant, err := a.tr.Expect(id, p, into)
	if err != nil {
		a.t.Fatal(err)
	}
	return grant
}

func (a *agent) write(id core.TransferID, d core.AgentID, grant []byte) {
	_, pairs := a.all()
	a.tr.Write(core.WriteOp{ID: id, Peer: d, Grant: grant, Pairs: pairs})
}

func wants(t *testing.T, err error, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if err == nil || !contains(err, p) {
			t.Errorf("%v, want %q in it", err, p)
		}
	}
}

// moves checks that a transfer ends well between two agents.
func moves(t *testing.T, id core.TransferID, p, d *agent) {
	t.Helper()
	for i := range p.mem {
		p.mem[i] = byte(i>>9) + byte(len(id))
	}
	p.write(id, d.id, d.expect(id, p.id))
	for _, o := range []coretest.Outcome{d.sink.Wait("received", id, 1), p.sink.Wait("written", id, 1)} {
		if o.Err != nil || o.Stats.Bytes != 2*blocks*blockBytes {
			t.Errorf("%s: %d bytes, %v", o.Kind, o.Stats.Bytes, o.Err)
		}
	}
	for i := range 2 * blocks {
		from := i/blocks*blocks + (i%blocks*7+3)%blocks
		if !bytes.Equal(d.mem[i*blockBytes:][:blockBytes], p.mem[from*blockBytes:][:blockBytes]) {
			t.Fatalf("block %d is not what block %d was", i, from)
		}
	}
}

// socket opens a socket to an agent, as anybody can.
func (a *agent) socket() *net.UnixConn {
	a.t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: "@" + a.tr.here.name, Net: "unix"})
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	return c
}

// ends waits until the other end closes a socket.
func ends(t *testing.T, c *net.UnixConn) {
	t.Helper()
	b := make([]byte, 4096)
	for {
		if _, err := c.Read(b); err != nil {
			if !closed(err) {
				t.Errorf("the socket is not closed: %v", err)
			}
			return
		}
	}
}

func contains(err error, part string) bool { return strings.Contains(err.Error(), part) }
