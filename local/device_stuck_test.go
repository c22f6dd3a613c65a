package local

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
)

// TestDeviceStuck: D's device ends no copy. Nobody hears of an end of the transfer in whose blocks the copy may land, but P hears
// that nothing comes of it. Revoke waits until Close, and Close has a bound. Both say that the copy may land, and so does a revoke that
// comes after Close.
func TestDeviceStuck(t *testing.T) {
	for _, before := range []bool{true, false} {
		t.Run(fmt.Sprint("the revoke begins before Close: ", before), func(t *testing.T) { deviceStuck(t, before) })
	}
}

func deviceStuck(t *testing.T, before bool) {
	p, d := twoGPUs(t, cuda.Options{StallTimeout: 100 * time.Millisecond, CloseTimeout: 20 * time.Second})
	d.Halt(true)
	defer d.Halt(false)
	p.loads("t", d, 2)
	wants(t, p.sink.Wait("written", "t", 1).Err, "device does not answer")
	returned, revoked := make(chan struct{}), error(nil)
	revoke := func() {
		defer close(returned)
		revoked = d.tr.Revoke("t")
	}
	if before {
		go revoke()
		comes(t, "Revoke waits", func() bool { return d.fenced() || isClosed(returned) })
		if isClosed(returned) {
			t.Error("Revoke has returned, and a copy may land")
		}
	}
	p.tr.Dismiss(d.id) // the link ends all the same
	d.down("connection lost")
	if err := d.tr.Close(); !errors.Is(err, core.ErrMayLand) || !strings.Contains(err.Error(), "cache of d") {
		t.Errorf("the close: %v", err)
	}
	if !before {
		revoke()
	}
	if <-returned; !errors.Is(revoked, core.ErrMayLand) {
		t.Errorf("the revoke: %v", revoked)
	}
	if all := d.sink.All("received", ""); len(all) > 0 {
		t.Errorf("an end was told: %+v", all)
	}
}

// TestRevokesBesideClose: a copy goes on when D's transport is closed. A revoke beside the close returns when the copy has ended, and not before,
// whoever runs first.
func TestRevokesBesideClose(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	for i := range 8 {
		p, d := startGPU(t, "p", 0, Config{lookAfter: time.Hour}, cuda.Options{StallTimeout: time.Hour}),
			startGPU(t, "d", 1, Config{CloseGrace: time.Hour}, cuda.Options{StallTimeout: time.Hour})
		p.meets(d)
		d.Halt(true)
		p.loads("t", d, 2)
		comes(t, "a copy is under way", func() bool { return d.copying("t") && d.Count("queued") > 0 })
		var goesOn atomic.Bool
		goesOn.Store(true)
		ended := make(chan error, 2)
		both := []func(){func() {
			err := d.tr.Revoke("t")
			if goesOn.Load() {
				t.Error("Revoke has returned in the middle of a copy")
			}
			ended <- err
		}, func() { ended <- d.tr.Close() }}
		if i%2 == 1 {
			slices.Reverse(both)
		}
		for _, f := range both {
			go f()
			for range i {
				runtime.Gosched()
			}
		}
		comes(t, "the close has begun", func() bool {
			d.tr.receiver.mu.Lock()
			defer d.tr.receiver.mu.Unlock()
			return d.tr.receiver.closed
		})
		goesOn.Store(false)
		d.Halt(false)
		for range 2 {
			select {
			case err := <-ended:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(time.Minute):
				t.Fatal("the copy has ended, and the revoke or the close has not")
			}
		}
		p.close()
		d.close()
	}
}
