// kvconn demo carries synthetic caches between two processes, and checks every byte.

package cli

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/cli/synthetic"
	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// The synthetic cache of the demo: 8 layers, blocks of 16 tokens and 32 KiB.
const (
	demoLayers = 8
	demoBlocks = 512
	demoBlock  = 32 << 10
)

func demoFlags(transport *string) *flag.FlagSet {
	fs := newFlags("demo")
	transportFlag(fs, transport)
	return fs
}

// runDemo shows transfers between two processes, each verified byte by byte.
func runDemo(ctx context.Context, args []string, out io.Writer) error {
	var transport string
	if err := parseOnlyFlags(demoFlags(&transport), args); err != nil {
		return err
	}
	if err := checkTransport(transport); err != nil {
		return err
	}
	fmt.Fprintf(out, "Two processes, each with a paged KV cache of %d layers × %d blocks × %s.\n", demoLayers, demoBlocks, formatSize(demoBlock))
	peer, err := startPrefill(ctx)
	if err != nil {
		return err
	}
	defer peer.Stop()
	opened, err := peer.Ask(synthetic.Command{Op: "open", Layers: demoLayers, Blocks: demoBlocks, Block: demoBlock, Transport: transport})
	if err != nil {
		return err
	}
	local, err := synthetic.NewPool(demoLayers, demoBlocks, demoBlock)
	if err != nil {
		return err
	}
	defer local.Free()
	agent, err := synthetic.OpenDecode(local, synthetic.Command{Transport: transport}, newLogger(zap.WarnLevel))
	if err != nil {
		return err
	}
	defer agent.Close()
	fmt.Fprintf(out, "prefill: process %d, bootstrap %s\ndecode:  process %d\n\n", peer.PID(), opened.Bootstrap, os.Getpid())
	fmt.Fprintf(out, "%-44s %7s %9s %9s %9s %8s %-5s %s\n", "request", "blocks", "bytes", "wait ms", "move ms", "GB/s", "by", "bytes")

	steps := []struct {
		what  string
		count int // blocks of the prompt
		skip  int // of which decode has the first ones
		early bool
	}{
		{"prefill first, then decode", 64, 0, false},
		{"decode first, prefill still at work", 64, 0, true},
		{"a long prompt", 256, 0, false},
		{"decode has half of the prompt cached", 128, 64, false},
		{"a short prompt", 1, 0, true},
	}
	from := core.Target{Bootstrap: opened.Bootstrap, EngineID: opened.EngineID}
	for i, s := range steps {
		id := core.TransferID(fmt.Sprintf("demo-%d", i+1))
		dst := local.Scatter(s.count-s.skip, int64(100+i))
		local.Clear()
		offer := func() error {
			_, err := peer.Ask(synthetic.Command{Op: "offer", ID: string(id), Transfer: i + 1, Count: s.count})
			return err
		}
		load := func() error {
			_, err := agent.StartLoad([]core.LoadRequest{{ID: id, From: from, Selection: kv.Selection{First: []uint32{uint32(s.skip)}, Blocks: [][]kv.BlockID{dst}}}})
			return err
		}
		first, second := offer, load
		if s.early {
			first, second = load, offer
		}
		if err := first(); err != nil {
			return err
		}
		if err := second(); err != nil {
			return err
		}
		rep, err := synthetic.WaitReport(ctx, agent, id)
		if err != nil {
			return err
		}
		if rep.Code != core.OK {
			return fmt.Errorf("%s: %s: %s", s.what, rep.Code, rep.Reason)
		}
		if err := local.Check(i+1, s.skip, dst); err != nil {
			return err
		}
		if err := peer.Sent(string(id), 1); err != nil {
			return err
		}
		move := time.Duration(rep.Stats.Nanos)
		fmt.Fprintf(out, "%-44s %7d %9s %9.2f %9.2f %8.2f %-5s verified\n", s.what, rep.Blocks, formatSize(int(rep.Stats.Bytes)),
			rep.Wait.Seconds()*1e3, move.Seconds()*1e3, float64(rep.Stats.Bytes)/move.Seconds()/1e9, rep.Transport)
	}
	fmt.Fprintln(out, "\nEvery byte is where it belongs, and none is anywhere else.")
	return nil
}
