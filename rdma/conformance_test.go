package rdma_test

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
	"github.com/kvconn/kvconn/rig/coretest"
)

// opener opens transports with so many queue pairs for a pair of ports, of such a
// depth.
func opener(pairs, depth int) coretest.RemoteOpener {
	return func(id core.AgentID, l *kv.Layout, sink core.Sink, signal core.Signal) (core.Transport, error) {
		cfg := config(pairs, depth)
		if os.Getenv("KVCONN_TEST_LOG") != "" {
			cfg.Logger, _ = zap.NewDevelopment()
			cfg.Logger = cfg.Logger.Named(string(id))
		}
		return rdma.New(cfg, id, l, sink, signal)
	}
}

func config(pairs, depth int) rdma.Config {
	cfg := rdma.DefaultConfig()
	cfg.QueuePairs, cfg.SendDepth = pairs, depth
	cfg.MaxTransfers = 256
	return cfg
}

func fixture(open coretest.RemoteOpener) coretest.Fixture {
	return coretest.Fixture{
		BigBytes: 8 << 20,
		Open: func(t *testing.T, id core.AgentID, l *kv.Layout, sink core.Sink, signal core.Signal) core.Transport {
			tr, err := open(id, l, sink, signal)
			if err != nil {
				t.Fatal(err)
			}
			return tr
		}}
}

func TestMain(m *testing.M) {
	serveNobody()
	coretest.ServeRemote(map[string]coretest.RemoteKind{"2": {Open: opener(2, 16)}, "device": onGPUs})
	os.Exit(m.Run())
}

// needsDevice skips what only a device can show: make rdma-test has some.
func needsDevice(t *testing.T) {
	t.Helper()
	if !available() {
		t.Skip("no RDMA device here; make rdma-test runs this in a machine that has some")
	}
}

func available() bool {
	lib, err := verbs.Load()
	if err != nil {
		return false
	}
	list, err := lib.Devices()
	return err == nil && len(list) > 0
}

// TestConformance holds rdma to what every Transport promises.
func TestConformance(t *testing.T) {
	needsDevice(t)
	for _, pairs := range []int{1, 2} {
		t.Run(fmt.Sprint(pairs, " queue pairs"), func(t *testing.T) {
			coretest.TransportSuite(t, fixture(opener(pairs, 512)))
		})
	}
	t.Run("plans", func(t *testing.T) {
		suite := coretest.TransportSuite
		if testing.Short() {
			suite = coretest.PlanSuite
		}
		suite(t, fixture(coretest.Planning(opener(2, 512))))
	})
}

// TestProcesses holds rdma to the same between processes.
func TestProcesses(t *testing.T) {
	needsDevice(t)
	f := fixture(opener(2, 16)) // a process that is stopped has much left to post
	f.Remote, f.OneSided = "2", true
	coretest.ProcessSuite(t, f)
}
