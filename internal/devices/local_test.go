package devices_test

import (
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/node"
)

// TestLocal: agents of one host whose caches lie on two GPUs go by local alone. When an engine has slept, at either side, the
// next transfers are of the new memory.
func TestLocal(t *testing.T) {
	p, d, maps := mappedBy(t, func(role string) node.Config {
		c := config(role)
		c.Transport = "local"
		return c
	})
	goesOn(p, d, "first")
	for i, id := range []core.TransferID{"second", "third"} {
		maps[i].Sleep()
		maps[i].Wake()
		goesOn(p, d, id)
	}
}
