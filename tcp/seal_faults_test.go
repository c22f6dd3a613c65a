//go:build !faults

package tcp

import (
	"runtime"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rig/faulttest"
)

// sealDefects are the places of internal/fault in the records of sealed streams, where P finds out whose a stream is, and where the
// time of a transfer is taken, each with the test that finds it.
var sealDefects = []faulttest.Defect{
	{"seal-tag", "TestManInTheMiddle"},
	{"seal-nonce", "TestKeysOfStreams"},
	{"seal-nonce", "TestManInTheMiddle"},
	{"seal-direction", "TestKeysOfStreams"},
	{"seal-in-the-clear", "TestHelloHeldBack"},
	{"stream-ticket-shared", "TestTicketOfOneAgent"},
	{"stream-addresses-alike", "TestStreamsOfManyAgents"},
	{"stream-agents-alike", "TestStreamsOfPeersWithMany"},
	{"stream-pending-alike", "TestHelloBesideAFlood"},
	{"stream-unproved", "TestLateHello"},
	{"stream-attempt-again", "TestPlainHelloAgain"},
	{"stream-attempt-again", "TestHelloAgain"},
	{"stream-in-the-clear", "TestHelloAgain"},
	{"stream-rest-counts", "TestTimeAtRest"},
	{"stream-rest-sent", "TestTimeAtRestOfP"},
}

// TestSealDefects: each defect is found by its test, and the list has all places.
func TestSealDefects(t *testing.T) {
	ofDevices := func(name string) bool { return strings.HasPrefix(name, "tcp-") } // devices has their list
	faulttest.Run(t, runtime.GOMAXPROCS(0), sealDefects, ofDevices)
}
