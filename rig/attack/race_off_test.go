//go:build !race

package attack

// raced says that the race detector's memory is in the figures, some five to ten times the
// program's own. `make attack` runs without it, as a part of `make test`.
const raced = false
