//go:build faults

// A build with the tag faults has them in its C code too.

package driver

// #cgo CFLAGS: -DKVCONN_FAULTS
import "C"
