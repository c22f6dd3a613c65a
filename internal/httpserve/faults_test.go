//go:build !faults

package httpserve

import (
	"runtime"
	"testing"

	"github.com/kvconn/kvconn/rig/faulttest"
)

// defects are the places of internal/fault in this package, each with the test that finds it.
var defects = []faulttest.Defect{
	{"http-addresses-alike", "TestPlacesByAddress"},
	{"http-addresses-alike", "TestBriefRequestsByAddress"},
	{"http-work-gives-way", "TestRequestsOfOneAddress"},
	{"http-addresses-alike", "TestLongHeadsByAddress"},
}

// TestDefects: each defect is found by its test, and the list has all places.
func TestDefects(t *testing.T) {
	faulttest.Run(t, runtime.GOMAXPROCS(0), defects, nil)
}
