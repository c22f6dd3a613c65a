package kv

import (
	"testing"

	"github.com/kvconn/kvconn/rig/filedeps"
)

// TestFileDependencies: files use each other without a cycle.
func TestFileDependencies(t *testing.T) {
	filedeps.NoCycles(t, ".")
}
