// Package main builds libkvconn.so: the functions of include/kvconn.h over
// package node, and no logic of its own.
//
// Each public function is C (shim.c). It refuses calls in a forked child and calls
// its Go half here, which copies the arguments (batch.go), calls the agent and
// contains panics (exports.go). Completions go the other way, through a ring in C
// memory (slots.c), so that an engine's step without news never enters Go.
package main
