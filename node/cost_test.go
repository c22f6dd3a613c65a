package node

import (
	"fmt"
	"math"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/invariants"
)

// costPair is two agents that have met. They load by tcp, which each commit has.
func costPair(t testing.TB, token string) (p, d *side) {
	of, to := testConfig(RolePrefill), testConfig(RoleDecode)
	of.Transport, to.Transport = "tcp", "tcp"
	of.NATSToken, to.NATSToken = token, token
	p, d = open(t, of), open(t, to)
	p.offer("meet", 1)
	d.load("meet", p.BootstrapAddress(), 2)
	d.want("meet", core.OK)
	return p, d
}

// costOf makes n loads of one small block that P has ready, each when the one before it is
// reported, and says what they took. The offers are not counted. The transfers' ids begin with name.
func costOf(p, d *side, name string, n int, stop, start func()) (allocations, micros float64) {
	now := func() (uint64, int64) {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		var u unix.Rusage
		_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
		return m.Mallocs, u.Utime.Nano() + u.Stime.Nano()
	}
	const batch = 1000
	id := func(i int) core.TransferID { return core.TransferID(fmt.Sprint(name, i)) }
	for i := 0; i < n; i += batch {
		stop()
		for k := i; k < min(i+batch, n); k++ {
			p.offer(id(k), 1)
		}
		p.GetFinished()
		count, used := now()
		start()
		for k := i; k < min(i+batch, n); k++ {
			d.load(id(k), p.BootstrapAddress(), 2)
			d.want(id(k), core.OK)
		}
		more, until := now()
		allocations += float64(more-count) / float64(n)
		micros += float64(until-used) / 1000 / float64(n)
	}
	return allocations, micros
}

// BenchmarkLoadToFirstByte is D's load of one small block that P has ready, from the call to the
// report. Compare it with natsbus's BenchmarkRequest.
func BenchmarkLoadToFirstByte(b *testing.B) {
	for name, token := range map[string]string{"plain": "", "token": "abcdefghijklmnopqrst"} {
		b.Run(name, func(b *testing.B) {
			p, d := costPair(b, token)
			allocations, micros := costOf(p, d, "t", b.N, b.StopTimer, b.StartTimer)
			b.ReportMetric(allocations, "allocs/load")
			b.ReportMetric(micros, "cpu-us/load")
		})
	}
}

// TestLoadAllocates: the proofs of who asks, and encryption, cost a load no allocations: without
// them it took 171. Under the race detector pools drop a part of what they keep.
func TestLoadAllocates(t *testing.T) {
	if invariants.Enabled {
		t.Skip("the checks of this build allocate; make attack runs this without them")
	}
	most := 171.0
	if raced {
		most = 200
	}
	for _, token := range []string{"", "abcdefghijklmnopqrst"} {
		p, d := costPair(t, token)
		least := math.Inf(1) // of some runs: what goes on beside the loads allocates too
		for run := range 5 {
			n, _ := costOf(p, d, fmt.Sprint(run, "-"), 100, func() {}, func() {})
			least = min(least, n)
		}
		if least > most {
			t.Errorf("with token %q a load takes %.1f allocations, want at most %v", token, least, most)
		}
		t.Logf("with token %q a load takes %.1f allocations", token, least)
	}
}
