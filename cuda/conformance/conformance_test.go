package conformance

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/cuda/testdouble"
)

var rewrite = flag.Bool("rewrite", false, "write the table of docs/gpu.md anew")

const page = "../../docs/gpu.md"

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

// TestPage holds the table of docs/gpu.md to what the programs say.
func TestPage(t *testing.T) {
	double, err := check(t, testdouble.Library(t, testdouble.Newest))
	if err != nil {
		t.Fatal(err)
	}
	runs := realRuns(t)
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	const begin, end = "<!-- facts: written by go test ./cuda/conformance -rewrite -->\n", "<!-- end of facts -->\n"
	head, rest, found := strings.Cut(string(text), begin)
	_, tail, closed := strings.Cut(rest, end)
	if !found || !closed {
		t.Fatalf("%s has no place for the facts", page)
	}
	want := head + begin + table(double, runs) + end + tail
	if want == string(text) {
		return
	}
	if !*rewrite {
		t.Fatalf("the facts of %s are not what the program says: go test ./cuda/conformance -run TestPage -rewrite", page)
	}
	if err := os.WriteFile(page, []byte(want), 0o666); err != nil {
		t.Fatal(err)
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

func realRuns(t *testing.T) []run {
	t.Helper()
	files, err := filepath.Glob("real/*.json")
	if err != nil {
		t.Fatal(err)
	}
	var runs []run
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var r run
		if err := json.Unmarshal(text, &r); err != nil || r.Double || len(r.Facts) == 0 {
			t.Fatalf("%s is no run against a real driver: %v", file, err)
		}
		runs = append(runs, r)
	}
	return runs
}

func cell(f said) string {
	switch f.Verdict {
	case "holds":
		return "holds"
	case "told":
		return f.Got
	case "not applicable":
		return "not applicable: " + f.Got
	}
	return "**" + f.Got + "**, not " + f.Expected
}

func (r run) hasDevice() bool { return !strings.HasPrefix(r.Device, "none") }

func where(r run) string {
	if r.hasDevice() {
		return r.Device
	}
	return "a driver without a GPU"
}

// table has a line a fact. A fact that no real driver was asked about says so.
func table(double run, runs []run) string {
	var out strings.Builder
	confirmed := 0
	var rows strings.Builder
	for _, f := range double.Facts {
		var real []string
		holds := false
		for _, r := range runs {
			for _, other := range r.Facts {
				if other.Fact == f.Fact {
					if other.Verdict == "not applicable" {
						continue
					}
					real = append(real, fmt.Sprintf("%s (%s, CUDA %d.%d, %s)", cell(other), where(r), r.Driver/1000, r.Driver%1000/10, r.Date))
					holds = holds || r.hasDevice() && (other.Verdict == "holds" || other.Verdict == "told")
				}
			}
		}
		if len(real) == 0 {
			real = []string{"not yet"}
		}
		if holds {
			confirmed++
		}
		fmt.Fprintf(&rows, "| %d | %s | %s | %s | %s |\n", f.Fact, f.Says, f.Expected, cell(f), strings.Join(real, "; "))
	}
	fmt.Fprintf(&out, "\n%d facts; %d of them were confirmed on real hardware.\n\n| | fact | answer | double | real driver |\n|---|---|---|---|---|\n%s\n", len(double.Facts), confirmed, rows.String())
	return out.String()
}
