// kvconn bench measures whole loads between two processes, and checks the bytes of each.

package cli

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/cli/synthetic"
	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/node"
	"github.com/kvconn/kvconn/rdma"
)

// benchLayers is how many regions a transfer is spread over.
const benchLayers = 8

type benchConfig struct {
	blockList string
	blocks    []int // blockList, parsed
	totalSize string
	total     int // totalSize, parsed
	order     string
	rounds    int
	transfers int // of a round, all at once
	streams   int
	json      bool
	iperf     bool
	encrypt   bool
	token     bool

	memory    string // of the prefill process
	transport string // as in the configuration
	qps       int    // rdma_qps
	depth     int    // rdma_send_depth
}

// adjacent: blocks lie one after the other on both sides.
func (c *benchConfig) adjacent() bool { return c.order == "adjacent" }

// shared: the prefill process's memory can be mapped.
func (c *benchConfig) shared() bool { return c.memory == "shared" }

// benchResult is one row; rates are 10⁹ bytes a second.
type benchResult struct {
	Transport  string   `json:"transport"`
	BlockBytes int      `json:"block_bytes"`
	TotalBytes int      `json:"total_bytes"`
	Transfers  int      `json:"transfers"`
	Rounds     int      `json:"rounds"`
	Median     float64  `json:"median_gb_per_s"`
	Best       float64  `json:"best_gb_per_s"`
	Iperf3     *float64 `json:"iperf3_gb_per_s"`
	Encrypted  *float64 `json:"encrypted_median_gb_per_s,omitempty"`
	Token      *float64 `json:"with_token_median_gb_per_s,omitempty"`

	// By tcp: a bare loop of writev and readv over the same blocks in the same run, on --streams connections; the median of
	// the rounds' ratios to it; processor seconds of both sides for 10⁹ bytes.
	Bare     *float64 `json:"bare_loop_gb_per_s,omitempty"`
	BarePart *float64 `json:"ratio_to_bare_loop,omitempty"`
	Used     *float64 `json:"processor_s_per_gb,omitempty"`
	BareUsed *float64 `json:"bare_loop_processor_s_per_gb,omitempty"`

	// By local: how, and of the same blocks in the same run a plain loop of process_vm_readv, and memcpy within
	// this process, all by one thread.
	How          string   `json:"how,omitempty"`
	Loop         *float64 `json:"process_vm_readv_gb_per_s,omitempty"`
	Memcpy       *float64 `json:"memcpy_gb_per_s,omitempty"`
	MemcpyShared *float64 `json:"memcpy_of_shared_memory_gb_per_s,omitempty"`

	// Of all rounds by rdma: how many writes there were for each doorbell, and for each completion that was asked for.
	PerDoorbell float64 `json:"writes_per_doorbell,omitempty"`
	PerSignal   float64 `json:"writes_per_signal,omitempty"`
}

func (c *benchConfig) flags() *flag.FlagSet {
	fs, r := newFlags("bench"), rdma.DefaultConfig()
	fs.StringVar(&c.blockList, "block", "4K,16K,64K,1M", "block sizes, separated by commas")
	fs.StringVar(&c.totalSize, "total", "256M", "bytes of a round")
	fs.IntVar(&c.transfers, "transfers", 1, "loads that the bytes of a round are split into, all started at once")
	transportFlag(fs, &c.transport)
	fs.StringVar(&c.memory, "memory", "ordinary", "the prefill process's memory: ordinary, or shared (by kvconn_alloc), which local maps")
	fs.StringVar(&c.order, "order", "scattered", "how blocks lie on both sides: scattered, or adjacent, so that kvconn merges them")
	fs.IntVar(&c.qps, "rdma-qps", r.QueuePairs, "queue pairs for each pair of ports")
	fs.IntVar(&c.depth, "rdma-send-depth", r.SendDepth, "requests under way on a queue pair")
	fs.IntVar(&c.rounds, "rounds", 9, "rounds per block size; the first one is not counted")
	fs.IntVar(&c.streams, "streams", node.DefaultConfig().TCPStreams, "the most TCP connections: kvconn uses as many as make it faster, the bare loop uses all")
	fs.BoolVar(&c.json, "json", false, "print JSON")
	fs.BoolVar(&c.iperf, "iperf3", true, "measure iperf3 in the same run, if it is installed")
	fs.BoolVar(&c.encrypt, "encrypt", false, "measure each block size with encrypted streams too, in turn with plain ones; then the transport auto means tcp")
	fs.BoolVar(&c.token, "token", false, "measure each block size also between agents that have a token and do not encrypt, in turn with agents that have no token")
	return fs
}

func parseBench(args []string) (benchConfig, error) {
	var c benchConfig
	if err := parseOnlyFlags(c.flags(), args); err != nil {
		return c, err
	}
	if err := checkTransport(c.transport); err != nil {
		return c, err
	}
	if !c.adjacent() && c.order != "scattered" {
		return c, fmt.Errorf("%w: order %q: want scattered or adjacent", errUsage, c.order)
	}
	if !c.shared() && c.memory != "ordinary" {
		return c, fmt.Errorf("%w: memory %q: want ordinary or shared", errUsage, c.memory)
	}
	if c.encrypt && c.transport == "auto" {
		c.transport = "tcp"
	}
	if c.encrypt && c.transport != "tcp" {
		return c, fmt.Errorf("%w: --encrypt with --transport %s, which does not encrypt", errUsage, c.transport)
	}
	if c.rounds < 2 || c.streams < 1 || c.transfers < 1 {
		return c, fmt.Errorf("%w: want at least 2 rounds, 1 stream and 1 transfer", errUsage)
	}
	var err error
	if c.total, err = parseSize(c.totalSize); err != nil {
		return c, err
	}
	for _, s := range strings.Split(c.blockList, ",") {
		n, err := parseSize(s)
		if err != nil {
			return c, err
		}
		if n%8 != 0 || c.total%(n*benchLayers) != 0 || c.total/(n*benchLayers) > kv.MaxBlocks {
			return c, fmt.Errorf("%w: total %s is not 1 to %d times %d blocks of %s", errUsage, c.totalSize, kv.MaxBlocks, benchLayers, s)
		}
		if count := c.total / n / benchLayers; count < c.transfers {
			return c, fmt.Errorf("%w: total %s is %d blocks of %s in each of %d regions, fewer than the %d transfers", errUsage, c.totalSize, count, s, benchLayers, c.transfers)
		}
		c.blocks = append(c.blocks, n)
	}
	return c, nil
}

// runBench measures whole loads, from start_load to the completion. The control plane and
// the check of the plan are included. The bytes are checked after each.
func runBench(ctx context.Context, args []string, out io.Writer) error {
	c, err := parseBench(args)
	if err != nil {
		return err
	}
	peer, err := startPrefill(ctx)
	if err != nil {
		return err
	}
	defer peer.Stop()
	var results []benchResult
	if !c.json {
		fmt.Fprintf(out, "%-9s %8s %8s %14s %12s %14s %7s\n", "transport", "block", "total", "median GB/s", "best GB/s", "iperf3 GB/s", "ratio")
	}
	for _, block := range c.blocks {
		r, err := benchTurns(ctx, c, peer, block)
		if err != nil {
			return fmt.Errorf("blocks of %s: %w", formatSize(block), err)
		}
		results = append(results, r)
		if !c.json {
			iperf, ratio := "-", "-"
			if r.Iperf3 != nil {
				iperf, ratio = fmt.Sprintf("%.2f", *r.Iperf3), fmt.Sprintf("%.2f", r.Median / *r.Iperf3)
			}
			fmt.Fprintf(out, "%-9s %8s %8s %14.2f %12.2f %14s %7s\n", r.Transport, formatSize(block), formatSize(c.total), r.Median, r.Best, iperf, ratio)
			if r.Encrypted != nil {
				fmt.Fprintf(out, "%27s encrypted: median %.2f GB/s, %.2f of plain\n", "", *r.Encrypted, *r.Encrypted/r.Median)
			}
			if r.Token != nil {
				fmt.Fprintf(out, "%27s with a token, not encrypted: median %.2f GB/s, %.2f of plain\n", "", *r.Token, *r.Token/r.Median)
			}
			if r.Loop != nil {
				printBaseline(out, &r)
			}
			if r.Bare != nil {
				printBare(out, &r, c.streams)
			}
			if r.PerSignal > 0 {
				fmt.Fprintf(out, "%27s %.1f writes for each doorbell, %.1f for each completion\n", "", r.PerDoorbell, r.PerSignal)
			}
		}
	}
	if c.json {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		return enc.Encode(map[string]any{"results": results})
	}
	if results[0].Iperf3 == nil && c.iperf && results[0].Transport == "tcp" {
		fmt.Fprintln(out, "iperf3 is not installed: no figure to compare with")
	}
	fmt.Fprintln(out, "every byte of every round was verified, inside the blocks and outside")
	return nil
}

// turns is how often agents take turns that are configured otherwise.
const turns = 3

// secrecy is what the agents of a measurement keep from others.
type secrecy int

const (
	plain secrecy = iota
	encrypted
	withToken // and not encrypted
)

// applyTo sets what a command says of it.
func (s secrecy) applyTo(o *synthetic.Command) {
	o.Encrypt = s == encrypted
	if s == withToken {
		o.Token = "of-kvconn-bench-3f9a61c20d7e4b58"
	}
}

// benchTurns measures one block size, with --encrypt and --token in each way by turns.
func benchTurns(ctx context.Context, c benchConfig, peer *synthetic.Process, block int) (benchResult, error) {
	kinds := []secrecy{plain}
	if c.encrypt {
		kinds = append(kinds, encrypted)
	}
	if c.token {
		kinds = append(kinds, withToken)
	}
	if len(kinds) == 1 {
		return benchOne(ctx, c, peer, block, plain)
	}
	var r benchResult
	medians := map[secrecy][]float64{}
	for range turns {
		for _, kind := range kinds {
			one, err := benchOne(ctx, c, peer, block, kind)
			if err != nil {
				return r, err
			}
			medians[kind] = append(medians[kind], one.Median)
			if kind == plain {
				one.Best = max(one.Best, r.Best)
				r = one
			}
		}
	}
	r.Median, r.Rounds = median(medians[plain]), turns*r.Rounds
	for kind, to := range map[secrecy]**float64{encrypted: &r.Encrypted, withToken: &r.Token} {
		if len(medians[kind]) > 0 {
			m := median(medians[kind])
			*to = &m
		}
	}
	return r, nil
}

func benchOne(ctx context.Context, c benchConfig, peer *synthetic.Process, block int, kind secrecy) (benchResult, error) {
	r := benchResult{BlockBytes: block, TotalBytes: c.total, Transfers: c.transfers, Rounds: c.rounds - 1}
	count := c.total / block / benchLayers
	local, err := synthetic.NewPool(benchLayers, 2*count, block)
	if err != nil {
		return r, err
	}
	defer local.Free()
	open := synthetic.Command{Op: "open", Layers: benchLayers, Blocks: 2 * count, Block: block, Streams: c.streams, Transport: c.transport, QPs: c.qps, Depth: c.depth, Shared: c.shared()}
	kind.applyTo(&open)
	opened, err := peer.Ask(open)
	if err != nil {
		return r, err
	}
	agent, err := synthetic.OpenDecode(local, open, newLogger(zap.WarnLevel))
	if err != nil {
		return r, err
	}
	defer agent.Close()
	var rates, iperf []float64
	var bare tcpBaseline
	baseline := localBaseline{shared: c.shared()}
	defer baseline.free()
	for round := range c.rounds {
		if c.iperf && r.Transport == "tcp" { // which the first round says
			if v, ok := runIperf(ctx); ok {
				iperf = append(iperf, v)
			}
		}
		offer := synthetic.Command{Op: "offer", ID: fmt.Sprintf("bench-%d-%d", block, round), Parts: c.transfers, Transfer: round + 1, Count: count, Adjacent: c.adjacent()}
		local.Clear()
		if _, err := peer.Ask(offer); err != nil {
			return r, err
		}
		dst := local.Choose(count, int64(1000+round), c.adjacent())
		var loads []core.LoadRequest
		for i, id := range offer.IDs() {
			loads = append(loads, core.LoadRequest{ID: id, Selection: offer.Part(dst, i), From: core.Target{Bootstrap: opened.Bootstrap, EngineID: opened.EngineID}})
		}
		var took time.Duration
		var rep core.Report
		err := bare.uses(peer, ofKvconn, c.total, round > 0, func() (err error) {
			start := time.Now()
			if _, err := agent.StartLoad(loads); err != nil {
				return err
			}
			rep, err = synthetic.WaitReports(ctx, agent, offer.IDs())
			took = time.Since(start)
			return err
		})
		if err != nil {
			return r, err
		}
		if rep.Code != core.OK {
			return r, fmt.Errorf("transfer failed (%s): %s", rep.Code, rep.Reason)
		}
		if round > 0 && rep.Transport != r.Transport {
			return r, fmt.Errorf("round %d used transport %s, the rounds before used %s, so they have no common result: name one with --transport", round+1, rep.Transport, r.Transport)
		}
		r.Transport = rep.Transport
		if err := local.Check(round+1, 0, dst); err != nil {
			return r, err
		}
		if err := peer.Sent(offer.ID, c.transfers); err != nil {
			return r, err
		}
		if round > 0 {
			rates = append(rates, float64(c.total)/took.Seconds()/1e9)
		}
		if r.Transport == "tcp" && kind == plain {
			if err := bare.measure(&c, peer, local, round, count, dst); err != nil {
				return r, err
			}
		}
		if r.Transport == "local" {
			if err := baseline.measure(local, opened, local.Choose(count, int64(round+1), c.adjacent()), dst, round > 0); err != nil {
				return r, err
			}
		}
	}
	baseline.medians(&r)
	bare.medians(&r, rates)
	if pairs := agent.Stats().Pairs; len(pairs) == 1 {
		r.How = pairs[0].How
	}
	if r.Transport == "rdma" {
		a, err := peer.Ask(synthetic.Command{Op: "counters"})
		if err != nil {
			return r, err
		}
		writes := float64(a.Counters["writes"])
		r.PerDoorbell, r.PerSignal = writes/float64(max(a.Counters["doorbells"], 1)), writes/float64(max(a.Counters["signals"], 1))
	}
	slices.Sort(rates)
	r.Median, r.Best = median(rates), rates[len(rates)-1]
	if len(iperf) > 0 {
		m := median(iperf)
		r.Iperf3 = &m
	}
	return r, nil
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}
