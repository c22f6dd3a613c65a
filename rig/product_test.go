package rig

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/kvconn/kvconn/"

// ofRig says whether a package is the rig's.
func ofRig(path string) bool {
	return path == module+"rig" || strings.HasPrefix(path, module+"rig/") || path == module+"cmd/kvconn-rig"
}

// TestProductHasNoTestRig: the wheel's library and the kvconn command link nothing of the test rig.
func TestProductHasNoTestRig(t *testing.T) {
	linked := 0
	for _, p := range dependencies(t, module+"cmd/kvconn-rig") {
		if ofRig(p) {
			linked++
		}
	}
	if linked < 6 {
		t.Errorf("kvconn-rig links %d packages of the rig: ofRig does not know them", linked)
	}
	for _, product := range []string{"capi", "cmd/kvconn"} {
		have := dependencies(t, module+product)
		if !slices.Contains(have, module+"cli") {
			t.Errorf("%s does not link the command: %d packages", product, len(have))
		}
		for _, p := range have {
			if ofRig(p) || p == "testing" {
				t.Errorf("%s links %s", product, p)
			}
		}
	}
}

// dependencies are the packages that a program links, itself among them.
func dependencies(t *testing.T, program string) []string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", program).Output()
	if err != nil {
		t.Fatalf("go list -deps %s: %v", program, err)
	}
	return strings.Fields(string(out))
}
