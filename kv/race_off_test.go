//go:build !race

package kv

// raced says that the race detector runs. The tests of this package are the work of one goroutine, which it has nothing to say about
// and makes ten times as long. The check runs this package once more, without it.
const raced = false
