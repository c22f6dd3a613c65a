// Whether two processes of this machine can use local is asked of the kernel, and then tried.

package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/cli/synthetic"
	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/local"
)

// trialBound is how long two processes may take to exchange a block. It ends a hang: an emulated machine beside other work needs 10 s.
const trialBound = 30 * time.Second

// errNoTrial: nothing is known of two processes.
var errNoTrial = errors.New("not tried with a second process")

// examineLocal asks this process what it may do, and then has two processes do it: by reading the other process, and out of a
// mapping.
func examineLocal(ctx context.Context, try func(ctx context.Context, shared bool) error) local.Report {
	r := local.Inspect()
	if r.Available {
		switch err := try(ctx, false); {
		case err == nil:
			r.Tried = true
		case errors.Is(err, errNoTrial):
			r.Untried = err.Error()
			return r
		default:
			r.Available, r.Problem = false, fmt.Sprintf("a second process could not hand a block over to this one: %v", err)
		}
	}
	switch err := try(ctx, true); { // which may go well where a process may not be read
	case err == nil:
		r.Mapped = true
	case errors.Is(err, errNoTrial):
		r.Untried = err.Error()
	case r.Tried:
		r.MappingProblem = err.Error()
	}
	return r
}

// tryLocal has a second process hand a block over to this one, as a prefill engine does. If shared is true the block is in
// memory that this process maps.
func tryLocal(ctx context.Context, shared bool) (err error) {
	ctx, cancel := context.WithTimeout(ctx, trialBound)
	defer cancel()
	peer, err := startPrefill(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", errNoTrial, err)
	}
	defer peer.Stop()
	const id, size = "doctor", 4 << 10
	opened, err := peer.Ask(synthetic.Command{Op: "open", Layers: 1, Blocks: 1, Block: size, Transport: "local", Shared: shared})
	if err != nil {
		return err
	}
	pool, err := synthetic.NewPool(1, 1, size)
	if err != nil {
		return err
	}
	defer pool.Free()
	agent, err := synthetic.OpenDecode(pool, synthetic.Command{Transport: "local"}, zap.NewNop())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, agent.Close()) }()
	if _, err := peer.Ask(synthetic.Command{Op: "offer", ID: id, Transfer: 1, Count: 1}); err != nil {
		return err
	}
	dst := pool.Choose(1, 1, false)
	if _, err := agent.StartLoad([]core.LoadRequest{{ID: id, Selection: kv.Selection{Blocks: [][]kv.BlockID{dst}}, From: core.Target{Bootstrap: opened.Bootstrap, EngineID: opened.EngineID}}}); err != nil {
		return err
	}
	report, err := synthetic.WaitReport(ctx, agent, id)
	if err != nil {
		return err
	}
	if report.Code != core.OK {
		return errors.New(report.Reason)
	}
	if err := pool.Check(1, 0, dst); err != nil {
		return err
	}
	if how := agent.Stats().Pairs[0].How; shared && how != "mapping" {
		return fmt.Errorf("memory that can be mapped has gone by %s", how)
	}
	return nil
}
