//go:build invariants

package invariants

// Enabled is true in builds with the tag "invariants", as `make test` makes.
const Enabled = true
