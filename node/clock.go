package node

import (
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/safe"
)

// systemClock is the core.Clock of real agents.
type systemClock struct{}

var _ core.Clock = systemClock{}

func (systemClock) Now() time.Time { return time.Now() }

func (systemClock) NewTicker(d time.Duration, f func(time.Time)) (stop func()) {
	t := time.NewTicker(d)
	quit, done := make(chan struct{}), make(chan struct{})
	safe.Go("clock", func() {
		defer close(done)
		defer t.Stop()
		for {
			select {
			case <-quit:
				return
			case <-t.C:
				f(time.Now())
			}
		}
	})
	return func() {
		close(quit)
		<-done
	}
}
