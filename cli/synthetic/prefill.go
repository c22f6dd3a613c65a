// The second process has a prefill agent, runs the first one's commands, and answers each.

package synthetic

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/natsbus"
	"github.com/kvconn/kvconn/node"
)

// Command is the first process's message to the second one, the prefill side.
type Command struct {
	Op        string `json:"op"` // open, announce, offer, wait, counters, bare, processor, close
	Layers    int    `json:"layers,omitempty"`
	Blocks    int    `json:"blocks,omitempty"` // of the pool
	Block     int    `json:"block,omitempty"`  // bytes
	Streams   int    `json:"streams,omitempty"`
	Transport string `json:"transport,omitempty"` // as in the configuration; empty for auto
	ID        string `json:"id,omitempty"`
	Parts     int    `json:"parts,omitempty"`    // transfers that the blocks are split into; see IDs. 0 is one
	Transfer  int    `json:"transfer,omitempty"` // names the pattern
	Count     int    `json:"count,omitempty"`    // blocks of the transfer
	Adjacent  bool   `json:"adjacent,omitempty"` // they lie one after the other
	QPs       int    `json:"qps,omitempty"`      // rdma_qps
	Depth     int    `json:"depth,omitempty"`    // rdma_send_depth
	Encrypt   bool   `json:"encrypt,omitempty"`  // tcp_encrypt is always
	Token     string `json:"token,omitempty"`    // nats_token; unless Encrypt is set, tcp_encrypt is never then
	Shared    bool   `json:"shared,omitempty"`   // the pool is in memory that other processes can map
	// Bootstrap is where open is to listen again; any free port without it.
	Bootstrap string `json:"bootstrap,omitempty"`
}

// Answer is the second process's answer to a command.
type Answer struct {
	Error     string `json:"error,omitempty"`
	Bootstrap string `json:"bootstrap,omitempty"`
	EngineID  string `json:"engine_id,omitempty"`
	Code      int    `json:"code,omitempty"`
	Reason    string `json:"reason,omitempty"`

	Counters map[string]uint64 `json:"counters,omitempty"` // of rdma

	// Of open: where the process and its pool's memory are.
	PID  int    `json:"pid,omitempty"`
	Base uint64 `json:"base,omitempty"`

	Port      int           `json:"port,omitempty"`         // of bare
	Processor time.Duration `json:"processor_ns,omitempty"` // of processor: its time so far
}

// Serve is the second process: it runs commands until its input ends.
func Serve(ctx context.Context, in io.Reader, out io.Writer, log *zap.Logger) error {
	p := &prefill{log: log}
	defer p.close()
	enc := json.NewEncoder(out)
	sc := bufio.NewScanner(in)
	for sc.Scan() {
		var o Command
		answer, err := Answer{}, json.Unmarshal(sc.Bytes(), &o)
		if err == nil {
			answer, err = p.run(ctx, o)
		}
		if err != nil {
			answer = Answer{Error: err.Error()}
		}
		if err := enc.Encode(answer); err != nil {
			return err
		}
	}
	return sc.Err()
}

type prefill struct {
	log   *zap.Logger
	agent *node.Agent
	pool  *Pool
	loops sync.WaitGroup // bare loops, which read the pool
}

func (p *prefill) run(ctx context.Context, o Command) (Answer, error) {
	switch o.Op {
	case "open":
		p.close()
		return p.open(o)
	case "announce":
		_, err := p.agent.Announce([]core.TransferID{core.TransferID(o.ID)})
		return Answer{}, err
	case "offer":
		ids := p.pool.Choose(o.Count, int64(o.Transfer), o.Adjacent)
		p.pool.Fill(o.Transfer, ids)
		var offers []core.OfferRequest
		for i, id := range o.IDs() {
			offers = append(offers, core.OfferRequest{ID: id, Selection: o.Part(ids, i)})
		}
		_, err := p.agent.Offer(offers)
		return Answer{}, err
	case "wait":
		r, err := WaitReports(ctx, p.agent, o.IDs())
		return Answer{Code: int(r.Code), Reason: r.Reason}, err
	case "counters":
		return Answer{Counters: p.agent.Stats().Transports["rdma"].Counters}, nil
	case "bare":
		return p.bare(o)
	case "processor":
		used, err := ProcessorTime()
		return Answer{Processor: used}, err
	case "close":
		p.close()
		return Answer{}, nil
	}
	return Answer{}, fmt.Errorf("unknown command %q", o.Op)
}

func (p *prefill) open(o Command) (Answer, error) {
	cfg := node.DefaultConfig()
	cfg.EngineID, cfg.Role = "prefill", node.RolePrefill
	cfg.BootstrapHost, cfg.BootstrapPort, cfg.TCPListenHost = "127.0.0.1", 0, "127.0.0.1"
	o.transport(&cfg)
	if o.Bootstrap != "" {
		at, err := natsbus.ParseAddress(o.Bootstrap)
		if err != nil {
			return Answer{}, err
		}
		_, port, _ := net.SplitHostPort(at.Host)
		if cfg.BootstrapPort, err = strconv.Atoi(port); err != nil {
			return Answer{}, err
		}
	}
	var err error
	if p.pool, err = New(o.Shared, o.Layers, o.Blocks, o.Block); err != nil {
		return Answer{}, err
	}
	if p.agent, err = node.Open(cfg, node.Options{Logger: p.log}); err != nil {
		return Answer{}, err
	}
	if err := p.agent.RegisterKVCaches(p.pool.Regions()); err != nil {
		return Answer{}, err
	}
	return Answer{Bootstrap: p.agent.BootstrapAddress(), EngineID: cfg.EngineID, PID: os.Getpid(), Base: p.pool.Regions()[0].Base}, nil
}

// transport sets the command's transport, its token, and whether it encrypts.
func (o *Command) transport(cfg *node.Config) {
	if o.Transport != "" {
		cfg.Transport = o.Transport
	}
	if o.Streams > 0 {
		cfg.TCPStreams = o.Streams
	}
	if o.Token != "" {
		cfg.NATSToken, cfg.TCPEncrypt = o.Token, "never"
	}
	if o.Encrypt {
		cfg.TCPEncrypt = "always"
	}
	if o.QPs > 0 {
		cfg.RDMAQPs, cfg.RDMASendDepth = o.QPs, o.Depth
	}
}

func (p *prefill) close() {
	if p.agent != nil {
		_ = p.agent.Close()
	}
	p.loops.Wait()
	if p.pool != nil {
		p.pool.Free()
	}
	p.agent, p.pool = nil, nil
}

// IDs names the transfers of a command.
func (o *Command) IDs() []core.TransferID {
	if o.Parts < 2 {
		return []core.TransferID{core.TransferID(o.ID)}
	}
	ids := make([]core.TransferID, o.Parts)
	for i := range ids {
		ids[i] = core.TransferID(fmt.Sprintf("%s-%d", o.ID, i))
	}
	return ids
}

// Part is what transfer i of a command has of the command's blocks.
func (o *Command) Part(ids []kv.BlockID, i int) kv.Selection {
	n := max(1, o.Parts)
	return kv.Selection{Blocks: [][]kv.BlockID{ids[len(ids)*i/n : len(ids)*(i+1)/n]}}
}

// WaitReport waits for one transfer's report; there is no other under way.
func WaitReport(ctx context.Context, a *node.Agent, id core.TransferID) (core.Report, error) {
	return WaitReports(ctx, a, []core.TransferID{id})
}

// WaitReports waits until each of these transfers has its report; there is no other under way. It returns a failed one's, if
// one failed, else the last one's.
func WaitReports(ctx context.Context, a *node.Agent, ids []core.TransferID) (told core.Report, err error) {
	waits := make(map[core.TransferID]bool, len(ids))
	for _, id := range ids {
		waits[id] = true
	}
	t := time.NewTimer(answerTimeout)
	defer t.Stop()
	for {
		select {
		case <-a.Finished():
			for _, r := range a.GetFinished() {
				if !waits[r.ID] {
					continue
				}
				delete(waits, r.ID)
				if told.Code == core.OK {
					told = r
				}
			}
			if len(waits) == 0 {
				return told, nil
			}
		case <-ctx.Done():
			return core.Report{}, ctx.Err()
		case <-t.C:
			for id := range waits {
				return core.Report{}, fmt.Errorf("transfer %q has no report after %v", string(id), answerTimeout)
			}
		}
	}
}

// OpenDecode opens the decode side in this process, by the same command as the prefill side.
func OpenDecode(p *Pool, o Command, log *zap.Logger) (*node.Agent, error) {
	cfg := node.DefaultConfig()
	cfg.EngineID, cfg.Role = "decode", node.RoleDecode
	o.transport(&cfg)
	a, err := node.Open(cfg, node.Options{Logger: log})
	if err != nil {
		return nil, err
	}
	if err := a.RegisterKVCaches(p.Regions()); err != nil {
		_ = a.Close()
		return nil, err
	}
	return a, nil
}
