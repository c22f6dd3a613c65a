package coretest

import (
	"testing"

	"github.com/kvconn/kvconn/core"
)

func TestMemoryTransport(t *testing.T) {
	var n *Network
	var owner string
	TransportSuite(t, Fixture{
		Open: func(t *testing.T, id core.AgentID, l *core.Layout, sink core.Sink, _ core.Signal) core.Transport {
			if owner != t.Name() {
				n, owner = NewNetwork(), t.Name()
			}
			return n.NewTransport(id, l, sink)
		},
	})
}
