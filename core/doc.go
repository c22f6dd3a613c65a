// Package core has the words of those who decide about a transfer, and of those who do what was decided: events, actions, codes, and the
// interfaces of what moves bytes and messages. Two packages decide, and do no I/O. Each imports only what is named before it:
//
//   - core: words only
//   - core/half: the halves of transfers, each with one peer
//   - core/machine: all of them together, and the transfers that go in parts
//
// A machine.Machine holds the halves of every transfer that one agent takes part in:
// offers (the prefill engine's half: "these blocks hold it"), and claims ("keep it
// for us") and loads ("put it into these blocks") of the decode engine. Its Step
// takes an [Event] (an engine's request, a peer's message, a transport's outcome, the time)
// and returns [Action] values (send, expect, write, revoke, report). It has no goroutine, clock
// or socket, so thousands of interleavings run in seconds and a failing one replays.
//
// # The user's duties
//
// Package node is the user of a machine; a Go program opens node.Agent.
//
//  1. The user makes every call of a Machine, Step and the others, under one lock, with a
//     time that does not run backwards.
//  2. The actions of a step come before those of the next. If the first action is an answer ([Refuse], [AnswerLoad], [AnswerRenew]), the user
//     gives it to whoever told the event. The other actions make two sequences. The actions
//     for which [OfMemory] is true are one of them, the rest is the other. The user performs
//     each sequence in order, and the two beside each other. If an action's comment names an
//     event, the user tells the action's outcome by that event, once.
//  3. While Machine.Busy says so, the user tells [Tick] at least every [TickInterval].
//  4. A [Report] is final: after it the engine uses the blocks again. No byte of
//     the transfer may land then, so the Report of a failed load always comes after
//     the [Revoked] event of its [Revoke].
//
// # Moments
//
// Blocks may lie in the memory of a device ([kv.Region].Memory), which does its work later
// than the engine queues it. So the engine's agent numbers moments in that work, and a request
// names the moment that must pass first:
//
//   - P's [OfferRequest].After and [PartialOffer].After: before this moment no transport reads
//     the blocks that the request adds. The blocks of a partial offer also wait for the moments
//     of all partial offers before it. The blocks of an offer wait for the moments of all its
//     partial offers.
//   - D's [LoadRequest].After: before this moment no transport writes the blocks. Until then
//     the machine does not arm the transport, and P has no grant. Meanwhile P keeps the
//     transfer as one that D has claimed. Each part of a fan-in waits.
//
// When a half must wait for a moment, the machine wants [Await] for it, but only one as long as
// any half waits for that moment. The user watches the moment and tells [MomentPassed] or
// [MomentFailed], also if the moment has passed when Await is performed. If nobody waits for the
// moment any more, the event does nothing. If a moment has not passed [Options].MomentTimeout
// after its Await, it counts as failed. If a moment fails, the halves that wait for it end with
// code [Failed] and the reason. A load that waits was never armed, so it is reported at once. An
// offer whose blocks are being read is reported after its [Written].
//
// A transport has three duties. It reads and writes blocks in the way that their Memory
// needs. It tells Received when the bytes lie in the blocks, not when a copy of them is
// queued. It tells Written, also after [StopWrite], when no copy reads the blocks any more.
// So when [Machine.Reading] says no, or an offer is reported, the engine may write the blocks again.
//
// Moment 0 has always passed. A request with moment 0 costs no further state, action or memory.
//
// # Other memory at the same addresses
//
// The user asks Machine.InUse which transfers have blocks that may be read or written. If an engine
// has other memory at the addresses of these blocks, because it has slept, the user tells [Remapped] for
// each of these transfers, and gives the new memory to the transports when InUse names none any more.
//
// Package kv describes, as values, what caches are like and which bytes of two caches are the same.
// The machine holds the engine's layout, the selections of its halves and of the peers' loads,
// the match with each peer's layout, and a part's share.
package core
