package tcp_test

import (
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/coretest"
	"github.com/kvconn/kvconn/tcp"
)

// TestConformance holds tcp to what every Transport promises.
func TestConformance(t *testing.T) {
	for _, streams := range []int{1, 3} {
		t.Run(map[int]string{1: "one stream", 3: "three streams"}[streams], func(t *testing.T) {
			coretest.TransportSuite(t, coretest.Fixture{
				Open: func(t *testing.T, _ core.AgentID, l *core.Layout, sink core.Sink) core.Transport {
					tr, err := tcp.New(tcp.Config{Listen: true, ListenHost: "127.0.0.1", AdvertiseHost: "127.0.0.1", Streams: streams}, l, sink)
					if err != nil {
						t.Fatal(err)
					}
					return tr
				},
			})
		})
	}
}
