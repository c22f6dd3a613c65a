// kvconn-rig bench-agents: what one prefill agent does for a thousand decode agents.

package rig

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/cli/synthetic"
	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/sleep"
	"github.com/kvconn/kvconn/natsbus"
	"github.com/kvconn/kvconn/wire"
)

const (
	maxAgents   = 3000             // a prefill agent takes 4096 connections
	agentsBound = 60 * time.Second // of each step
	heartbeats  = 10               // rounds, of which the mean is told
	spareFiles  = 256              // descriptors that a process needs besides its connections
)

// runBenchAgents measures the work of one prefill agent for many decode agents. The decode
// agents are buses with a connection each, in this process. The prefill agent is a whole
// one, in the other process.
func runBenchAgents(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("kvconn-rig bench-agents", flag.ContinueOnError)
	fs.SetOutput(os.Stderr)
	count := fs.Int("agents", 1000, "how many decode agents")
	if err := fs.Parse(args); errors.Is(err, flag.ErrHelp) {
		return nil
	} else if err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	agents := *count
	if fs.NArg() > 0 || agents < 1 || agents > maxAgents {
		return fmt.Errorf("%w: bench-agents takes --agents with a number from 1 to %d, and nothing else", errUsage, maxAgents)
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("the limit of open files: %w", err)
	}
	if need := uint64(agents + spareFiles); limit.Cur < need {
		return fmt.Errorf("%d agents need %d open files in each of two processes, the limit is %d: raise it with ulimit -n %d", agents, need, limit.Cur, need)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	peer, err := synthetic.Start(ctx, []string{self})
	if err != nil {
		return err
	}
	defer peer.Stop()
	order := synthetic.Command{Op: "open", Layers: 1, Blocks: 16, Block: 4096}
	opened, err := peer.Ask(order)
	if err != nil {
		return err
	}
	swarm := make([]*decodeBus, agents)
	defer func() {
		_ = each(swarm, func(d *decodeBus) error {
			if d == nil {
				return nil
			}
			bounded, cancel := context.WithTimeout(context.Background(), agentsBound)
			defer cancel()
			return d.bus.Close(bounded)
		})
	}()
	for i := range swarm {
		if swarm[i], err = newDecodeBus(i, opened); err != nil {
			return err
		}
	}

	fmt.Fprintf(out, "%-64s %12s %14s\n", fmt.Sprintf("%d decode agents, one prefill agent", agents), "seconds", "P's CPU, s")
	step := func(what string, rounds int, f func() error) error {
		before, err := cpuTime(peer.PID())
		if err != nil {
			return err
		}
		begin := time.Now()
		for range rounds {
			if err := f(); err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
		}
		took := time.Since(begin).Seconds() / float64(rounds)
		after, err := cpuTime(peer.PID())
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "%-64s %12.3f %14.3f\n", what, took, (after-before).Seconds()/float64(rounds))
		return nil
	}
	if err := step("all connect at once, look up and say hello", 1, func() error {
		return each(swarm, func(d *decodeBus) error { return d.meet(ctx, "") })
	}); err != nil {
		return err
	}
	if err := step(fmt.Sprintf("a round of heartbeats, all at once (mean of %d)", heartbeats), heartbeats, func() error {
		return each(swarm, func(d *decodeBus) error { return d.renew(ctx) })
	}); err != nil {
		return err
	}
	order.Bootstrap = opened.Bootstrap
	var again time.Duration
	err = step("restart of P on its port, until all have found it again", 1, func() error {
		begin, reopened := time.Now(), make(chan error, 1)
		go func() {
			_, err := peer.Ask(order)
			again = time.Since(begin)
			reopened <- err
		}()
		err := each(swarm, func(d *decodeBus) error { return d.meet(ctx, d.agent) })
		return errors.Join(<-reopened, err)
	})
	if err == nil {
		fmt.Fprintf(out, "%-64s %12.3f\n", "  of which until P itself was registered again", again.Seconds())
	}
	return err
}

// decodeBus is the control plane of a decode agent.
type decodeBus struct {
	bus    *natsbus.Bus
	self   *wire.Agent
	target core.Target
	via    core.Via
	agent  core.AgentID // the prefill agent that it met last
}

func newDecodeBus(i int, opened synthetic.Answer) (*decodeBus, error) {
	d := &decodeBus{target: core.Target{Bootstrap: opened.Bootstrap, EngineID: opened.EngineID},
		self: &wire.Agent{Version: wire.Version, ID: fmt.Sprint("bench-", i), EngineID: fmt.Sprint("decode-", i), Endpoints: []wire.Endpoint{{Transport: "tcp"}},
			Shapes: []wire.Shape{{Name: "layer.0", BlockStride: 4096, BlockBytes: 4096, NumBlocks: 16}}}}
	var err error
	d.bus, err = natsbus.Open(natsbus.Options{Identity: natsbus.NewIdentity(), ConnectTimeout: agentsBound})
	if err != nil {
		return nil, err
	}
	d.bus.Serve(func(core.Via, *wire.Request) *wire.Reply { return &wire.Reply{} })
	return d, nil
}

// meet looks the prefill agent up and says hello to it, until it finds another agent than
// the old one.
func (d *decodeBus) meet(ctx context.Context, old core.AgentID) error {
	ctx, cancel := context.WithTimeout(ctx, agentsBound)
	defer cancel()
	for {
		info, via, err := d.bus.Lookup(ctx, d.target)
		if err == nil && core.AgentID(info.ID) != old {
			var rep *wire.Reply
			if rep, err = d.bus.Request(ctx, via, core.AgentID(info.ID), &wire.Request{Kind: wire.KindHello, Hello: d.self}); err == nil {
				if rep.Code != 0 {
					return fmt.Errorf("hello of %s is refused: %s", d.self.ID, rep.Reason)
				}
				d.via, d.agent = via, core.AgentID(info.ID)
				return nil
			}
		}
		if old == "" && err != nil {
			return fmt.Errorf("%s: %w", d.self.ID, err)
		}
		if late := sleep.For(ctx, 100*time.Millisecond); late != nil { // as often as a decode agent's look-up
			return fmt.Errorf("%s does not find the restarted agent: %w", d.self.ID, cmp.Or(err, late))
		}
	}
}

// renew is the message that a decode agent sends once a second while it has
// transfers under way.
func (d *decodeBus) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, agentsBound)
	defer cancel()
	rep, err := d.bus.Request(ctx, d.via, d.agent, &wire.Request{Kind: wire.KindRenew, From: d.self.ID,
		Renew: &wire.Renew{Loads: []string{"bench"}}})
	if err == nil && rep.Code != 0 {
		err = errors.New(rep.Reason)
	}
	return err
}

// each calls f for all at once. It returns the first error, with the number of errors.
func each(swarm []*decodeBus, f func(*decodeBus) error) error {
	var wg sync.WaitGroup
	errs := make(chan error, len(swarm))
	for _, d := range swarm {
		wg.Go(func() {
			if err := f(d); err != nil {
				errs <- err
			}
		})
	}
	wg.Wait()
	close(errs)
	if n := len(errs); n > 0 {
		return fmt.Errorf("%d of %d failed, one with: %w", n, len(swarm), <-errs)
	}
	return nil
}
