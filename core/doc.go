// Package core has the types that two kinds of packages share: those that decide about transfers, and those that carry the decisions
// out. These types are events, actions, codes, and the interfaces of what moves bytes and messages. Two packages decide, and do no I/O.
// Each imports only those that stand before it in this list:
//
//   - core: the types
//   - core/half: the halves of transfers, each with one peer
//   - core/machine: all halves together, and the transfers that go in parts
//
// A machine.Machine holds the halves of every transfer that one agent takes part in:
// offers (the prefill engine's half: "these blocks hold it"), and claims ("keep it
// for us") and loads ("put it into these blocks") of the decode engine. Its Step takes an
// [Event] (an engine's request, a peer's message, a transport's outcome, the time) and returns
// [Action] values (send, expect, write, revoke, report). A machine has no goroutine, clock or
// socket, so tests run thousands of interleavings in seconds, and can repeat one that fails.
//
// # The user's duties
//
// Package node is the user of a machine; a Go program opens node.Agent.
//
//  1. The user makes every call of a Machine, Step and the others, under one lock, with a
//     time that does not run backwards.
//  2. The actions of a step come before those of the next. If the first action is an answer ([Refuse], [AnswerLoad], [AnswerRenew]), the user
//     gives it to whoever told the event. The other actions make two sequences: the actions for which [OfMemory] is true, and the rest. The
//     user performs each sequence in order, and the two side by side. If an action's comment names an event, the user tells the machine the
//     action's outcome by that event, once.
//  3. While Machine.Busy is true, the user tells the machine [Tick] at least every [TickInterval].
//  4. A [Report] is final: after it the engine uses the blocks again, and no byte
//     of the transfer may land. So the Report of a failed load always comes after
//     the [Revoked] event of its [Revoke].
//
// # Moments
//
// Blocks may lie in the memory of a device ([kv.Region].Memory), which does its work later
// than the engine queues it. So the engine's agent numbers moments in that work, and an
// engine's request names the moment that must pass first:
//
//   - P's [OfferRequest].After and [PartialOffer].After: before this moment no transport reads
//     the blocks that the request adds. The blocks of a partial offer also wait for the moments
//     of all partial offers before it. The blocks of an offer wait for the moments of all its
//     partial offers.
//   - D's [LoadRequest].After: before this moment no transport writes the blocks. Until then
//     the machine does not arm the transport (it wants no [Expect]), and P has no grant.
//     Meanwhile P keeps the transfer as one that D has claimed. If the load is a fan-in,
//     each of its parts waits.
//
// When a half must wait for a moment, the machine wants one [Await] for the moment, however many
// halves wait for it. The user watches the moment and tells the machine [MomentPassed] or
// [MomentFailed], also if the moment has passed when Await is performed. If no half waits for
// the moment any more, the event does nothing. If a moment has not passed within
// [Options].MomentTimeout after its Await, it counts as failed. If a moment fails, the halves
// that wait for it end with code [Failed] and the reason. For a load that waits no transport was
// armed, so the machine reports it at once. If an offer's blocks are being read, the machine
// reports the offer after its [Written].
//
// A transport has three duties. It reads and writes blocks in the way that their Memory needs. It
// tells Received only when the bytes lie in the blocks: a queued copy is not enough. It tells
// Written, also after [StopWrite], only when no copy reads the blocks any more. So when
// Machine.Reading says no, or the machine has reported an offer, the engine may write the blocks
// again.
//
// Moment 0 has always passed: a request with it costs no further state, action or memory.
//
// # Other memory at the same addresses
//
// Machine.InUse tells the user which transfers have blocks that may be read or written. If the engine
// has slept, it may have other memory at the addresses of these blocks. Then the user tells the machine
// [Remapped] for each of these transfers, and gives the new memory to the transports when InUse names
// none any more.
//
// Package kv describes, as values, what caches are like and which bytes of two caches are the same.
// The machine holds the engine's layout, the selections of its halves and of the peers' loads,
// the match with each peer's layout, and a part's share.
package core
