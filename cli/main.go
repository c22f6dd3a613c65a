// Package cli is the kvconn command. cmd/kvconn runs it as a program of its own, and the
// wheel through kvconn_main of libkvconn.so.
package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/kvconn/kvconn/cli/synthetic"
	"github.com/kvconn/kvconn/launch"
	"github.com/kvconn/kvconn/proxy"
)

// command is a command for users. It has flags, but proxy's are proxy.Options.
type command struct {
	name, meaning string
	run           func(ctx context.Context, args []string, out io.Writer) error
	flags         *flag.FlagSet
}

func commands() []command {
	return []command{
		{"demo", "two processes with synthetic paged caches: a first look in seconds", runDemo, demoFlags(new(string))},
		{"bench", "how fast paged blocks move between two processes, bytes verified", runBench, new(benchConfig).flags()},
		{"doctor", "which transports work on this machine, what it has for GPU memory, and the remedy for what is missing", runDoctor, new(doctorOptions).flags()},
		{"proxy", "the router: sends each request to a prefill and a decode server", runProxy, nil},
		{"launch", "vLLM or SGLang servers for prefill and decode on this machine, and the router", runLaunch, new(launchOptions).flags()},
	}
}

func usage() string {
	var b strings.Builder
	b.WriteString("kvconn carries KV caches between LLM engines.\n\nUsage: kvconn COMMAND [OPTIONS]\n\n")
	for _, c := range commands() {
		fmt.Fprintf(&b, "  %-7s %s\n", c.name, c.meaning)
	}
	b.WriteString("\nkvconn COMMAND --help tells the options.\n")
	return b.String()
}

// exit statuses besides 0.
const (
	exitFailed = 1
	exitUsage  = 2
)

// errUsage marks errors of the command line.
var errUsage = errors.New("wrong usage")

// Main runs the command; args[0] is the program's name. SIGINT and SIGTERM end
// it in order, with nothing left behind.
func Main(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends a command that takes its time
	if len(args) < 2 {
		fmt.Fprint(os.Stderr, usage())
		return exitUsage
	}
	var err error
	rest := args[2:]
	switch args[1] {
	case launch.GuardCommand:
		var code int
		code, err = runGuard(rest, os.Stdin)
		if errors.Is(err, launch.ErrLeft) {
			fmt.Fprintln(os.Stderr, err)
		} else if err != nil {
			break
		}
		return code
	case synthetic.PrefillCommand:
		err = synthetic.Serve(ctx, os.Stdin, os.Stdout, newLogger(zap.WarnLevel))
	case "help", "-h", "--help":
		fmt.Print(usage())
	default:
		all := commands()
		i := slices.IndexFunc(all, func(c command) bool { return c.name == args[1] })
		if i < 0 {
			err = fmt.Errorf("%w: there is no command %q", errUsage, args[1])
			break
		}
		err = all[i].run(ctx, rest, os.Stdout)
	}
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return 0
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "kvconn: interrupted")
		return 130
	case errors.Is(err, errUsage):
		fmt.Fprintf(os.Stderr, "kvconn %s: %v\nkvconn --help lists the commands, kvconn COMMAND --help its options\n", args[1], err)
		return exitUsage
	}
	fmt.Fprintf(os.Stderr, "kvconn %s: %v\n", args[1], err)
	return exitFailed
}

func runProxy(ctx context.Context, args []string, out io.Writer) error {
	cfg, err := proxy.ParseArgs(args)
	if errors.Is(err, proxy.ErrHelp) {
		_, err = io.WriteString(out, proxy.Usage())
		return err
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	if os.Getenv("GOGC") == "" {
		// The heap is a few MiB, so by default collections would come many times a second.
		debug.SetGCPercent(400)
	}
	return proxy.Run(ctx, cfg, newLogger(zap.InfoLevel))
}

// newLogger writes readable lines to stderr.
func newLogger(level zapcore.Level) *zap.Logger {
	enc := zap.NewDevelopmentEncoderConfig()
	enc.EncodeTime = zapcore.TimeEncoderOfLayout("15:04:05.000")
	return zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(enc), zapcore.Lock(os.Stderr), level))
}
