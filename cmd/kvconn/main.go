// Command kvconn carries the operator's tools: demo, bench and proxy.
package main

import (
	"os"

	"github.com/kvconn/kvconn/cli"
)

func main() { os.Exit(cli.Main(os.Args)) }
