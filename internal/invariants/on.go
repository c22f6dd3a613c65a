//go:build invariants

// A build with the tag invariants makes the checks.

package invariants

// Enabled is true in builds with the tag "invariants", as `make test` makes.
const Enabled = true
