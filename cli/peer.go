package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/natsbus"
	"github.com/kvconn/kvconn/node"
)

// peerOrder is what demo and bench tell their second process, the prefill side.
type peerOrder struct {
	Op        string `json:"op"` // open, announce, offer, wait, counters, close
	Layers    int    `json:"layers,omitempty"`
	Blocks    int    `json:"blocks,omitempty"` // of the pool
	Block     int    `json:"block,omitempty"`  // bytes
	Streams   int    `json:"streams,omitempty"`
	Transport string `json:"transport,omitempty"` // as in the configuration; empty for auto
	ID        string `json:"id,omitempty"`
	Transfer  int    `json:"transfer,omitempty"` // names the pattern
	Count     int    `json:"count,omitempty"`    // blocks of the transfer
	Adjacent  bool   `json:"adjacent,omitempty"` // they lie one after the other
	QPs       int    `json:"qps,omitempty"`      // rdma_qps
	Depth     int    `json:"depth,omitempty"`    // rdma_send_depth
	// Bootstrap is where open is to listen again; any free port without it.
	Bootstrap string `json:"bootstrap,omitempty"`
}

type peerAnswer struct {
	Error     string `json:"error,omitempty"`
	Bootstrap string `json:"bootstrap,omitempty"`
	EngineID  string `json:"engine_id,omitempty"`
	Code      int    `json:"code,omitempty"`
	Reason    string `json:"reason,omitempty"`

	Counters map[string]uint64 `json:"counters,omitempty"` // of rdma
}

// transportFlag adds --transport.
func transportFlag(fs *flag.FlagSet) *string {
	return fs.String("transport", "auto", "auto (rdma where it works, else tcp), rdma or tcp: that one or none")
}

func checkTransport(name string) error {
	if !slices.Contains([]string{"auto", "rdma", "tcp"}, name) {
		return fmt.Errorf("%w: transport %q: want auto, rdma or tcp", errUsage, name)
	}
	return nil
}

// runPeer obeys orders until its input ends.
func runPeer(ctx context.Context, in io.Reader, out io.Writer) error {
	p := &prefillPeer{}
	defer p.close()
	enc := json.NewEncoder(out)
	sc := bufio.NewScanner(in)
	for sc.Scan() {
		var o peerOrder
		answer, err := peerAnswer{}, json.Unmarshal(sc.Bytes(), &o)
		if err == nil {
			answer, err = p.obey(ctx, o)
		}
		if err != nil {
			answer = peerAnswer{Error: err.Error()}
		}
		if err := enc.Encode(answer); err != nil {
			return err
		}
	}
	return sc.Err()
}

type prefillPeer struct {
	agent *node.Agent
	pool  *pool
}

func (p *prefillPeer) obey(ctx context.Context, o peerOrder) (peerAnswer, error) {
	switch o.Op {
	case "open":
		p.close()
		return p.open(o)
	case "announce":
		_, err := p.agent.Announce([]core.TransferID{core.TransferID(o.ID)})
		return peerAnswer{}, err
	case "offer":
		ids := p.pool.choose(o.Count, int64(o.Transfer), o.Adjacent)
		p.pool.fill(o.Transfer, ids)
		_, err := p.agent.Offer([]core.OfferRequest{{ID: core.TransferID(o.ID), Blocks: [][]core.BlockID{ids}}})
		return peerAnswer{}, err
	case "wait":
		r, err := waitReport(ctx, p.agent, core.TransferID(o.ID))
		return peerAnswer{Code: int(r.Code), Reason: r.Reason}, err
	case "counters":
		return peerAnswer{Counters: p.agent.Stats().Transports["rdma"].Counters}, nil
	case "close":
		p.close()
		return peerAnswer{}, nil
	}
	return peerAnswer{}, fmt.Errorf("unknown order %q", o.Op)
}

func (p *prefillPeer) open(o peerOrder) (peerAnswer, error) {
	cfg := node.DefaultConfig()
	cfg.EngineID, cfg.Role = "prefill", node.RolePrefill
	cfg.BootstrapHost, cfg.BootstrapPort, cfg.TCPListenHost = "127.0.0.1", 0, "127.0.0.1"
	o.transport(&cfg)
	if o.Bootstrap != "" {
		at, err := natsbus.ParseAddress(o.Bootstrap)
		if err != nil {
			return peerAnswer{}, err
		}
		_, port, _ := net.SplitHostPort(at.Host)
		if cfg.BootstrapPort, err = strconv.Atoi(port); err != nil {
			return peerAnswer{}, err
		}
	}
	var err error
	if p.pool, err = newPool(o.Layers, o.Blocks, o.Block); err != nil {
		return peerAnswer{}, err
	}
	if p.agent, err = node.Open(cfg, node.Options{Logger: newLogger(zap.WarnLevel)}); err != nil {
		return peerAnswer{}, err
	}
	if err := p.agent.RegisterKVCaches(p.pool.regions()); err != nil {
		return peerAnswer{}, err
	}
	return peerAnswer{Bootstrap: p.agent.BootstrapAddress(), EngineID: cfg.EngineID}, nil
}

// transport sets what the order says of it.
func (o *peerOrder) transport(cfg *node.Config) {
	if o.Transport != "" {
		cfg.Transport = o.Transport
	}
	if o.QPs > 0 {
		cfg.RDMAQPs, cfg.RDMASendDepth = o.QPs, o.Depth
	}
}

func (p *prefillPeer) close() {
	if p.agent != nil {
		_ = p.agent.Close()
	}
	if p.pool != nil {
		p.pool.free()
	}
	p.agent, p.pool = nil, nil
}

// waitReport waits for one transfer's report; there is no other under way.
func waitReport(ctx context.Context, a *node.Agent, id core.TransferID) (core.Report, error) {
	t := time.NewTimer(peerTimeout)
	defer t.Stop()
	for {
		select {
		case <-a.Finished():
			for _, r := range a.GetFinished() {
				if r.ID == id {
					return r, nil
				}
			}
		case <-ctx.Done():
			return core.Report{}, ctx.Err()
		case <-t.C:
			return core.Report{}, fmt.Errorf("transfer %q has no report after %v", string(id), peerTimeout)
		}
	}
}

// openDecode opens the decode side in this process, as the peer's order says.
func openDecode(p *pool, o peerOrder) (*node.Agent, error) {
	cfg := node.DefaultConfig()
	cfg.EngineID, cfg.Role, cfg.TCPStreams = "decode", node.RoleDecode, o.Streams
	o.transport(&cfg)
	a, err := node.Open(cfg, node.Options{Logger: newLogger(zap.WarnLevel)})
	if err != nil {
		return nil, err
	}
	if err := a.RegisterKVCaches(p.regions()); err != nil {
		_ = a.Close()
		return nil, err
	}
	return a, nil
}
