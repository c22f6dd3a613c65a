// The wheel's kvconn command runs in this library: kvconn_main comes in here.

package main

// #include "slots.h"
import "C"

import (
	"unsafe"

	"github.com/kvconn/kvconn/cli"
	"github.com/kvconn/kvconn/internal/safe"
)

//export go_main
func go_main(argc C.int32_t, argv **C.char) (status C.int32_t) {
	defer func() {
		if p := recover(); p != nil {
			safe.Report("kvconn_main", p)
			status = C.KVCONN_ERR_INTERNAL
		}
	}()
	args := make([]string, 0, argc)
	for _, a := range unsafe.Slice(argv, argc) {
		args = append(args, C.GoString(a))
	}
	return C.int32_t(cli.Main(args))
}
