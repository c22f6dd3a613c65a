//go:build !faults

package natsbus

import (
	"os"
	"runtime"
	"slices"
	"testing"

	"github.com/kvconn/kvconn/rig/faulttest"
)

// defects are the places of internal/fault in this package, each with the test that finds it.
var defects = []faulttest.Defect{
	// A message's sender is what its connection has proved.
	{"bus-from-believed", "TestSeedsOfFuzzUpgraded"},
	{"bus-publishes-for-others", "TestPermissions"},
	{"bus-subscribes-to-others", "TestNobodyListensAsAnother"},
	{"bus-joins-as-requester", "TestSeedsOfFuzzUpgraded"},
	// A proof is good on one connection and from one side.
	{"bus-proof-unbound", "TestForgedProofs"},
	{"bus-proof-unbound", "TestRelayedProof"},
	{"bus-proof-of-either-side", "TestForgedProofs"},
	// Nobody answers in another's place, or has a message answered where it may not write.
	{"bus-answers-for-others", "TestPermissions"},
	{"bus-reply-free", "TestPermissions"},
	{"bus-answers-elsewhere", "TestAnswersElsewhere"},
	// In a cluster what agents say is sealed: to the peer, by the sender, once, an answer to its request.
	{"seal-none", "TestPlainInACluster"},
	{"seal-any-key", "TestAnotherKey"},
	{"seal-any-key", "TestForgedOpen"},
	{"seal-replayed", "TestReplayedRequests"},
	{"seal-repeats-all", "TestSignalIsHandledOnce"},
	{"seal-ids-free", "TestSessionOfAnother"},
	{"seal-first-come", "TestFloodOfManyKeys"},
	{"seal-answer-free", "TestAnswerOfAnotherRequest"},
	{"seal-answer-free", "TestSeal"},
	{"seal-signs-all", "TestServersNonce"},
	// A hostile peer, by one simulator: From is not checked, a proof is not bound, a ticket is shared, the subject of an answer is free,
	// a quota is not counted.
	{"bus-from-believed", "TestHostileSim"},
	{"bus-publishes-for-others", "TestHostileSim"},
	{"bus-subscribes-to-others", "TestHostileSim"},
	{"seal-ids-free", "TestHostileSim"},
	{"bus-proof-unbound", "TestHostileSim"},
	{"bus-proof-of-either-side", "TestHostileSim"},
	{"seal-any-key", "TestHostileSim"},
	{"seal-replayed", "TestHostileSim"},
	{"bus-user-shared", "TestHostileSim"},
	{"bus-reply-free", "TestHostileSim"},
	{"bus-answers-elsewhere", "TestHostileSim"},
	{"bus-answers-for-others", "TestHostileSim"},
	{"seal-answer-free", "TestHostileSim"},
	{"seal-none", "TestHostileSim"},
	{"bus-places-uncounted", "TestHostileSim"},
	{"bus-places-kept", "TestHostileSim"},
	{"bus-handshakes-stay", "TestHostileSim"},
	{"bus-bytes-uncounted", "TestHostileSim"},
	{"bus-bytes-by-connection", "TestHostileSim"},
	{"seal-quota-uncounted", "TestHostileSim"},
	{"seal-repeats-all", "TestHostileSim"},
	// A registry that is changed later is found out as one that was made so.
	{"bus-registry-unwatched", "TestRegistryChangedLater"},
	{"bus-registry-believed", "TestEntryOfATransform"},
	// An entry of an nkey's engine is the key's, and ends. Ids of no key are one account to who has one.
	{"bus-entry-unsigned", "TestEntryOfAnotherEngine"},
	{"bus-entry-endless", "TestEntriesEnd"},
	{"bus-free-ids-own", "TestFreeIDsAreOne"},
	// Who floods from one address has no place that others need.
	{"bus-places-kept", "TestPlacesOfClients"},
	{"bus-handshakes-stay", "TestHandshakePlaces"},
	// Who holds much by many connections ends no one that holds less.
	{"bus-bytes-by-connection", "TestSmallHolders"},
	// Nobody is ended for bytes that are on their way back.
	{"bus-ending-counts", "TestBudget"},
	{"bus-ending-ends-others", "TestEndedForAnother"},
	{"bus-ending-unbounded", "TestEndedForAnother"},
	{"bus-ending-unbounded", "TestBudget"},
	// The agents that one makes share what one gets.
	{"bus-agents-are-accounts", "TestAccounts"},
	// Long requests of one agent hold up no short ones of others.
	{"bus-long-requests-at-once", "TestLongRequestsWait"},
	{"bus-long-requests-in-order", "TestLongRequestsTakeTurns"},
	{"bus-long-requests-never-late", "TestLateLongRequests"},
	// A host that lists without an end takes no memory.
	{"bus-keeps-all-keys", "FuzzStreamInfo"},
	// What lies in the temporary folder is this user's.
	{"bus-store-follows", "TestForgedTempFolder"},
	{"bus-store-pipe", "TestForgedTempFolder"},
	{"bus-store-link", "TestForgedTempFolder"},
	{"bus-store-open", "TestForgedTempFolder"},
	{"bus-store-anybodys", "TestForgedTempFolder"},
	{"bus-keeps-store", "TestKilledLeavesNothing"},
	{"bus-sweeps-once", "TestKilledLeavesNothing"},
	{"bus-sweeps-other-hosts", "TestStoresOfKilledProcessesAreRemoved"},
	{"bus-keeps-restarted", "TestStoresOfKilledProcessesAreRemoved"},
	{"bus-sweeps-living", "TestStoresOfKilledProcessesAreRemoved"},
	{"bus-believes-heirs", "TestKilledLeavesNothing"},
	{"bus-zombies-live", "TestKilledLeavesNothing"},
	{"bus-first-thread-alone", "TestOwnerWithoutFirstThread"},
	{"bus-number-alone", "TestOwnerOfHeldLock"},
	{"bus-owner-silent", "TestOwnerTouches"},
}

// TestDefects: each defect is found by its test, and the list has all places.
func TestDefects(t *testing.T) {
	list := defects
	if os.Geteuid() != 0 { // only root can make a folder of another user
		list = slices.DeleteFunc(slices.Clone(list), func(d faulttest.Defect) bool { return d.Name == "bus-store-anybodys" })
	}
	faulttest.Run(t, runtime.GOMAXPROCS(0), list, func(name string) bool { return name == "bus-store-anybodys" })
}
