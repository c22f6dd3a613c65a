// Which tests of the double no real driver can run, and why.

package main

// doubleOnly are tests of kvconn's sources that no real driver can run, by file, and what they need of the double.
type doubleOnly struct {
	File  string   `json:"file"`
	Needs string   `json:"needs"`
	Tests []string `json:"tests"`
}

// onTheDouble is told in the JSON. A test holds it to the sources.
var onTheDouble = []doubleOnly{
	{"tcp/conformance/conformance_test.go", "memory that the suite sees although the process that has it was stopped or killed", []string{"TestProcesses/device"}},
	{"devices/races_test.go", "streams that are late as a seed says, and a look at memory that waits for none of them", []string{
		"TestReadAfterMoment", "TestWrittenAfterMoment", "TestReportAfterCopy", "TestCancelWaits", "TestWithdrawWaits"}},
	{"devices/failures_test.go", "a device that is lost, stuck, or fails at a given operation", []string{
		"TestDeviceLost", "TestCloseWhileCopying", "TestCloseOfAStuckDevice", "TestCloseOfTwoStuckDevices", "TestDevicesCloseSideBySide", "TestNoDeviceNoDriver", "TestDrivers"}},
	{"devices/sleep_test.go", "a count of what is still queued, and a look at memory that waits for none of it", []string{"TestFreed", "TestRemapped", "TestNewMemoryWaits"}},
	{"devices/defects_test.go", "defects of kvconn, each found because the double is late", []string{"TestDefects"}},
	{"cuda/race_test.go", "streams that are held and late as a seed says", []string{
		"TestReadsAfterMoment", "TestWritesAfterMoment", "TestDoneAfterEvent", "TestSlotAfterCopy"}},
	{"cuda/failure_test.go", "calls and operations that fail as they are told", []string{
		"TestStuck", "TestLostEvent", "TestLostEventOfAPeer", "TestStuckAfterAFailure", "TestPauseIsNoStall",
		"TestSticky", "TestLateFailure", "TestFailedCopy"}},
	{"cuda/closing_test.go", "streams and operations that are held until the test lets them go", []string{
		"TestClosingBounds", "TestCloseBesideACall", "TestCloseEndsCopies", "TestBegunAfterClose", "TestCloseWhileCopying", "TestCloseBound", "TestCloseWhenNothingIsTakenBack",
		"TestCloseBesideAMoment", "TestFlushOfAStuckDevice", "TestFlushThatIsNotAnswered", "TestFlushBesideClosing", "TestFlushAcrossHalfway",
		"TestFlushOfAStoppedProcess"}},
	{"rdma/gpu_moving_test.go", "writes of a card that are seen late", []string{"TestGPUParts", "TestGPUFlush", "TestGPURevoke"}},
	{"rdma/gpu_mapped_test.go", "a look at memory from the card's side too", []string{"TestGPUMapped"}},
	{"rdma/gpu_sleep_test.go", "a look at memory that was mapped anew, and cards that refuse it as they are told", []string{"TestGPULookBeforeTheEnd", "TestGPURenewed", "TestGPURenewedAtP"}},
	{"rdma/gpu_agents_test.go", "a look at memory that was mapped anew, and cards that refuse it as they are told", []string{"TestGPUSleep", "TestGPUSleepForced", "TestGPUMoments"}},
	{"rdma/gpu_halted_test.go", "streams and flushes that are held until the test lets them go", []string{
		"TestGPUThatHalts", "TestGPURevokeWaits", "TestGPUStreamsThatStand", "TestGPUFlushWaitsAlone", "TestGPUFlushUnanswered"}},
	{"rdma/gpu_process_test.go", "memory that the suite sees although the process that has it was stopped or killed", []string{"TestGPUProcesses"}},
	{"rdma/gpu_refused_test.go", "cards and drivers that refuse as they are told, and bytes that come wrong", []string{
		"TestGPURefused", "TestGPUInspect", "TestGPUUnflushable", "TestGPUPeermem", "TestGPUTrial", "TestGPUDefects"}},
}
