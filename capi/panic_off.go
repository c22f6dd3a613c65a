//go:build !panictest

package main

// panicHook does nothing but in the library that the panic test builds.
func panicHook(string) {}
