// kvconn-rig chaos, and the processes that it starts: their command lines.

package rig

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kvconn/kvconn/node"
	"github.com/kvconn/kvconn/rig/chaos"
)

const (
	// engineCommand runs an engine of chaos: under the driver, or on another host.
	engineCommand = "engine"
	// relayCommand, which is hidden, stands for an engine on another host.
	relayCommand = "__relay"
)

// errChaos: the run took place, and its findings are not as they must be.
var errChaos = errors.New("the run failed, see above")

// runChaos runs real agents under load and faults.
func runChaos(ctx context.Context, args []string, out io.Writer) error {
	opt := chaos.Options{}
	fs := flag.NewFlagSet("kvconn-rig chaos", flag.ContinueOnError)
	fs.SetOutput(os.Stderr)
	fs.IntVar(&opt.Faults, "faults", 0, "how many faults to inject; 500, with --short 40")
	parts := fs.String("parts", "", "only these parts, separated by commas: "+strings.Join(chaos.PartNames(), ", "))
	kinds := fs.String("kinds", "", "only faults whose names begin so, in turn, separated by commas: SIGKILL,SIGSTOP")
	fs.Uint64Var(&opt.Seed, "seed", uint64(time.Now().UnixNano()), "the seed of faults and transfers")
	fs.BoolVar(&opt.Short, "short", false, "a run of a minute")
	fs.BoolVar(&opt.Strict, "strict", false, "fail also for missed goals: a load reported later than 3 s after its P was killed, a transfer that failed for no fault; "+
		"a run that only misses goals is made once more, since other work on the machine may be why")
	fs.StringVar(&opt.Transport, "transport", "tcp", "of the agents: auto, local, rdma or tcp, or several with commas, the preferred one first")
	fs.StringVar(&opt.Memory, "memory", "host", "of the agents: host, or double: devices of the tests' own CUDA driver (KVCONN_LIBCUDA, else that of make gpu-double)")
	fs.IntVar(&opt.Paths, "paths", 0, "how many RDMA paths of this machine --path-command may take off, from 0 on")
	fs.StringVar(&opt.PathCommand, "path-command", "", "a command that takes a path's number and off, mute (packets vanish), thin (large packets vanish), on, or sent, which prints its packets")
	fs.StringVar(&opt.Host, "host", "", "part paths: an address of this machine at which P listens, without faulty ways between")
	decode := fs.String("decode-at", "", "part paths: host and port of D's engine on another machine: kvconn-rig "+engineCommand+" HOST:PORT there")
	asJSON := fs.Bool("json", false, "print JSON")
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	if fs.NArg() > 0 || opt.Faults < 0 {
		return fmt.Errorf("%w: chaos takes no argument, and no negative number of faults", errUsage)
	}
	if _, err := node.Transports(opt.Transport); err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	if !slices.Contains([]string{"host", "double"}, opt.Memory) {
		return fmt.Errorf("%w: memory %q: want host or double", errUsage, opt.Memory)
	}
	if opt.Paths < 0 || opt.Paths > 64 || (opt.Paths > 0) != (opt.PathCommand != "") {
		return fmt.Errorf("%w: --paths takes 1 to 64, and --path-command with it", errUsage)
	}
	if (*decode != "") != (opt.Host != "") {
		return fmt.Errorf("%w: --decode-at and --host go together", errUsage)
	}
	if opt.Faults == 0 {
		opt.Faults = 500
		if opt.Short {
			opt.Faults = 40
		}
	}
	if *parts != "" {
		opt.Parts = strings.Split(*parts, ",")
		for _, p := range opt.Parts {
			if !slices.Contains(chaos.PartNames(), p) {
				return fmt.Errorf("%w: chaos has no part %q", errUsage, p)
			}
		}
	}
	if *kinds != "" {
		opt.Kinds = strings.Split(*kinds, ",")
		for _, k := range opt.Kinds {
			if !chaos.IsKind(k) {
				return fmt.Errorf("%w: chaos has no fault %q", errUsage, k)
			}
		}
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	opt.Self = []string{self, engineCommand}
	if opt.Memory == "double" && os.Getenv("KVCONN_LIBCUDA") == "" {
		library := filepath.Join(filepath.Dir(self), "gpu-double", "libkvgpu-double.so")
		if _, err := os.Stat(library); err != nil {
			return fmt.Errorf("memory double: %w: make gpu-double builds it", err)
		}
		os.Setenv("KVCONN_LIBCUDA", library)
	}
	if *decode != "" {
		opt.Decode = []string{self, relayCommand, *decode}
	}
	opt.Progress = func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, "%s "+format+"\n", append([]any{time.Now().Format("15:04:05")}, args...)...)
	}
	res, err := chaos.Run(ctx, opt)
	if err == nil && opt.Strict && len(res.TooLate) > 0 && len(res.Missed)+len(res.Problems) == 0 {
		late := res.TooLate
		opt.Progress("once more, since this run had times only against it")
		res, err = chaos.Run(ctx, opt)
		for _, l := range late { // scripts/digest.py counts them
			fmt.Fprintf(os.Stderr, "FLAKY in the first run: %s\n", l)
		}
	}
	if err != nil {
		return err
	}
	if *asJSON {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		err = enc.Encode(res)
	} else {
		err = res.Print(out)
	}
	if err == nil && !res.OK {
		err = errChaos
	}
	return err
}

func runEngine(ctx context.Context, args []string) error {
	switch len(args) {
	case 0:
		return chaos.RunEngine(os.Stdin, os.Stdout)
	case 1:
		return chaos.ServeEngine(ctx, args[0])
	}
	return fmt.Errorf("%w: engine takes HOST:PORT at most", errUsage)
}

func runRelay(ctx context.Context, args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("%w: %s takes HOST:PORT", errUsage, relayCommand)
	}
	return chaos.Relay(ctx, args[0], os.Stdin, os.Stdout)
}
