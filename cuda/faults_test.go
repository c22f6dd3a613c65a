//go:build !faults

package cuda

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// defects are the places of internal/fault in this room, each with the test that finds it.
var defects = []struct{ name, test, says string }{
	{"gpu-wrong-stream", "TestReadsAfterMoment", "reads were wrong"},
	{"gpu-wrong-stream", "TestWritesAfterMoment", "reads were wrong"},
	{"gpu-report-early", "TestDoneAfterEvent", "reads were wrong"},
	{"gpu-slot-early", "TestSlotAfterCopy", "reads were wrong"},
	{"gpu-slot-turns", "TestSlotTurns", "turns were"},
	{"gpu-buffer-id", "TestCheck", "was not noticed"},
	{"gpu-copies-anew", "TestCopiesStayInTheirMemory", "of a copy that was begun before"},
	{"gpu-copies-anew", "TestPeerReopened", "other memory was read"},
	{"gpu-read-anew", "TestReadWhileItGoes", "was not noticed"},
	{"gpu-capture-mode", "TestCapture", "the engine's capture"},
	{"gpu-capture-mode", "TestCaptureEntries", "the engine's capture"},
	{"gpu-push", "TestMoments", "CUDA_ERROR_INVALID_CONTEXT"},
	{"gpu-pop", "TestThreadAsBefore", "the thread's context was"},
	{"gpu-context-made", "TestNoContext", "nobody makes a context"},
	{"gpu-shared-check", "TestPeerChanges", "was not noticed"},
	{"gpu-shared-check", "TestPeerCounts", "counted loads are wrong"},
	{"gpu-peer-close", "TestPeerCloseWaits", "while a copy used it"},
	{"gpu-kernel-piece", "TestCopies", "have not landed"},
	{"gpu-flush", "TestFlush", "bytes are not there"},
	{"gpu-flush-unbound", "TestFlushThatIsNotAnswered", "no answer came"},
}

// TestDefects: each defect is found by its test. The counts are in the log.
func TestDefects(t *testing.T) {
	library := engine.Library(t)
	program := filepath.Join(t.TempDir(), "cuda.test")
	if out, err := exec.Command("go", "test", "-c", "-tags", "faults", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, d := range defects {
		run := func(fault string) (string, error) {
			c := exec.Command(program, "-test.run", "^"+d.test+"$", "-test.timeout", "120s")
			c.Env = append(os.Environ(), "KVCONN_LIBCUDA="+library, "KVCONN_FAULT="+fault)
			out, err := c.CombinedOutput()
			return string(out), err
		}
		out, err := run(d.name)
		if err == nil || !strings.Contains(out, d.says) {
			t.Errorf("%s does not find %s: %v\n%s", d.test, d.name, err, out)
			continue
		}
		line := regexp.MustCompile(`.*` + regexp.QuoteMeta(d.says) + `.*`).FindString(out)
		t.Logf("%s: %s", d.name, strings.TrimSpace(line))
	}
}

// TestDefectsList: the list has the places in the source, and no other.
func TestDefectsList(t *testing.T) {
	place := regexp.MustCompile(`(?:fault\.(?:On|Pick)|kvg_fault)\("([^"]+)"`)
	found := map[string]bool{}
	for _, pattern := range []string{"*.go", "internal/driver/*.go", "internal/driver/*.c"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasSuffix(f, "_test.go") {
				continue
			}
			for _, m := range place.FindAllSubmatch(text, -1) {
				found[string(m[1])] = true
			}
		}
	}
	for _, d := range defects {
		if !found[d.name] {
			t.Errorf("there is no place for %s", d.name)
		}
	}
	for name := range found {
		if !slices.ContainsFunc(defects, func(d struct{ name, test, says string }) bool { return d.name == name }) {
			t.Errorf("no test finds %s", name)
		}
	}
}
