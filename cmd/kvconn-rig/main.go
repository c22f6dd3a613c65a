// Command kvconn-rig tests and measures kvconn. It is not part of the product.
package main

import (
	"os"

	"github.com/kvconn/kvconn/rig"
)

func main() { os.Exit(rig.Main(os.Args)) }
