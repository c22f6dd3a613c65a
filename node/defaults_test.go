package node

import (
	"reflect"
	"testing"
	"time"

	"github.com/kvconn/kvconn/bootstrap"
	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/tcp"
)

// TestDefaultsOfTheParts: an agent that sets nothing gives each part the value that the part
// has by default itself.
func TestDefaultsOfTheParts(t *testing.T) {
	c := DefaultConfig()
	verbs := c.RDMA()
	verbs.Fallback = false // by the key transport, see fallsBack
	gpu := c.deviceOptions()
	gpu.CloseTimeout = 0 // by the key close_timeout_s, see deviceCloseTime
	for _, part := range []struct {
		name      string
		here, its any
	}{
		{"core", c.machineOptions(), core.Defaults},
		{"rdma", verbs, rdma.DefaultConfig()},
		{"cuda", gpu, cuda.Options{RingBytes: cuda.DefaultRingBytes, SlotBytes: cuda.DefaultSlotBytes, StallTimeout: core.DefaultStallTimeout}},
		{"tcp", c.TCPStreams, tcp.DefaultStreams},
		{"bootstrap", c.BootstrapPort, bootstrap.DefaultPort},
		{"connect_timeout_s", time.Duration(c.ConnectTimeout), core.DefaultConnectTimeout},
		{"stall_timeout_s", time.Duration(c.StallTimeout), core.DefaultStallTimeout},
	} {
		if !reflect.DeepEqual(part.here, part.its) {
			t.Errorf("%s: an agent's default is %+v, the part's own is %+v", part.name, part.here, part.its)
		}
	}
}
