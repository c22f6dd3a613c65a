//go:build !faults

package bootstrap

import (
	"runtime"
	"testing"

	"github.com/kvconn/kvconn/rig/faulttest"
)

// defects are the places of internal/fault in this package, each with the test that finds it.
var defects = []faulttest.Defect{
	{"table-first-come", "TestRanksOfAnother"},
	{"table-few-give-way", "TestFewRanksStay"},
	{"table-joins-push-out", "TestJoinsPushOutNoFew"},
	{"table-told-first", "TestJoinsPushOutNoFew"},
	{"table-ways-apart", "TestBothWays"},
	{"table-lease-told", "TestToldAndJoined"},
	{"table-all-told", "TestPlacesForRanksThatJoin"},
	{"table-own-place-taken", "TestPlaceOfItsOwn"},
	{"table-proof-unheeded", "TestRanksThatProveASecret"},
	{"rooms-addresses-alike", "TestRoomsOfAnother"},
	{"rooms-old-stay", "TestOldRoomsGoFirst"},
}

// TestDefects: each defect is found by its test, and the list has all places.
func TestDefects(t *testing.T) {
	faulttest.Run(t, runtime.GOMAXPROCS(0), defects, nil)
}
