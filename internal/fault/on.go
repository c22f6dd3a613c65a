//go:build faults

// In a build with the tag faults the place that KVCONN_FAULT names is broken.

package fault

import "os"

var active = os.Getenv("KVCONN_FAULT")

// Planted says whether some place is broken. A test may then wait less long for what it finds.
func Planted() bool { return active != "" }

// On says whether the named place is to be broken. Not inlined, it has all names in
// the program, where a test looks for them.
//
//go:noinline
func On(name string) bool { return name == active }

// Pick is right, or wrong where the named place is to be broken.
func Pick[T any](name string, right, wrong T) T {
	if On(name) {
		return wrong
	}
	return right
}
