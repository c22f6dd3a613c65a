//go:build !faults

package devices_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// defects are places of internal/fault without which device memory over tcp is wrong, each with
// the test that finds it. Those that begin with tcp- are all that tcp has for this.
var defects = []struct{ name, room, test, says string }{
	{"offer-at-once", ".", "TestReadAfterMoment", "reads were wrong"},
	{"gpu-wrong-stream", ".", "TestReadAfterMoment", "reads were wrong"},
	{"tcp-send-early", ".", "TestReadAfterMoment", "reads were wrong"},
	{"written-before-its-moment", ".", "TestWrittenAfterMoment", "reads were wrong"},
	{"gpu-wrong-stream", ".", "TestWrittenAfterMoment", "reads were wrong"},
	{"gpu-report-early", ".", "TestReportAfterCopy", "reads were wrong"},
	{"tcp-report-early", ".", "TestReportAfterCopy", "reads were wrong"},
	{"tcp-revoke-at-once", ".", "TestCancelWaits", "reads were wrong"},
	{"tcp-stop-at-once", ".", "TestWithdrawWaits", "were still read"},
	{"tcp-host-pointer", ".", "TestReportAfterCopy", "not readable"},
	{"driver-unasked", ".", "TestNoDeviceNoDriver", "the driver was opened"},
	{"gpu-buffer-id", ".", "TestRemapped", "was not noticed"},
	{"gpu-buffer-id", ".", "TestFreed", "was not noticed"},
	{"renewed-in-use", ".", "TestNewMemoryWaits", "a load was begun beside one of before"},
	{"tcp-revoke-unsure", "../tcp", "TestCloseFreesARevoke", "the revoke: <nil>"},
	{"tcp-waits-for-lost", "../tcp", "TestNoStreamWaitsForALostCopy", "a stream waits for a copy"},
	{"node-report-unfenced", "../node", "TestNoReportIfTheFenceFails", "bytes may land, and"},
	{"node-quiet-unasked", "../node", "TestCloseWhileACopyMayLand", "the close ends with"},
	{"tcp-end-at-once", "../tcp", "TestEndOfAFrameWaits", "while a copy used them"},
	{"node-load-unchecked", "../node", "TestMemoryIsChecked", "the transport got [\"load"},
	{"node-write-unchecked", "../node", "TestMemoryIsChecked", "the transport got [\"write"},
	{"node-more-unchecked", "../node", "TestMemoryIsChecked", "the transport got [\"more"},
	{"node-check-kept", "../node", "TestEachBatchIsChecked", "the transport got [\"load"},
	{"node-check-few", "../node", "TestMemoryIsChecked", "the transport got [\"write"},
	{"node-check-of-earlier-memory", "../node", "TestCheckOfEarlierMemory", "the cards forget the memory of now"},
	{"node-own-fault", "../node", "TestOwnMemoryPreventsLoad", "the load fails with"},
	{"tcp-send-early", "../tcp/conformance", "TestDeviceThatHalts", "bytes were sent before they were copied"},
	{"tcp-report-early", "../tcp/conformance", "TestDeviceThatHalts", "was reported before its bytes were copied"},
	{"tcp-revoke-at-once", "../tcp/conformance", "TestDeviceThatHalts", "Revoke returned while bytes are copied"},
	{"tcp-stop-at-once", "../tcp/conformance", "TestDeviceThatHalts", "the end was told while the blocks are copied from"},
	{"gpu-slot-turns", "../tcp/conformance", "TestOnePeerOfManyStreams", "while the honest peer waited"},
	{"tcp-stop-unbound", "../tcp", "TestStopOfASlowFrame", "the write is not told"},
	{"tcp-frame-dry", "../tcp", "TestNextFrameIsCopied", "the copies of the frame that follows begin"},
	{"tcp-frame-waits", "../tcp", "TestNextFrameWhileCopying", "copies go on while the next frame is read"},
	{"tcp-slot-kept", "../tcp", "TestSlowPeersStarveNobody", "within 30s"}, // a slot is kept for good, or nobody else gets bytes,
}

// TestDefects: each defect is found by its test. The counts are in the log.
func TestDefects(t *testing.T) {
	library := engine.Library(t)
	dir, programs := t.TempDir(), map[string]string{}
	for i, d := range defects {
		if programs[d.room] == "" {
			program := filepath.Join(dir, fmt.Sprint(i, ".test"))
			if out, err := exec.Command("go", "test", "-c", "-tags", "faults", "-o", program, d.room).CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			programs[d.room] = program
		}
		t.Run(d.name+" "+d.test, func(t *testing.T) {
			t.Parallel()
			c := exec.Command(programs[d.room], "-test.run", "^"+d.test+"$", "-test.timeout", "120s")
			c.Dir = d.room
			c.Env = append(os.Environ(), "KVCONN_LIBCUDA="+library, "KVCONN_FAULT="+d.name)
			out, err := c.CombinedOutput()
			if err == nil || !strings.Contains(string(out), d.says) {
				t.Fatalf("it is not found: %v\n%s", err, out)
			}
			t.Log(strings.TrimSpace(regexp.MustCompile(`.*` + regexp.QuoteMeta(d.says) + `.*`).FindString(string(out))))
		})
	}
}

// TestDefectsList: the list has the places in tcp, and no other of its names.
func TestDefectsList(t *testing.T) {
	place := regexp.MustCompile(`fault\.On\("([^"]+)"\)`)
	var found []string
	for _, room := range []string{".", "../node", "../tcp"} {
		files, err := filepath.Glob(filepath.Join(room, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range place.FindAllSubmatch(text, -1) {
				found = append(found, string(m[1]))
			}
		}
	}
	for _, name := range found {
		if strings.HasPrefix(name, "seal-") || strings.HasPrefix(name, "stream-") || strings.HasPrefix(name, "node-") { // tcp and node have lists of their own
			continue
		}
		if !slices.ContainsFunc(defects, func(d struct{ name, room, test, says string }) bool { return d.name == name }) {
			t.Errorf("no test finds %s", name)
		}
	}
	for _, d := range defects {
		if strings.HasPrefix(d.name, "tcp-") && !slices.Contains(found, d.name) {
			t.Errorf("there is no place for %s", d.name)
		}
	}
}
