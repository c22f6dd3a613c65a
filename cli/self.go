package cli

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"

	"github.com/kvconn/kvconn/cli/synthetic"
	"github.com/kvconn/kvconn/node"
)

// selfCommand is how this very command was started, without its own arguments:
// the kvconn program, or a Python interpreter with the wheel's script.
func selfCommand() ([]string, error) {
	b, err := os.ReadFile("/proc/self/cmdline")
	if err != nil {
		return nil, err
	}
	parts := bytes.Split(bytes.TrimSuffix(b, []byte{0}), []byte{0})
	for i := 1; i < len(parts); i++ { // from behind the program; its arguments may have such names too
		switch string(parts[i]) {
		case "demo", "bench", "doctor", "launch":
			out := make([]string, i)
			for k := range out {
				out[k] = string(parts[k])
			}
			return out, nil
		}
	}
	return nil, fmt.Errorf("the command line %q does not hold this command", b)
}

// startPrefill starts the second process of demo and bench.
func startPrefill(ctx context.Context) (*synthetic.Process, error) {
	self, err := selfCommand()
	if err != nil {
		return nil, err
	}
	return synthetic.Start(ctx, self)
}

// transportFlag adds --transport.
func transportFlag(fs *flag.FlagSet, name *string) {
	fs.StringVar(name, "transport", node.DefaultConfig().Transport, "auto (the first of local, rdma and tcp that works), or the transports that kvconn may take, with commas, as rdma,tcp: an error if none of them works")
}

func checkTransport(name string) error {
	if _, err := node.Transports(name); err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	return nil
}
