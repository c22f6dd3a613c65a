//go:build !invariants

// Package invariants switches costly self-checks: on in tests, free in builds.
package invariants

// Enabled is true in builds with the tag "invariants", as `make test` makes.
const Enabled = false
