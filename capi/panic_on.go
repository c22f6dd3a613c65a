//go:build panictest

package main

// #include <stdlib.h>
import "C"

// panicHook panics in the export that KVCONN_PANIC names, so that a test can
// show in a process of its own that no panic reaches the host.
func panicHook(name string) {
	v := C.getenv(C.CString("KVCONN_PANIC"))
	if v != nil && C.GoString(v) == name {
		panic("asked for by KVCONN_PANIC")
	}
}
