package local

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// BenchmarkSizes moves scattered blocks of 64 KiB, as BenchmarkBeside, with other numbers of workers and of bytes of a copy. Each round
// has all; the metrics are medians of each round's ratio to the default. A Revoke may wait for a copy: the longer, the more bytes it has.
func BenchmarkSizes(b *testing.B) {
	const block = 64 << 10
	for _, name := range []string{"local2", "mapped2"} { // process_vm_readv, a mapping
		b.Run(name, func(b *testing.B) {
			p := startBench(b, block)
			n := int(benchMemory / 2 / block)
			p.scatter(shuffledBlocks(1, n, 2*n), shuffledBlocks(2, n, 2*n))
			cfg := &p.transports[name].(*Transport).cfg
			settled := *cfg
			took := func(workers int, bytes uint64) float64 { // nothing is under way that reads cfg
				cfg.Workers, cfg.BatchBytes = workers, bytes
				began := time.Now()
				p.move(name)
				return float64(time.Since(began))
			}
			type choice struct {
				workers int
				bytes   uint64
			}
			base := choice{settled.Workers, settled.BatchBytes}
			all := []choice{base}
			for _, workers := range []int{1, 3, 4} {
				all = append(all, choice{workers, base.bytes})
			}
			for _, bytes := range []uint64{64 << 10, 256 << 10, 4 << 20, 16 << 20} {
				all = append(all, choice{base.workers, bytes})
			}
			ratios := map[choice][]float64{}
			for b.Loop() {
				times := map[choice]float64{}
				for _, i := range rand.Perm(len(all)) { // what comes first in a round is at no advantage
					times[all[i]] = took(all[i].workers, all[i].bytes)
				}
				for _, c := range all[1:] {
					ratios[c] = append(ratios[c], times[base]/times[c])
				}
			}
			b.ReportMetric(0, "ns/op")
			for c, list := range ratios {
				b.ReportMetric(median(list), fmt.Sprintf("%dx%dKiB", c.workers, c.bytes>>10))
			}
		})
	}
}

// BenchmarkStores copies blocks of 1 MiB out of a shared mapping, by one thread, in pieces of 64 KiB: by Go's copy, and by stream. One
// round's ratio says what non-temporal stores are worth where nobody reads the blocks at once; beside it the ratio to copies of whole
// blocks, for which Go's copy takes such stores itself.
func BenchmarkStores(b *testing.B) {
	const block, piece = 1 << 20, 64 << 10
	p := startBench(b, block)
	n := int(benchMemory / 2 / block)
	src, dst := shuffledBlocks(1, n, 2*n), shuffledBlocks(2, n, 2*n)
	took := func(total, size uint64) float64 {
		began := time.Now()
		for i := range src {
			for at := uint64(0); at < block; at += size {
				copyOf(total, p.own[dst[i]*block+at:][:size], p.peerMemory[src[i]*block+at:][:size])
			}
		}
		return float64(time.Since(began))
	}
	var streamed, whole []float64
	for b.Loop() {
		other := took(0, piece)
		streamed = append(streamed, other/took(streamFrom, piece))
		whole = append(whole, other/took(0, block))
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(streamed), "stream/copy")
	b.ReportMetric(median(whole), "whole/copy")
}
