package local

import "unsafe"

// stream copies n bytes, at least streamLeast, by stores that pass the caches (non-temporal), and orders them before all
// stores that follow. The memories do not overlap.
//
//go:noescape
func stream(dst, src unsafe.Pointer, n uintptr)

const streams = 1 // 0: the stores of stream go through the caches
