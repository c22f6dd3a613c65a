//go:build !faults

// Package fault names the places where rig/mutants can break the code. A product
// build has no trace of them: the calls are constant, and the code behind them is dead. A
// build with the tag "faults" breaks the one place that the environment variable
// KVCONN_FAULT names.
package fault

// Planted says whether some place is broken. A test may then wait less long for what it finds.
func Planted() bool { return false }

// On says whether the named place is to be broken.
func On(string) bool { return false }

// Pick is right, or wrong where the named place is to be broken.
func Pick[T any](_ string, right, _ T) T { return right }
