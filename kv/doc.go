// Package kv describes KV caches, and says which bytes of two of them are the same.
//
// A [Layout] is what one agent has registered: its [Region] list, in groups of regions that
// share their block ids. A [Shape] is a region as a peer sees it. A [Match] is what the
// shapes of a prefill agent and of a decode agent have in common. A [Selection] says which
// blocks of a layout belong to a half of a transfer. A match and the selections of both
// halves give a [Plan]: which bytes go where, in one linear order that each side can work
// out by itself. If engines have several ranks, [Meetings] says which of them meet, and
// [Cover] deals a decode rank's regions out to the prefill ranks that it has met.
//
// All of this is values. Nothing here does I/O, or has a goroutine, a lock or a clock. Nor does the package
// remember how far a transfer has come: the callers do, and pass it as an argument. A layout, a match and a plan
// do not change once they are made, so any goroutine may read them. This package checks what a peer says: its
// shapes by [NewMatch], the blocks that it asks for by [Selection.CheckPeerLoad].
package kv
