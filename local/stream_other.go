//go:build !amd64

// A processor without such stores copies by way of its caches.

package local

import "unsafe"

func stream(dst, src unsafe.Pointer, n uintptr) {
	copy(unsafe.Slice((*byte)(dst), n), unsafe.Slice((*byte)(src), n))
}

const streams = 0
