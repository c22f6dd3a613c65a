package rdma_test

import (
	"context"
	"fmt"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma"
)

type silentSink struct{}

func (silentSink) Received(core.TransferID, core.TransferStats, error) {}
func (silentSink) Written(core.TransferID, core.TransferStats, error)  {}
func (silentSink) PeerDown(core.AgentID, error)                        {}

// BenchmarkOpen is the time from opening the library (the first time, in a process)
// until so much memory, which nobody has touched before, is registered.
func BenchmarkOpen(b *testing.B) {
	if !available() {
		b.Skip("no RDMA device here; scripts/bench-rdma.sh register runs this in a machine that has one")
	}
	for _, gib := range []uint64{1, 2, 4} {
		b.Run(fmt.Sprint(gib, "GiB"), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				mem, err := unix.Mmap(-1, 0, int(gib<<30), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
				if err != nil {
					b.Fatal(err)
				}
				l, err := kv.NewLayout([]kv.Region{{Name: "kv", Base: uint64(uintptr(unsafe.Pointer(&mem[0]))), BlockStride: 1 << 20, BlockBytes: 1 << 20, NumBlocks: uint32(gib << 10)}})
				if err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
				began := time.Now()
				tr, err := rdma.New(rdma.DefaultConfig(), "bench", l, silentSink{}, func(context.Context, core.AgentID, []byte) ([]byte, error) { return nil, core.ErrAbsent })
				if err != nil {
					b.Fatal(err)
				}
				took := time.Since(began)
				b.StopTimer()
				b.ReportMetric(float64(gib)/took.Seconds(), "GiB/s")
				if err := tr.Close(); err != nil {
					b.Fatal(err)
				}
				if err := unix.Munmap(mem); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}
