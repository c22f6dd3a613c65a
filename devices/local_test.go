package devices_test

import (
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/node"
)

// TestLocal: agents of one host whose caches lie on two GPUs go by local alone. When an engine has slept, at either side, the
// next transfers are of the new memory. All bytes come by D's device, and none by reading P's process.
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
	for who, s := range map[string]node.Stats{"prefill": p.Stats(), "decode": d.Stats()} {
		if len(s.Pairs) != 1 || s.Pairs[0].How != "device" {
			t.Errorf("%s counts %+v, want the device", who, s.Pairs)
		}
	}
	all := d.Stats().Transports["local"]
	for _, how := range []string{"device", "mapping", "process_vm_readv"} {
		want := uint64(0)
		if how == "device" {
			want = 3 * blocks * blockBytes
		}
		if n := all.Counters["bytes_by_"+how]; n != want || all.BytesIn != 3*blocks*blockBytes {
			t.Errorf("%d of %d bytes came by %s, want %d", n, all.BytesIn, how, want)
		}
	}
}
