package cli

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/kvconn/kvconn/internal/chaos"
)

// engineCommand is the hidden command of chaos's processes.
const engineCommand = "__engine"

// relayCommand is that of one that stands for an engine on another host.
const relayCommand = "__relay"

// errChaos: the run was one, and what it found is not as it must be.
var errChaos = errors.New("the run failed, see above")

// runChaos runs real agents under load and faults. It is for kvconn's own
// tests: the usage does not name it.
func runChaos(ctx context.Context, args []string, out io.Writer) error {
	opt := chaos.Options{}
	fs := flag.NewFlagSet("kvconn chaos", flag.ContinueOnError)
	fs.SetOutput(os.Stderr)
	fs.IntVar(&opt.Faults, "faults", 0, "how many faults to inject; 500, with --short 40")
	parts := fs.String("parts", "", "only these parts, separated by commas: "+strings.Join(chaos.PartNames(), ", "))
	fs.Uint64Var(&opt.Seed, "seed", uint64(time.Now().UnixNano()), "what faults and transfers are drawn from")
	fs.BoolVar(&opt.Short, "short", false, "a run of a minute")
	fs.BoolVar(&opt.Strict, "strict", false, "fail also for what was missed: a load reported later than 3 s after its P was killed, a transfer that failed for no fault")
	fs.StringVar(&opt.Transport, "transport", "tcp", "of the agents: auto, rdma or tcp")
	fs.IntVar(&opt.Rails, "rails", 0, "how many RDMA rails of this machine --rail-command may take off, from 0 on")
	fs.StringVar(&opt.RailCommand, "rail-command", "", "a command that takes a rail's number and off, mute (packets vanish), thin (large packets vanish), on, or sent, which prints its packets")
	fs.StringVar(&opt.Host, "host", "", "part rails: an address of this machine at which P listens, without faulty ways between")
	decode := fs.String("decode-at", "", "part rails: host and port of D's engine on another machine: kvconn "+engineCommand+" HOST:PORT there")
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
	if err := checkTransport(opt.Transport); err != nil {
		return err
	}
	if opt.Rails < 0 || opt.Rails > 64 || (opt.Rails > 0) != (opt.RailCommand != "") {
		return fmt.Errorf("%w: --rails takes 1 to 64, and --rail-command with it", errUsage)
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
	self, err := selfCommand()
	if err != nil {
		return err
	}
	opt.Self = append(slices.Clip(self), engineCommand)
	if *decode != "" {
		opt.Decode = append(slices.Clip(self), relayCommand, *decode)
	}
	opt.Progress = func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, "%s "+format+"\n", append([]any{time.Now().Format("15:04:05")}, args...)...)
	}
	res, err := chaos.Run(ctx, opt)
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
