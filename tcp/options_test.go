package tcp

import (
	"testing"

	"github.com/kvconn/kvconn/core"
)

// TestConfigDefaults: a Config that sets nothing has the bounds of core.
func TestConfigDefaults(t *testing.T) {
	c := (Config{}).withDefaults()
	if c.StallTimeout != core.DefaultStallTimeout || c.DialTimeout != core.DefaultConnectTimeout {
		t.Errorf("the stall timeout is %s, DialTimeout is %s, want %s and %s", c.StallTimeout, c.DialTimeout, core.DefaultStallTimeout, core.DefaultConnectTimeout)
	}
	if c := (Config{Streams: 1}).withDefaults(); c.First != 1 {
		t.Errorf("%d of %d streams are opened at first", c.First, c.Streams)
	}
}
