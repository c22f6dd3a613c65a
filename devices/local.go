// The devices as package local sees them.

package devices

import (
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/local"
)

var _ local.Devices = (*Devices)(nil)

// All implements local.Devices.
func (d *Devices) All() []*cuda.Device { return d.list }
