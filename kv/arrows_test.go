package kv

import (
	"testing"

	"github.com/kvconn/kvconn/rig/arrows"
)

// TestArrowsPointOneWay: files use each other without a cycle.
func TestArrowsPointOneWay(t *testing.T) {
	arrows.OneWay(t, ".")
}
