// Package core decides everything about a transfer and does no I/O.
//
// A [Machine] holds the two halves of every transfer that one agent takes part
// in: offers (the prefill engine's half: "these blocks hold it") and loads (the
// decode engine's half: "put it into these blocks"). It takes events (a user's
// call, a peer's message, a transport's outcome, the time) and appends actions
// (send, expect, write, revoke, report). It has no goroutine, clock or socket,
// so thousands of interleavings run in seconds and a failing one replays.
//
// # The user's duties
//
// Package node is the user of this package; a Go program opens node.Agent.
//
//  1. Every call of a Machine is made under one lock, with a time that does not
//     run backwards.
//  2. After each call the user takes [Machine.Actions] and performs them in
//     their order. An action that can fail reports its outcome by the event
//     that its comment names, once.
//  3. While [Machine.Busy] says so, [Machine.Tick] is called at least every
//     [TickInterval].
//  4. A [Report] is final: its block ids belong to the engine again. No byte
//     of that transfer may land after it, which is why a Report of a failed
//     load always comes after the [Revoked] event of its [Revoke].
//
// Layouts ([Layout], [Region]), what two of them have in common ([Match]) and plans
// ([Match.Pairs] of the sender, [Match.Segments] of the receiver) are values
// without I/O too, shared by all transports.
package core
