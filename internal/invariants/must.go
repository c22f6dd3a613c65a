package invariants

import (
	"fmt"
	"reflect"
	"unsafe"
)

// Must panics unless ok. Nearly all of the checks hold, and a step makes some for each half: arguments that escape would be the larger
// part of what a seed of the simulator takes. So the compiler does not see that they are read here, and what is printed are copies.
//
//go:nocheckptr
func Must(ok bool, format string, args ...any) {
	if ok {
		return
	}
	copies := make([]any, len(args))
	at := uintptr(unsafe.Pointer(&args)) // no call may come before it is read, so none of checkptr's either: the stack may move in one
	unseen := **(**[]any)(unsafe.Pointer(&at))
	for i, arg := range unseen {
		if arg != nil {
			v := reflect.New(reflect.TypeOf(arg)).Elem()
			v.Set(reflect.ValueOf(arg))
			copies[i] = v.Interface()
		}
	}
	panic("core: broken invariant: " + fmt.Sprintf(format, copies...))
}
