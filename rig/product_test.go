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

// TestOnlyTestsKnowTheRig: no file of a package outside of the rig imports it, but its tests.
func TestOnlyTestsKnowTheRig(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-f", `{{.ImportPath}} {{join .Imports " "}}`, module+"...").Output()
	if err != nil {
		t.Fatal(err)
	}
	packages := 0
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		packages++
		for _, imported := range f[1:] {
			if ofRig(imported) && !ofRig(f[0]) {
				t.Errorf("%s imports %s", f[0], imported)
			}
		}
	}
	if packages < 40 {
		t.Errorf("go list knows %d packages", packages)
	}
}

// TestImportsPointOneWay: what describes caches knows nothing of transfers, what decides about transfers knows nobody who
// moves bytes or messages, and these know no agent. All may stand on internal/.
func TestImportsPointOneWay(t *testing.T) {
	below := map[string][]string{
		"kv": nil, "wire": nil, "core": {"kv", "wire"}, "bootstrap": nil, "natsbus": {"core", "wire"},
		"cuda": {"core"}, "tcp": {"core", "kv"}, "rdma": {"core", "kv"}, "local": {"core", "cuda", "kv"},
	}
	args := []string{"list", "-f", `{{.ImportPath}} {{join .Imports " "}}`}
	for name := range below {
		args = append(args, module+name)
	}
	out, err := exec.CommandContext(t.Context(), "go", args...).Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		name := strings.TrimPrefix(f[0], module)
		for _, p := range f[1:] {
			of, ours := strings.CutPrefix(p, module)
			if ours && !strings.Contains(of, "internal/") && !slices.Contains(below[name], of) {
				t.Errorf("%s imports %s, but only %v and internal/ stand below it", name, of, below[name])
			}
		}
		for _, p := range below[name] {
			if !slices.Contains(f, module+p) {
				t.Errorf("%s does not import %s: this test knows of more than there is", name, p)
			}
		}
		delete(below, name)
	}
	if len(below) > 0 {
		t.Errorf("go list does not know %v", below)
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
