package local

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// startLarge is an agent with one region of as many bytes as the least transfer whose bytes pass the caches.
func startLarge(t *testing.T, id core.AgentID) *agent {
	t.Helper()
	mem, err := unix.Mmap(-1, 0, streamFrom, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(mem) })
	l, err := kv.NewLayout([]kv.Region{{Name: "k", Base: uint64(uintptr(unsafe.Pointer(&mem[0]))), BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: streamFrom / blockBytes}})
	if err != nil {
		t.Fatal(err)
	}
	a := &agent{t: t, id: id, mem: mem, sink: coretest.NewRecorder(t, string(id))}
	if a.tr, err = New(Config{Listen: true}, l, a.sink); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.tr.Close() })
	return a
}

// TestPastCaches: a large transfer out of a mapping comes whole, and its bytes count as those that passed the caches. A smaller one's do
// not, nor do those of one out of P's process.
func TestPastCaches(t *testing.T) {
	for name, c := range map[string]struct {
		shares bool
		bytes  uint64
		past   uint64
	}{
		"large":       {true, streamFrom, streamFrom * streams},
		"small":       {true, streamFrom - blockBytes, 0},
		"the process": {false, streamFrom, 0},
	} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			p, d := startLarge(t, "p"), startLarge(t, "d")
			if c.shares {
				p.shares(0, streamFrom, seals, 1)
			}
			rnd := rand.New(rand.NewPCG(1, 2))
			for at := 0; at < len(p.mem); at += 8 {
				*(*uint64)(unsafe.Pointer(&p.mem[at])) = rnd.Uint64() | 1<<56 // no byte at a piece's end is what was there
			}
			d.connect(p)
			var into []kv.Segment
			var pairs []kv.Pair
			for at := uint64(0); at < c.bytes; at += blockBytes {
				from := c.bytes - blockBytes - at
				into = append(into, kv.Segment{Offset: at, Length: blockBytes})
				pairs = append(pairs, kv.Pair{SrcOffset: from, DstOffset: at, Length: blockBytes})
			}
			grant, err := d.tr.Expect("t", "p", into)
			if err != nil {
				t.Fatal(err)
			}
			p.tr.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant, Pairs: pairs})
			for _, o := range []coretest.Outcome{d.sink.Wait("received", "t", 1), p.sink.Wait("written", "t", 1)} {
				if o.Err != nil || o.Stats.Bytes != c.bytes {
					t.Errorf("%s: %d bytes, %v", o.Kind, o.Stats.Bytes, o.Err)
				}
			}
			for _, one := range pairs {
				if !bytes.Equal(d.mem[one.DstOffset:][:blockBytes], p.mem[one.SrcOffset:][:blockBytes]) {
					t.Fatalf("the block at %d is not what the one at %d was", one.DstOffset, one.SrcOffset)
				}
			}
			if n := d.tr.Counters()["bytes_past_caches"]; n != c.past {
				t.Errorf("%d bytes count as past the caches, want %d", n, c.past)
			}
		})
	}
}
