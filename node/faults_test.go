//go:build !faults

package node

import (
	"runtime"
	"slices"
	"testing"

	"github.com/kvconn/kvconn/rig/faulttest"
)

// defects are the places of internal/fault in what peers say, each with the test that finds it;
// and two of core, which the fuzz of a hostile prefill engine's answers must find too.
var defects = []faulttest.Defect{
	{"node-from-believed", "TestSeedsOfFuzzServe"},
	{"node-hello-is-use", "TestHellosMakeRoom"},
	{"node-joins-others", "TestSeedsOfFuzzJoin"},
	{"node-peers-first-come", "TestPeersByAccount"},
	{"node-works-uncounted", "TestHellosEndNoWork"},
	{"node-joined-first-come", "TestJoinedRanksOfAnother"},
	{"node-joined-unbounded", "TestJoinedRanksLeaveRoom"},
	{"node-joins-unproved", "TestRanksThatProveASecret"},
	{"node-answers-of-others", "TestSeedsOfFuzzAnswers"},
	{"node-no-ticket", "TestSeedsOfFuzzAnswers"},
	{"node-writes-apart", "TestWritesThatWait"},
	{"waits-for-slow", "TestSeedsOfFuzzAnswers"},
	{"no-fence", "TestSeedsOfFuzzAnswers"},
}

// TestDefects: each defect is found by its test, and the list has all places.
func TestDefects(t *testing.T) {
	ofOthers := []string{"renewed-in-use", "node-load-unchecked", "node-write-unchecked", "node-more-unchecked",
		"node-check-kept", "node-check-few", "node-check-of-earlier-memory", "node-own-fault", "node-report-unfenced", "node-quiet-unasked", "waits-for-slow", "no-fence"} // of the list of package devices, and of core
	faulttest.Run(t, runtime.GOMAXPROCS(0), defects, func(name string) bool { return slices.Contains(ofOthers, name) })
}
