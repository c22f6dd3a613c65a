//go:build !cgo

package hostenv

import "os"

// Get is a variable's value, empty if there is none.
func Get(name string) string { return os.Getenv(name) }
