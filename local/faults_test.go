//go:build !faults

package local

import (
	"testing"

	"github.com/kvconn/kvconn/rig/faulttest"
)

// defects are the places of internal/fault in this package, each with the test that finds it.
var defects = []faulttest.Defect{
	{"local-unasked", "TestNotKept"},
	{"local-unlooked", "TestReadTooLate"},
	{"local-late-link", "TestLinkAtTheLastMoment"},
	{"local-unwatched-look", "TestHungClose"},
	{"local-anywhere", "TestBadRuns"},
	{"local-unsealed", "TestBadFiles"},
	{"local-always-kept", "TestStoppedBeforeDone"},
	{"local-device-early", "TestDeviceFence"},
	{"local-device-early", "TestDeviceThatHalts"},
	{"local-all-stuck", "TestDeviceNeverHad"},
	{"local-none-stuck", "TestDeviceStuck"},
	{"local-uncounted", "TestYama"},
	{"local-anew-always", "TestAlwaysAnew"},
	{"local-proved-pending", "TestProvedAmongPending"},
	{"local-owners-alike", "TestPendingOfAnother"},
	{"local-shared-before", "TestDeviceRemapped"},
	{"local-kept-open", "TestDeviceDismissed"},
	{"local-keeps-dead", "TestDeviceMemoryOfTheDead"},
	{"local-keeps-dead", "TestDeviceMemoryOfTheClosed"},
	{"local-keeps-dead", "TestProcesses/device/sender_killed"},
	{"local-any-taken", "TestTakenUnasked"},
	{"local-page-left-valid", "TestSilentDecode"},
	{"local-page-not-first", "TestInvalidatedPage"},
	{"local-patient", "TestMuteDecode"},
	{"local-any-user", "TestOtherUser"},
	{"local-any-place", "TestElsewhere"},
	{"local-unproved-decode", "TestUnauthenticated"},
	{"local-unproved-prefill", "TestImpostor"},
	{"local-unread", "TestUnauthenticated"},
	{"local-unprobed", "TestFilter"},
	{"local-unprobed-pidfd", "TestFilter"},
	{"local-unwatched-prefill", "TestPrefillEndsInMeeting"},
	{"local-unwatched-decode", "TestDecodeEndsInMeeting"},
	{"local-unwatched-decode", "TestDecodeEndsInWrite"},
	{"local-stream-batch", "TestPastCaches"},
	{"local-stream-uncounted", "TestPastCaches"},
	{"local-unlooked-end", "TestEndBehindTheProof"},
	{"local-let-the-dead", "TestDeadIsNotLet"},
	{"local-number-alone", "TestNumberOfTheDead"},
	{"local-unfenced", "TestFence"},
	{"local-unfenced", "TestDeviceThatHalts"},
	{"local-revoke-unsure", "TestDeviceStuck"},
	{"local-buried-alive", "TestStoppedInRevoke"},
	{"local-restless-prefill", "TestIdle"},
	{"local-restless-decode", "TestIdle"},
	{"local-rest-counts", "TestTimeAtRest"},
}

// TestDefects: each defect is found by its test, and the list has all places.
func TestDefects(t *testing.T) {
	faulttest.Run(t, 8, defects, nil)
}
