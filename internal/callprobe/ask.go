//go:build cgo

package callprobe

// #include "ask.h"
import "C"

import (
	"fmt"
	"syscall"
)

// ask has a child make the call. The caller sees to it that there is one at a time. See ask.c for shares.
func ask(call uintptr, shares bool) error {
	hide := C.int(0)
	if shares {
		hide = 1
	}
	switch answer := C.callprobe_ask(C.long(call), hide); {
	case answer == 0:
		return nil
	case answer > 0:
		return ErrEnds
	default:
		return fmt.Errorf("whether the process would be ended for it is not known: no child can try: %w", syscall.Errno(-answer))
	}
}
