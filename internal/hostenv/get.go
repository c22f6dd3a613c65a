//go:build cgo

// Package hostenv reads the environment of the process as C has it now.
//
// Go's copy is of no use in a library. It points to the memory in which the system put the environment. A host that sets its
// process title, as vLLM and SGLang do, moves the environment away and writes over that memory.
package hostenv

// #include <stdlib.h>
import "C"

import "unsafe"

// Get is a variable's value, empty if there is none.
func Get(name string) string {
	c := C.CString(name)
	defer C.free(unsafe.Pointer(c))
	if value := C.getenv(c); value != nil {
		return C.GoString(value)
	}
	return ""
}
