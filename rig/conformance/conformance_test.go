package conformance

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rig/testdouble"
)

type said struct {
	Fact                         int
	Says, Expected, Got, Verdict string
}

type run struct {
	Library string
	Double  bool
	Driver  int
	Date    string
	Device  string
	Lacks   []string
	Facts   []said

	transfers *transfers // of the kit, as are one and suite
	one       *transfers // with one connection of the device
	suite     *suite
}

// check runs the program against a library. With an environment that makes the library lie, it must notice.
func check(t *testing.T, library string, env ...string) (run, error) {
	t.Helper()
	return checkWith(t, filepath.Dir(library), library, env...)
}

func checkWith(t *testing.T, programs, library string, env ...string) (run, error) {
	t.Helper()
	command := exec.CommandContext(t.Context(), filepath.Join(programs, "kvgpu-facts"), "--library", library)
	command.Env = append(os.Environ(), env...)
	var messages bytes.Buffer
	command.Stderr = &messages
	out, err := command.Output()
	var r run
	if bad := json.Unmarshal(out, &r); bad != nil {
		t.Fatalf("%v: %v\n%s%s", err, bad, out, messages.Bytes())
	}
	return r, err
}

func differing(r run) []string {
	var out []string
	for _, f := range r.Facts {
		if f.Verdict == "differs" {
			out = append(out, fmt.Sprintf("%d: %s: %s, not %s", f.Fact, f.Says, f.Got, f.Expected))
		}
	}
	return out
}

func TestDouble(t *testing.T) {
	count := 0
	for _, kind := range []testdouble.Kind{testdouble.Newest, testdouble.CUDA12, testdouble.Old} {
		r, err := check(t, testdouble.Library(t, kind))
		if bad := differing(r); err != nil || len(bad) != 0 || !r.Double {
			t.Errorf("%s: %v\n%s", kind, err, strings.Join(bad, "\n"))
		}
		if kind == testdouble.Newest {
			count = len(r.Facts)
		}
		seen := map[int]bool{}
		for _, f := range r.Facts {
			if seen[f.Fact] {
				t.Errorf("%s: the number %d stands for two facts", kind, f.Fact)
			}
			seen[f.Fact] = true
		}
	}
	if count < 250 {
		t.Errorf("only %d facts were checked", count)
	}
}

// A driver that behaves otherwise is noticed, and so is a group that does not end.
func TestDifference(t *testing.T) {
	library := testdouble.Library(t, testdouble.Newest)
	r, err := check(t, library, "KVGPU_FAIL=cuMemcpyDtoDAsync_v2:1:719")
	if err == nil || len(differing(r)) == 0 {
		t.Error("a copy that failed was not noticed")
	}
	r, err = check(t, library, "KVGPU_FAIL=cuStreamCreate:1:2")
	var ended *exec.ExitError
	if !errors.As(err, &ended) || ended.ExitCode() != 1 {
		t.Errorf("groups without a stream ended with %v, after %d facts", err, len(r.Facts))
	}
}

// TestRealDriver checks on a real driver, on a machine without a GPU, what can be checked there, and that the old double lacks the same calls.
func TestRealDriver(t *testing.T) {
	script := exec.CommandContext(t.Context(), "../../scripts/gpu-real-driver.sh")
	var messages bytes.Buffer
	script.Stderr = &messages
	out, err := script.Output()
	var ended *exec.ExitError
	if errors.As(err, &ended) && ended.ExitCode() == 75 {
		t.Skipf("NOT RUN: there is no real driver:\n%s", messages.Bytes())
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, messages.Bytes())
	}
	if _, err := os.Stat("/proc/driver/nvidia"); err == nil {
		t.Skip("NOT RUN: this machine has NVIDIA's kernel modules, and the library may be of another version")
	}
	old, err := check(t, testdouble.Library(t, testdouble.Old))
	if err != nil {
		t.Fatal(err)
	}
	const left = "/dev/nvidiactl" // cuInit makes it, when root
	if _, err := os.Lstat(left); errors.Is(err, os.ErrNotExist) {
		defer os.Remove(left)
	}
	library := testdouble.Library(t, testdouble.Newest)
	r, err := checkWith(t, filepath.Dir(library), strings.TrimSpace(string(out)))
	if bad := differing(r); err != nil || len(bad) != 0 || r.Double || len(r.Facts) < 15 {
		t.Errorf("%d facts, %v\n%s", len(r.Facts), err, strings.Join(bad, "\n"))
	}
	if !slices.Equal(r.Lacks, old.Lacks) {
		t.Errorf("the driver lacks %v, the old double %v", r.Lacks, old.Lacks)
	}
}

// TestKit packs the kit, which tries itself on the double.
func TestKit(t *testing.T) {
	testdouble.Library(t, testdouble.Newest)
	if out, err := exec.CommandContext(t.Context(), "../../scripts/gpu-kit.sh").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	out, err := exec.CommandContext(t.Context(), "tar", "-tzf", "../../build/kvconn-gpu-kit.tar.gz").Output()
	for _, file := range []string{"run", "README", "needs", "licenses/go/LICENSE", "kvconn", "kvgpu-facts", "kvgpu-suite", "transfers.py", "caches.py", "environment.py", "offers.py", "steps.py", "python/kvconn/__init__.py", "python/kvconn/libkvconn.so", "commit"} {
		if err != nil || !strings.Contains(string(out), "kvconn-gpu-kit/"+file+"\n") {
			t.Errorf("%v, no %s in the kit:\n%s", err, file, out)
		}
	}
}
