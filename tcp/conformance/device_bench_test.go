package conformance

import (
	"fmt"
	"slices"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/devices"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
	"github.com/kvconn/kvconn/tcp"
)

const slotBytes = cuda.DefaultSlotBytes

// BenchmarkDevice is transfers between two agents of one process, from host to host memory and
// from device to device memory of the driver double, whose copies are memcpy here, without
// delays. So each byte is copied twice more, by the processor: the pipeline's own cost shows. The
// two copies alone, through a slot, are there for comparison. cpu-ms/op is the time of all
// processors: where they are all that is short, the floor of the ratio of device to host is
// host's time divided by the sum of host's and the copies'. calls/block is how many calls of the driver both
// sides together make for a block.
func BenchmarkDevice(b *testing.B) {
	const total = 64 << 20
	for _, block := range []uint64{16 << 10, 64 << 10, 1 << 20} {
		b.Run(fmt.Sprint(block>>10, " KiB copies"), func(b *testing.B) { benchCopies(b, total, int(block)) })
		for _, memory := range []string{"host", "device"} {
			b.Run(fmt.Sprint(block>>10, " KiB ", memory), func(b *testing.B) {
				n := uint32(total / block)
				p, sent, _ := benchAgent(b, memory, n, block)
				d, _, gpu := benchAgent(b, memory, n, block)
				ticket, err := p.Admit("d")
				if err != nil {
					b.Fatal(err)
				}
				if err := d.Connect("p", p.Endpoint(), ticket); err != nil {
					b.Fatal(err)
				}
				pairs := make([]kv.Pair, n)
				segments := make([]kv.Segment, n)
				for i := range n {
					segments[i] = kv.Segment{Offset: uint64(i) * block, Length: block}
					pairs[i] = kv.Pair{SrcOffset: uint64(i) * block, Length: block}
				}
				slices.Reverse(pairs) // no two of them are adjacent
				b.SetBytes(total)
				defer processors(b)()
				if gpu != nil {
					before := gpu.Count("calls")
					defer func() { b.ReportMetric(float64(gpu.Count("calls")-before)/float64(n)/float64(b.N), "calls/block") }()
				}
				for i := 0; b.Loop(); i++ {
					id := core.TransferID(fmt.Sprint(i))
					grant, err := d.Expect(id, "p", segments)
					if err != nil {
						b.Fatal(err)
					}
					p.Write(core.WriteOp{ID: id, Peer: "d", Grant: grant, Pairs: pairs})
					if o := sent.Wait("written", id, 1); o.Err != nil {
						b.Fatal(o.Err)
					}
				}
			})
		}
	}
}

// processors reports the time of all processors from now on to the call of its result.
func processors(b *testing.B) func() {
	used := func() time.Duration {
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
			b.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	before := used()
	return func() { b.ReportMetric(float64((used()-before).Microseconds())/1000/float64(b.N), "cpu-ms/op") }
}

// benchCopies copies what a transfer of so many bytes copies between devices and slots.
func benchCopies(b *testing.B, total, block int) {
	from, slot, to := make([]byte, total), make([]byte, slotBytes), make([]byte, total)
	copy(from, to)
	b.SetBytes(int64(total))
	defer processors(b)()
	for b.Loop() {
		for off := 0; off < total; off += slotBytes {
			for i := 0; i < slotBytes; i += min(block, slotBytes) {
				copy(slot[i:], from[off+i:off+i+min(block, slotBytes)])
			}
			copy(to[off:], slot)
		}
	}
}

// benchAgent is a transport over one region, what it is told, and its GPU.
func benchAgent(b *testing.B, memory string, blocks uint32, block uint64) (*tcp.Transport, *coretest.Recorder, *engine.Engine) {
	b.Helper()
	r := kv.Region{Name: "r", BlockStride: block, BlockBytes: block, NumBlocks: blocks}
	cfg := tcp.Config{Listen: true, ListenHost: "127.0.0.1", AdvertiseHost: "127.0.0.1"}
	var e *engine.Engine
	if memory == "device" {
		e = engine.New(b, 0)
		e.Delay(0)
		r.Base, r.Memory = uint64(e.Alloc(int(uint64(blocks)*block))), kv.DeviceMemory(0)
	} else {
		mem, err := unix.Mmap(-1, 0, int(uint64(blocks)*block), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE|unix.MAP_POPULATE)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = unix.Munmap(mem) })
		r.Base = uint64(uintptr(unsafe.Pointer(&mem[0])))
	}
	l, err := kv.NewLayout([]kv.Region{r})
	if err != nil {
		b.Fatal(err)
	}
	d, err := devices.Open(l.Regions, cuda.Options{SlotBytes: slotBytes})
	if err != nil {
		b.Fatal(err)
	}
	if d != nil {
		b.Cleanup(func() { _ = d.Close() })
		cfg.Mover = d
	}
	sink := coretest.NewRecorder(b, "agent")
	t, err := tcp.New(cfg, l, sink)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = t.Close() })
	return t, sink, e
}
