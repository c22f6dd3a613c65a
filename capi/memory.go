// A host gets memory from kvconn that other processes of this machine can open.

package main

// #include <stdint.h>
import "C"

import (
	"unsafe"

	"github.com/kvconn/kvconn/shmem"
)

//export go_alloc
func go_alloc(bytes C.uint64_t, address *unsafe.Pointer, text **C.char) C.int32_t {
	return guard("kvconn_alloc", text, func() error {
		agents.Lock()
		err := agents.poisoned
		agents.Unlock()
		if err != nil {
			return err
		}
		m, err := shmem.Alloc(uint64(bytes))
		if err != nil {
			return err
		}
		*address = m.Pointer()
		return nil
	})
}

//export go_free
func go_free(address unsafe.Pointer, text **C.char) C.int32_t {
	return guard("kvconn_free", text, func() error { return shmem.Free(uint64(uintptr(address))) })
}
