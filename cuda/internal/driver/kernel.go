// The copy kernel is a part of this library, and the driver compiles it for its device.

package driver

/*
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	_ "embed"
)

// copyKernel is the copy kernel's code, which the driver compiles for its device.
//
//go:embed copy.ptx
var copyKernel string

// NoKernel says why the device has no copy kernel: then the driver's own copies do all. It is nil if the device has one.
func (d *Device) NoKernel() error { return d.noKernel }

func flag(on bool) C.int {
	if on {
		return 1
	}
	return 0
}
