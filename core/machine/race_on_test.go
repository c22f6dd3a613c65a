//go:build race

package machine

// Raced says that the race detector runs. A seed of the simulator and most tests of this package are the work of one goroutine, which
// it has nothing to say about and makes ten times as long. The check runs this package once more, without it.
const Raced = true
