// The contract of core.Transport as a list of cases, and what a package gives to have them run.

package coretest

import (
	"slices"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// Fixture is how the suite gets transports of one kind.
type Fixture struct {
	// Open makes a transport over the layout's memory, which is of this process
	// and stays mapped until the transport is closed. The suite closes it. Its
	// Endpoint must be usable as it is: a host must not be left out. A Signaller's
	// signals go by signal.
	Open func(t *testing.T, id core.AgentID, l *kv.Layout, sink core.Sink, signal core.Signal) core.Transport

	// BigBytes is how large a transfer must be for the suite to catch it in the
	// middle; 64 MiB unless set.
	BigBytes int

	// Remote is for ProcessSuite: the name under which the package's TestMain has
	// given ServeRemote a transport that can reach those of Open.
	Remote string

	// OneSided: bytes arrive without the receiver's process. So a write may end well
	// although its receiver has given it up, or is stopped and has not heard of it.
	OneSided bool

	// LateReads: the receiver copies out of the sender's memory, and the sender cannot end a copy of
	// a receiver that is stopped. So the blocks of a transfer that the receiver never reports may get
	// what the sender's blocks hold later.
	LateReads bool

	// Apart: agents of one process do not reach each other, so ProcessSuite has no two of them in it.
	Apart bool

	// Device, if set, is where the regions of endpoints lie: of those that OnDevice names, or of
	// all.
	Device   *Device
	OnDevice func(id core.AgentID) bool
	// DeviceOf, if set, is used in place of both.
	DeviceOf func(id core.AgentID) *Device

	// Opened, if set, counts what this process has mapped of other processes' memory. Of a sender that was killed none of
	// it may be left when its loss is told.
	Opened func() int

	hub *signalHub // of one case
}

func (f Fixture) deviceOf(id core.AgentID) *Device {
	if f.DeviceOf != nil {
		return f.DeviceOf(id)
	}
	if f.OnDevice != nil && !f.OnDevice(id) {
		return nil
	}
	return f.Device
}

// late is the transfer of which there may be bytes in the blocks of one that was given up.
func (f Fixture) late(transfer int) int {
	if f.LateReads {
		return transfer
	}
	return 0
}

func (f Fixture) withDefaults() Fixture {
	if f.BigBytes == 0 {
		f.BigBytes = 64 << 20
	}
	return f
}

// TransportSuite is the contract of core.Transport as a test.
func TransportSuite(t *testing.T, f Fixture) { runCases(t, f.withDefaults(), transportCases()) }

// PlanSuite is those of its cases that move many pieces, or end in the middle of them: the
// others do not see whether a Cutter is given lists or plans.
func PlanSuite(t *testing.T, f Fixture) {
	of := []string{"ordered", "scattered", "ten thousand segments", "strides and groups", "unequal blocks and heads", "many at once",
		"bit by bit", "many bit by bit", "stop at rest", "revoke at rest", "more than there is", "revoke during write", "stop during write", "loss and return"}
	var cases []suiteCase
	for _, c := range transportCases() {
		if slices.Contains(of, c.name) {
			cases = append(cases, c)
		}
	}
	if len(cases) != len(of) {
		t.Fatalf("%d cases of %q", len(cases), of)
	}
	runCases(t, f.withDefaults(), cases)
}

func transportCases() []suiteCase {
	return []suiteCase{
		{"ordered", ordered},
		{"scattered", scattered},
		{"odd sizes", oddSizes},
		{"nothing to send", nothing},
		{"ten thousand segments", tenThousand},
		{"strides and groups", strides},
		{"unequal blocks and heads", unequal},
		{"two at once", func(t *testing.T, f Fixture) { manyAtOnce(t, f, 2) }},
		{"many at once", func(t *testing.T, f Fixture) { manyAtOnce(t, f, 100) }},
		{"both directions", bothDirections},
		{"several peers", severalPeers},
		{"bit by bit", bitByBit},
		{"many bit by bit", partialAtOnce},
		{"more of unknown ids", partialUnknown},
		{"stop at rest", partialStopped},
		{"revoke at rest", partialRevoked},
		{"more than there is", partialTooMuch},
		{"sender gone at rest", partialSenderGone},
		{"receiver gone at rest", partialReceiverGone},
		{"id again", idAgain},
		{"expect twice", expectTwice},
		{"unknown ids", unknownIDs},
		{"revoke before write", revokeBefore},
		{"revoke during write", revokeDuring},
		{"revoke after write", revokeAfter},
		{"revoke races the end", revokeRaces},
		{"revoke leaves others", revokeLeavesOthers},
		{"stop during write", stopDuring},
		{"sender gone during write", senderGone},
		{"receiver gone during write", receiverGone},
		{"wrong grants", wrongGrants},
		{"grant of another peer", stolenGrant},
		{"peer that never connected", neverConnected},
		{"nobody at the endpoint", nobodyThere},
		{"admit again", admitAgain},
		{"wrong tickets", wrongTickets},
		{"grant of one peer at another", crossedGrant},
		{"dismiss", dismiss},
		{"dismiss during write", dismissDuring},
		{"loss and return", lossAndReturn},
		{"close", closed},
	}
}

type suiteCase struct {
	name string
	run  func(*testing.T, Fixture)
}

func runCases(t *testing.T, f Fixture, cases []suiteCase) {
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			leaktest.Check(t)
			f.hub = newSignalHub()
			c.run(t, f)
		})
	}
}
