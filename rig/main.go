// Package rig is the kvconn-rig command, which kvconn's own tests and benchmarks need and
// its users do not. Neither the wheel's library nor the kvconn command may link it
// (TestProductHasNoTestRig).
package rig

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/kvconn/kvconn/cli/synthetic"
)

const usage = `kvconn-rig tests and measures kvconn.

Usage: kvconn-rig COMMAND [OPTIONS]

  chaos         real agents under load and faults, every byte and report checked
  engine        D's engine of chaos, for a driver on another machine: kvconn-rig engine HOST:PORT
  bench-agents  what one prefill agent does for a thousand decode agents
  bench-proxy   what the router costs a request, beside another router

kvconn-rig COMMAND --help tells the options.
`

// exit statuses besides 0, as the kvconn command has them.
const (
	exitFailed      = 1
	exitUsage       = 2
	exitInterrupted = 130
)

// errUsage marks errors of the command line.
var errUsage = errors.New("wrong usage")

// Main runs the command; args[0] is the program's name.
func Main(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends a command that takes its time
	if len(args) < 2 {
		fmt.Fprint(os.Stderr, usage)
		return exitUsage
	}
	var err error
	switch command, rest := args[1], args[2:]; command {
	case "chaos":
		err = runChaos(ctx, rest, os.Stdout)
	case engineCommand:
		err = runEngine(ctx, rest)
	case relayCommand:
		err = runRelay(ctx, rest)
	case "bench-agents":
		err = runBenchAgents(ctx, rest, os.Stdout)
	case synthetic.PrefillCommand:
		err = synthetic.Serve(ctx, os.Stdin, os.Stdout, newLogger())
	case "bench-proxy":
		err = runBenchProxy(ctx, rest, os.Stdout)
	case stubsCommand:
		err = runStubs(ctx, rest, os.Stdin, os.Stdout)
	case "help", "-h", "--help":
		fmt.Print(usage)
	default:
		err = fmt.Errorf("%w: there is no command %q", errUsage, command)
	}
	switch {
	case err == nil:
		return 0
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "kvconn-rig: interrupted")
		return exitInterrupted
	}
	fmt.Fprintf(os.Stderr, "kvconn-rig %s: %v\n", args[1], err)
	if errors.Is(err, errUsage) {
		fmt.Fprintln(os.Stderr, "kvconn-rig --help lists the commands, kvconn-rig COMMAND --help its options")
		return exitUsage
	}
	return exitFailed
}

// newLogger writes readable lines to stderr.
func newLogger() *zap.Logger {
	enc := zap.NewDevelopmentEncoderConfig()
	enc.EncodeTime = zapcore.TimeEncoderOfLayout("15:04:05.000")
	return zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(enc), zapcore.Lock(os.Stderr), zap.WarnLevel))
}
