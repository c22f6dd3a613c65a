package node

import (
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rdma"
)

// newRDMA opens the rdma transport.
func newRDMA(cfg rdma.Config, id core.AgentID, layout *core.Layout, s core.Sink, signal core.Signal) (core.Signaller, error) {
	return rdma.New(cfg, id, layout, s, signal)
}

// RDMA is what the keys that begin with rdma_ say.
func (c *Config) RDMA() rdma.Config { return c.rdmaConfig(nil) }

func (c *Config) rdmaConfig(log *zap.Logger) rdma.Config {
	return rdma.Config{
		Devices: c.RDMADevices, Deny: c.RDMADeny, GIDIndex: c.RDMAGIDIndex, QueuePairs: c.RDMAQPs, SendDepth: c.RDMASendDepth,
		MTU: c.RDMAMTU, Timeout: c.RDMATimeout, Retry: c.RDMARetry, RNRRetry: c.RDMARNRRetry, MinRNRTimer: c.RDMAMinRNRTimer,
		TrafficClass: c.RDMATrafficClass, ServiceLevel: c.RDMAServiceLevel, PKeyIndex: c.RDMAPKeyIndex,
		Idle: time.Duration(c.RDMAIdle), RelaxedOrdering: c.RDMARelaxedOrdering, Fallback: c.Transport == viaAuto,
		MaxTransfers: c.MaxTransfers, ConnectTimeout: time.Duration(c.ConnectTimeout), StallTimeout: time.Duration(c.StallTimeout), Logger: log,
	}
}
