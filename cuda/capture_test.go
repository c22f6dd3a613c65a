package cuda

import (
	"context"
	"os"
	"runtime"
	"testing"
	"unsafe"

	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// capturing runs f while the engine captures a graph in the mode "global", as PyTorch does: on the
// engine's thread, and then beside it.
func capturing(t *testing.T, e *engine.Engine, stream uintptr, f func() error) {
	t.Helper()
	for _, beside := range []bool{false, true} {
		where := map[bool]string{false: "on the engine's thread", true: "beside it"}[beside]
		err := captured(t, e, stream, func() error {
			if !beside {
				return f()
			}
			ended := make(chan error, 1)
			go func() { ended <- f() }()
			return answer(t, ended)
		})
		if err != nil {
			t.Errorf("%s: %v", where, err)
		}
		if t.Failed() {
			t.Fatalf("%s", where)
		}
	}
}

func captured(t *testing.T, e *engine.Engine, stream uintptr, f func() error) error {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	e.Must("cuStreamBeginCapture_v2", stream, 0)
	err := f()
	graph := new(uintptr)
	pinned := new(runtime.Pinner)
	pinned.Pin(graph)
	defer pinned.Unpin()
	if rc := e.Call("cuStreamEndCapture", stream, uintptr(unsafe.Pointer(graph))); rc != 0 {
		t.Errorf("the engine's capture was broken: %d", rc)
	} else {
		e.Bare("cuGraphDestroy", *graph)
	}
	return err
}

// TestCaptureEntries: no entry of this room breaks an engine's capture, or fails for it.
func TestCaptureEntries(t *testing.T) {
	e, d := open(t, Options{})
	p, stream := e.Alloc(grain), e.Stream()
	r, err := d.Register("cache", p, grain)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	at := reserve(t, e, grain)
	mapAt(t, e, at, 1)
	slept, err := d.Register("slept", at, grain)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(slept.Close)
	o := start(t, 0)
	o.memory("allocate", grain, 1)
	o.memory("map", grain, 1)
	shared, files := o.try(order{Do: "share"})
	if shared.Err != "" {
		t.Fatal(shared.Err)
	}
	closing := func(file *os.File, err error) error {
		if err == nil {
			err = file.Close()
		}
		return err
	}
	for name, f := range map[string]func() error{
		"Devices": func() error {
			_, err := Devices()
			return err
		},
		"Locate": func() error {
			_, err := Locate(at, grain)
			return err
		},
		"KindOf": func() error {
			_, err := KindOf(uintptr(unsafe.Pointer(&t))) // host memory
			return err
		},
		"Open, Prepare, Close": func() error {
			other, err := Open(0, Options{})
			if err != nil {
				return err
			}
			if err := other.Prepare(); err != nil {
				return err
			}
			return other.Close()
		},
		"Register": func() error {
			again, err := d.Register("again", p, grain)
			if err == nil {
				again.Close()
			}
			return err
		},
		"Check of a region": r.Check,
		"Check":             d.Check,
		"Look": func() error {
			d.Moved()
			_, err := d.Look()
			return err
		},
		"Export": func() error {
			file, _, err := r.Export()
			return closing(file, err)
		},
		"ExportRange": func() error {
			file, _, err := d.ExportRange("range", uint64(p), grain)
			return closing(file, err)
		},
		"Flush": d.Flush,
		"Share": func() error {
			s, err := d.Share()
			if err != nil {
				return err
			}
			for i, a := range s.Allocations {
				if a.Handle != nil {
					continue
				}
				if err := closing(s.File(i)); err != nil {
					return err
				}
			}
			return s.Check()
		},
		"Scratch": func() error {
			s, err := d.Scratch(4096)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			b := make([]byte, 100)
			if err := s.Put(ctx, 8, b); err != nil {
				return err
			}
			if err := s.Get(ctx, 8, b); err != nil {
				return err
			}
			return s.Close()
		},
		"Peer": func() error {
			peer := d.Peer("prefill 1", shared.Process)
			if err := openEach(peer, shared, files); err != nil {
				return err
			}
			return peer.Close()
		},
	} {
		t.Run(name, func(t *testing.T) { capturing(t, e, stream, f) })
	}
}
