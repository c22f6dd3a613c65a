package rig

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// The wheel's library and the kvconn command link nothing of the test rig.
func TestProductHasNoTestRig(t *testing.T) {
	const module = "github.com/kvconn/kvconn/"
	// The rig itself is made of these. If one is renamed, the check that the rig links it
	// fails.
	parts := []string{"cuda/testdouble", "cuda/testdouble/engine", "internal/chaos", "internal/faultnet", "internal/rig", "internal/stubengine"}
	// These serve tests only, so that neither program has them.
	helpers := []string{"core/coretest", "core/coretest/sim", "internal/alloctest", "internal/leaktest", "internal/nettest"}
	rig := dependencies(t, module+"cmd/kvconn-rig")
	for _, p := range parts {
		if !slices.Contains(rig, module+p) {
			t.Errorf("kvconn-rig does not link %s: name what it links", p)
		}
	}
	for _, product := range []string{"capi", "cmd/kvconn"} {
		have := dependencies(t, module+product)
		if !slices.Contains(have, module+"cli") {
			t.Errorf("%s does not link the command: %d packages", product, len(have))
		}
		for _, p := range slices.Concat(parts, helpers) {
			if slices.Contains(have, module+p) {
				t.Errorf("%s links %s", product, p)
			}
		}
		if slices.Contains(have, "testing") {
			t.Errorf("%s links testing", product)
		}
	}
	for _, p := range helpers {
		if out, err := exec.CommandContext(t.Context(), "go", "list", module+p).CombinedOutput(); err != nil {
			t.Errorf("there is no package %s: %s", p, out)
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
