package main

// #include <stdint.h>
import "C"

import (
	"unsafe"

	"github.com/kvconn/kvconn/cli"
)

//export go_main
func go_main(argc C.int32_t, argv **C.char) C.int32_t {
	args := make([]string, 0, argc)
	for _, a := range unsafe.Slice(argv, argc) {
		args = append(args, C.GoString(a))
	}
	return C.int32_t(cli.Main(args))
}
