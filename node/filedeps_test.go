package node

import (
	"testing"

	"github.com/kvconn/kvconn/rig/filedeps"
)

// TestFileDependencies: files use each other without a cycle. agent.go puts the parts
// together, and only the engine's calls stand above it, of which Close has a file of its own.
func TestFileDependencies(t *testing.T) {
	uses := filedeps.NoCycles(t, ".")
	for file, used := range uses {
		if used["agent.go"] && file != "calls.go" && file != "close.go" {
			t.Errorf("%s knows the agent", file)
		}
	}
	if len(uses["calls.go"]) == 0 || !uses["agent.go"]["lockedmachine.go"] {
		t.Errorf("the files' uses are not known: %v", uses)
	}
}
