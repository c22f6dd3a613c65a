// Package kv describes KV caches, and says which bytes of two of them are the same.
//
// A [Layout] is what one agent has registered: its [Region] list, in groups of regions that
// share their block ids. A [Shape] is a region as a peer sees it. A [Match] is what the
// shapes of a prefill agent and of a decode agent have in common. A [Selection] says which
// blocks of a layout a half of a transfer is of. A match and the selections of both halves
// give a [Plan]: which bytes go where, in one linear order that both sides know without
// talking. If engines have several ranks, [Meetings] says which of them meet, and [Cover]
// deals a decode rank's regions out to the prefill ranks that it has met.
//
// All of this is values. Nothing here does I/O, has a goroutine, a lock or a clock, or keeps
// how far a transfer has come: package core does, and says it where it asks. A layout, a match and a plan do not
// change once they are made, so any goroutine may read them. What a peer says is checked
// here: its shapes by [NewMatch], the blocks that it asks for by [Selection.CheckPeerLoad].
package kv
