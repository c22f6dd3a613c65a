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
//     gives it to who told the event. The user performs the other actions in their
//     order: those of [OfMemory] in one, and the rest, beside them, in another. If an
//     action's comment names an event, the user tells the action's outcome by that event, once.
//  3. While Machine.Busy says so, the user tells [Tick] at least every [TickInterval].
//  4. A [Report] is final: after it the engine uses the blocks again. No byte of
//     the transfer may land then, so the Report of a failed load always comes after
//     the [Revoked] event of its [Revoke].
//
// # Moments
//
// Blocks may lie in the memory of a device ([kv.Region].Memory), whose work is done later
// than the engine queues it. So the engine's agent numbers moments in that work, and a request
// says after which one it counts:
//
//   - P's [OfferRequest].After and [PartialOffer].After: nothing that the request adds is
//     read before. What a partial offer adds also waits for the moments of the partial
//     offers before it, and the offer for those of all.
//   - D's [LoadRequest].After: nothing is written before. The transport is not armed until
//     then, and P has no grant. P keeps the transfer meanwhile, as one that D has claimed.
//     Each part of a fan-in waits.
//
// The machine wants [Await] for a moment that it does not know, once for as long as a half
// waits for it. The user watches the moment and tells [MomentPassed] or
// [MomentFailed], also if the moment has passed when Await is performed. An event that nobody
// waits for any more does nothing. A moment that has not passed [Options].MomentTimeout
// after its Await counts as failed. What waits for a moment that fails ends with code
// [Failed] and the reason. A load that waits was never armed, so it is reported at once. An
// offer whose blocks are being read is reported after its [Written].
//
// Three things are the transport's: it reads and writes blocks by the way that their Memory
// needs. It tells Received when the bytes lie in the blocks, not when a copy of them is
// queued. It tells Written, also after [StopWrite], when no copy reads the blocks any more.
// So [Machine.Reading] says no, and an offer is reported, when the engine may write them again.
//
// With moment 0, which has passed, nothing of this happens: there is no state, action or
// memory more.
//
// # Memory that is another
//
// The user asks Machine.Given whose blocks may be read or written. If an engine has other memory at
// their addresses, because it has slept, the user tells [Remapped] for each of them, and gives the
// new memory to the transports when Given names none any more.
//
// What caches are like, and which bytes of two of them are the same, is package kv's: values.
// The machine holds the engine's layout, the selections of its halves and of the peers' loads,
// the match with each peer's layout, and a part's share.
package core
