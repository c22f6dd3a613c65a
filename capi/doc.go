// Package main builds libkvconn.so: the functions of include/kvconn.h over
// package node, and no logic of its own.
//
// Each public function is C (shim.c): it refuses calls in a forked child, and
// hands on to its Go half here, which copies the arguments, calls the agent and
// contains panics. Completions go the other way through a ring in C memory
// (slots.c), so that an engine's step that finds nothing never enters Go.
package main
