package tcp_test

import (
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/tcp"
)

// They stand here, and not in tcp/conformance, for TestSealDefects.

func TestTimeAtRest(t *testing.T)    { coretest.TimeAtRest(t, plain, "received") }
func TestTimeAtRestOfP(t *testing.T) { coretest.TimeAtRest(t, plain, "written") }

// plain opens transports with three streams to a peer, from the start.
var plain = coretest.Fixture{Open: func(t *testing.T, _ core.AgentID, l *kv.Layout, sink core.Sink, _ core.Signal) core.Transport {
	tr, err := tcp.New(tcp.Config{Listen: true, ListenHost: "127.0.0.1", AdvertiseHost: "127.0.0.1", Streams: 3, First: 3}, l, sink)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}}
