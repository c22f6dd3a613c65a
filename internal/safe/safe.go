// Package safe starts goroutines whose panic must not end the host process.
package safe

import (
	"fmt"
	"os"
	"runtime/debug"
	"sync/atomic"
)

// onPanic is told of each contained panic.
var onPanic atomic.Pointer[func(where string, cause any, stack []byte)]

// SetHandler has f told of contained panics.
func SetHandler(f func(where string, cause any, stack []byte)) { onPanic.Store(&f) }

// Go runs f on a goroutine of its own and contains its panic; name says in the report
// where it was.
func Go(name string, f func()) {
	go func() {
		defer Recover(name)
		f()
	}()
}

// Recover is deferred; it contains a panic and reports it.
func Recover(name string) {
	if p := recover(); p != nil {
		Report(name, p)
	}
}

// Report tells the handler of a panic that was recovered elsewhere.
func Report(name string, cause any) {
	if f := onPanic.Load(); f != nil {
		(*f)(name, cause, debug.Stack())
		return
	}
	fmt.Fprintf(os.Stderr, "kvconn: panic in %s: %v\n%s", name, cause, debug.Stack())
}

// Try runs f and contains its panic, which is the error then.
func Try(name string, f func() error) (panicked bool, err error) {
	defer func() {
		if p := recover(); p != nil {
			Report(name, p)
			panicked, err = true, fmt.Errorf("%s: panic: %v", name, p)
		}
	}()
	return false, f()
}
