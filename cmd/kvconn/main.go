// Command kvconn carries the tools of operators: kvconn --help lists them.
package main

import (
	"os"

	"github.com/kvconn/kvconn/cli"
)

func main() { os.Exit(cli.Main(os.Args)) }
