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
	{"tcp-revoke-unsure", "../../tcp", "TestCloseFreesARevoke", "the revoke: <nil>"},
	{"node-report-unfenced", "../../node", "TestNoReportIfTheFenceFails", "bytes may land, and"},
	{"node-quiet-unasked", "../../node", "TestCloseWhileACopyMayLand", "the close ends with"},
	{"tcp-end-at-once", "../../tcp", "TestEndOfAFrameWaits", "while a copy used them"},
	{"node-load-unlooked", "../../node", "TestMemoryIsLookedAt", "the transport got [\"load"},
	{"node-write-unlooked", "../../node", "TestMemoryIsLookedAt", "the transport got [\"write"},
	{"node-more-unlooked", "../../node", "TestMemoryIsLookedAt", "the transport got [\"more"},
	{"node-look-kept", "../../node", "TestEachBatchLooks", "the transport got [\"load"},
	{"node-look-few", "../../node", "TestMemoryIsLookedAt", "the transport got [\"write"},
	{"node-look-of-before", "../../node", "TestLookOfBefore", "the cards forget the memory of now"},
	{"node-own-fault", "../../node", "TestOwnMemoryInTheWay", "the load fails with"},
	{"tcp-slot-kept", "../../tcp", "TestSlowPeersStarveNobody", "within 30s"}, // a slot is kept for good, or nobody else gets bytes,
	{"tcp-slot-waits", "../../tcp", "TestNoWaitWithASlot", "a stream waited for a slot while it had one"},
	{"tcp-ahead-elsewhere", "../../tcp", "TestNothingAheadElsewhere", "of another device were copied ahead"},
	{"tcp-devices-mixed", "../../tcp", "TestNothingAheadOfSeveralDevices", "ahead of a frame that lies on two devices"},
	{"tcp-device-kept", "../../tcp", "TestAheadAfterSeveralDevices", "3 copies have begun, want those of two frames"},
	{"tcp-ahead-wide", "../../tcp", "TestCopiesGoOnBeyondAFrame", "[6 0] copies have begun, want [4 0]"},
	{"tcp-ahead-hoarded", "../../tcp", "TestIdleStreamGetsTheFrameAhead", "the frame goes by the stream that is idle"},
	{"tcp-ahead-stuck-on", "../../tcp", "TestAheadMayCopyForEver", "nothing more of the transfer is sent"},
	{"tcp-host-slow", "../../tcp", "TestHostMemoryBeforeAFrameAhead", "the copy at its turn has 65536 bytes"},
	{"tcp-runs-again", "../../tcp", "TestRunsCutAgain", "runs, want"},
	{"tcp-ahead-dead", "../../tcp", "TestStreamOfBeforeGoesOnWithNothing", "i/o timeout"},
	{"tcp-ahead-stopped", "../../tcp", "TestStopAtTheTurnOfAFrameAhead", "want one of"},
	{"tcp-ahead-slow", "../../tcp", "TestSlowPeerGetsOneSlot", "several copies have begun"},
	{"tcp-ahead-kept", "../../tcp", "TestSlowPeerHasNothingAhead", "the frame that was ahead is given back"},
	{"tcp-ahead-lost", "../../tcp", "TestSlowPeerHasNothingAhead", "0 bytes are left of the frame"},
	{"tcp-ahead-unfenced", "../../tcp", "TestStopOfAFrameAhead", "told while a copy may read"},
	{"tcp-ahead-unsealed", "../../tcp", "TestNoSlateForAFrameAhead", "told while a copy may read"},
	{"tcp-ahead-unasked", "../../tcp", "TestStopOfAFrameAhead", "the stream gives the frame back"},
	{"tcp-ahead-stuck", "../../tcp", "TestAheadMayCopyForEver", "its blocks may be read for ever"},
	{"tcp-ahead-unused", "../../tcp", "TestUnusedStreamHasNothingAhead", "by a stream that is not used"},
	{"tcp-ahead-sent", "../../tcp", "TestAckOfAFrameAhead", "an acknowledgement that came too early"},
	{"tcp-ahead-greedy", "../../tcp", "TestWhatIsTakenAhead", "another stream waits: it is taken: true"},
	{"tcp-land-dry", "../../tcp", "TestSealedFramesAreReadWhileCopiesPass", "1 copies have begun, want 4"},
	{"tcp-land-early", "../../tcp", "TestHostAndDeviceInAFrame", "has ended before its copy"},
	{"tcp-land-dry", "../../tcp", "TestNextFramesAreReadWhileCopiesPass", "1 copies have begun, want 4"},
	{"tcp-land-early", "../../tcp", "TestNextFramesAreReadWhileCopiesPass", "0 copies have ended, and"},
	{"tcp-land-part", "../../tcp", "TestPartOfAHeader", "within 30s"},
	{"tcp-land-late", "../../tcp", "TestFramesWithoutASlotLetCopiesEnd", "answer 1 is {kind:4"},
	{"tcp-land-elsewhere", "../../tcp", "TestNothingLandsBehindAnotherDevice", "are copied behind another device's"},
	{"tcp-answer-holds", "../../tcp", "TestAnswersHoldNoCopies", "written while something is copied"},
	{"tcp-answer-sealed-first", "../../tcp", "TestAnswersInTheirOrder", "a wrong tag"},
	{"tcp-answer-again", "../../tcp", "TestNothingBehindPartOfAnAnswer", "another answer was written"},
	{"tcp-answer-each", "../../tcp", "TestAllIsToldBeforeAnAnswer", "no outcome \"received\" 1 of \"t1\""},
	{"tcp-land-again", "../../tcp", "TestAgainBehindCopies", "D opens 2 streams"},
	{"tcp-land-behind", "../../tcp", "TestLongFrameBehindCopies", "read whole before the copy"},
	{"tcp-land-goes-on", "../../tcp", "TestNothingLandsBehindAStuckCopy", "3 copies have begun"},
	{"tcp-land-ready", "../../tcp", "TestSlotOfARevokedTransfer", "by a slot of another one"},
	{"tcp-part-last", "../../tcp", "TestPartOfAFrameIsTheLast", "the part is answered: []"},
	{"tcp-land-unadmitted", "../../tcp", "TestBadFrameBehindCopies", "when 0 copies were waited for"},
	{"tcp-land-left", "../../tcp", "TestBadHeaderBehindCopies", "when 0 copies were waited for"},
	{"tcp-land-fails-first", "../../tcp", "TestCopyFailsBesideOthers", "when 1 copies were waited for"},
	{"tcp-stuck-unsaid", "../../tcp", "TestFailureBesideAStuckCopy", "within 30s"},
	{"tcp-ahead-endless", "../../tcp", "TestWhatIsTakenAhead", "D is to open a stream: it is taken: true"},
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
	for _, room := range []string{".", "../../node", "../../tcp"} {
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
