package tcp_test

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/coretest"
	"github.com/kvconn/kvconn/tcp"
)

// opener opens transports with so many streams to a peer.
func opener(streams int, stall time.Duration) coretest.RemoteOpener {
	return func(_ core.AgentID, l *core.Layout, sink core.Sink, _ core.Signal) (core.Transport, error) {
		return tcp.New(tcp.Config{Listen: true, ListenHost: "127.0.0.1", AdvertiseHost: "127.0.0.1", Streams: streams, StallTimeout: stall}, l, sink)
	}
}

func fixture(open coretest.RemoteOpener) coretest.Fixture {
	return coretest.Fixture{Open: func(t *testing.T, id core.AgentID, l *core.Layout, sink core.Sink, signal core.Signal) core.Transport {
		tr, err := open(id, l, sink, signal)
		if err != nil {
			t.Fatal(err)
		}
		return tr
	}}
}

// stall is short in the tests that wait for it.
const stall = 3 * time.Second

func TestMain(m *testing.M) {
	coretest.ServeRemote(map[string]coretest.RemoteOpener{"1": opener(1, stall), "3": opener(3, stall)})
	os.Exit(m.Run())
}

// TestConformance holds tcp to what every Transport promises.
func TestConformance(t *testing.T) {
	for _, streams := range []int{1, 3} {
		t.Run(fmt.Sprint(streams, " streams"), func(t *testing.T) {
			coretest.TransportSuite(t, fixture(opener(streams, 0)))
		})
	}
}

// TestProcesses holds it to that between processes.
func TestProcesses(t *testing.T) {
	for _, streams := range []int{1, 3} {
		t.Run(fmt.Sprint(streams, " streams"), func(t *testing.T) {
			f := fixture(opener(streams, stall))
			f.Remote = fmt.Sprint(streams)
			coretest.ProcessSuite(t, f)
		})
	}
}
