package local

import (
	"os"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/shmem"
)

func opener(cfg Config) coretest.RemoteOpener {
	cfg.Listen = true
	return func(_ core.AgentID, l *kv.Layout, sink core.Sink, _ core.Signal) (core.Transport, error) {
		return New(cfg, l, sink)
	}
}

func fixture(open coretest.RemoteOpener) coretest.Fixture {
	return coretest.Fixture{Open: func(t *testing.T, id core.AgentID, l *kv.Layout, sink core.Sink, signal core.Signal) core.Transport {
		tr, err := open(id, l, sink, signal)
		if err != nil {
			t.Fatal(err)
		}
		return tr
	}}
}

// suiteConfig is that of agents that share one process with the suite. P waits for D's word on a stop also on a slow machine: the
// suite wants no byte of what P's engine does with its blocks later, not even in a load that fails. D's Close waits there for the
// end of its copies: it failed once, since a device's copy had taken longer than two seconds on a machine that did other work.
var suiteConfig = Config{Workers: 3, BatchBytes: 50_000, ConnectTimeout: 10 * time.Second, StopGrace: 20 * time.Second, CloseGrace: 20 * time.Second}

// processes are the openers of TestProcesses.
var processes = map[string]coretest.RemoteKind{"local": {Open: opener(Config{})}, "device": onDevice}

func TestMain(m *testing.M) {
	coretest.ServeRemote(processes)
	serveBench()
	idling()
	underFilter()
	withOrphan()
	reusing()
	halfway()
	sharing()
	doomed()
	underYama()
	os.Exit(m.Run())
}

// allocated is memory that decode agents map.
var allocated = &coretest.Device{Alloc: func(t *testing.T, size int) ([]byte, uint64) {
	t.Helper()
	m, err := shmem.Alloc(uint64(size))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := shmem.Free(m.Base()); err != nil {
			t.Error(err)
		}
	})
	return m.Bytes()[:size], m.Base()
}}

// TestConformance holds local to what every Transport promises. Batches are small, so that several
// workers share a transfer; the shorter timeout is waited for several times.
func TestConformance(t *testing.T) {
	open := opener(suiteConfig)
	t.Run("lists", func(t *testing.T) { coretest.TransportSuite(t, fixture(open)) })
	t.Run("plans", func(t *testing.T) { coretest.TransportSuite(t, fixture(coretest.Planning(open))) })
	t.Run("shared", func(t *testing.T) {
		f := fixture(coretest.Planning(open))
		f.Device = allocated
		coretest.TransportSuite(t, f)
	})
}

func TestTimeAtRest(t *testing.T) {
	coretest.TimeAtRest(t, fixture(opener(suiteConfig)), "received")
}

// TestProcesses holds local to the promises between processes.
func TestProcesses(t *testing.T) {
	for name, kind := range processes {
		t.Run(name, func(t *testing.T) {
			f := fixture(kind.Open)
			f.Remote = name
			if f.Device = kind.Device; f.Device != nil {
				t.Setenv("KVGPU_ABORT", "1") // a process that does what a driver leaves undefined ends
				g := newGPU(t, 0)
				f.Device, f.LateReads, f.Apart = &coretest.Device{Expose: g.expose, Hide: g.hide}, true, true
				f.Opened = func() int { return int(g.Count("mapped") + g.Count("ipc")) }
				coretest.ProcessSuite(t, f)
				return
			}
			coretest.ProcessSuite(t, f)
			f.Device, f.LateReads = allocated, true // that of agents of this process
			t.Run("shared", func(t *testing.T) { coretest.ProcessSuite(t, f) })
		})
	}
}
