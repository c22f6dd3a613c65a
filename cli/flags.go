package cli

import (
	"errors"
	"flag"
	"fmt"
	"os"
)

// newFlags returns a set for a command's options.
func newFlags(command string) *flag.FlagSet {
	fs := flag.NewFlagSet("kvconn "+command, flag.ContinueOnError)
	fs.SetOutput(os.Stderr)
	return fs
}

// parseFlags reads a command's options. Its error is flag.ErrHelp or one of usage.
func parseFlags(fs *flag.FlagSet, args []string) error {
	err := fs.Parse(args)
	if err == nil || errors.Is(err, flag.ErrHelp) {
		return err
	}
	return fmt.Errorf("%w: %w", errUsage, err)
}

// parseOnlyFlags reads the options of a command that takes nothing else.
func parseOnlyFlags(fs *flag.FlagSet, args []string) error {
	if err := parseFlags(fs, args); err != nil {
		return err
	}
	if fs.NArg() > 0 {
		return fmt.Errorf("%w: %s takes no argument %q", errUsage, fs.Name(), fs.Arg(0))
	}
	return nil
}
