package local

import (
	"testing"

	"github.com/kvconn/kvconn/core"
)

// TestConfigDefaults: a Config that sets nothing has the bounds of core.
func TestConfigDefaults(t *testing.T) {
	c := (Config{}).withDefaults()
	if c.StallTimeout != core.DefaultStallTimeout || c.ConnectTimeout != core.DefaultConnectTimeout {
		t.Errorf("the stall timeout is %s, ConnectTimeout is %s, want %s and %s", c.StallTimeout, c.ConnectTimeout, core.DefaultStallTimeout, core.DefaultConnectTimeout)
	}
}
