//go:build faults

package driver

// #cgo CFLAGS: -DKVCONN_FAULTS
import "C"
