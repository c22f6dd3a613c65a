// If other memory lies at the regions' addresses, as when an engine has slept, the cards still reach the old pages. So
// the transport forgets the memory: it ends all lanes and all transfers that were begun, and then deregisters the memory.
// When the agent has taken the new memory, the cards register it. P makes and tries lanes anew, and the peers get the new
// keys. One goroutine does all this, in this order, however often the memory changes.

package rdma

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
)

// remapping says how far a transport has come with this.
type remapping struct {
	turn sync.Mutex // held while memory is registered or forgotten; taken first

	mu       sync.Mutex
	held     bool  // cards may have memory registered that was not forgotten
	cause    error // why they forget it
	forget   bool  // the goroutine must forget the memory
	register bool  // the goroutine must register the memory, after it has forgotten the old one
	runs     bool  // the goroutine runs
	busy     chan struct{}
	retryAt  time.Time // after a failure: when to try again
	backoff  time.Duration
}

// forgotten says why the cards do not have the GPUs' memory; nil: they have it.
func (t *Transport) forgotten() error {
	if err := t.stale.Load(); err != nil {
		return *err
	}
	return nil
}

// Forget gives up the GPUs' memory, since it is not what was registered any more: cards would reach the old pages.
// Transfers that are under way end with the cause, and none begins from now on. Forget returns at once.
func (t *Transport) Forget(cause error) {
	if t.cfg.GPUs == nil {
		return
	}
	g := &t.remapping
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.held {
		return
	}
	cause = fmt.Errorf("rdma: %w", cause)
	t.stale.Store(&cause)
	g.cause, g.held, g.forget, g.register = cause, false, true, false
	g.rest()
	t.log.Warn("rdma gives up the GPUs' memory, until it is registered again", zap.Error(cause))
	t.startRemapping()
}

// Renew has the cards register, in the background, the memory that is there now. The caller has called Forget before, and begins no
// transfer of the old memory any more. If the memory is registered, Renew does nothing.
func (t *Transport) Renew() {
	if t.cfg.GPUs == nil {
		return
	}
	g := &t.remapping
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.held || g.register {
		return
	}
	g.register, g.busy = true, make(chan struct{})
	t.startRemapping()
}

// Lacks says why the cards do not have the GPUs' memory; nil: they have it. again says that it is time for Renew.
func (t *Transport) Lacks() (why error, again bool) {
	if why = t.forgotten(); why == nil {
		return nil, false
	}
	g := &t.remapping
	g.mu.Lock()
	defer g.mu.Unlock()
	return why, !g.held && !g.register && !g.forget && !time.Now().Before(g.retryAt)
}

// registered says why the memory is not registered; nil: it is. If the cards are registering it, registered first waits for them.
func (t *Transport) registered(bound time.Duration) error {
	busy := t.remapping.waits() // first: when it is closed, forgotten knows the outcome
	err := t.forgotten()
	if err != nil && busy != nil {
		late := time.NewTimer(bound)
		defer late.Stop()
		select {
		case <-busy:
		case <-late.C:
		case <-t.ctx.Done():
		}
		err = t.forgotten()
	}
	return err
}

// waits returns a channel that is closed when the registration that is due or under way has ended; nil: there is none.
func (g *remapping) waits() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.busy
}

// rest wakes those who wait; mu is held.
func (g *remapping) rest() {
	if g.busy != nil {
		close(g.busy)
		g.busy = nil
	}
}

// startRemapping has the goroutine do what is due; mu is held.
func (t *Transport) startRemapping() {
	if !t.remapping.runs {
		t.remapping.runs = t.goRun("rdma renew", t.renewing)
	}
}

func (t *Transport) renewing() {
	g := &t.remapping
	for {
		g.mu.Lock()
		forget, register, cause := g.forget, !g.forget && g.register, g.cause
		switch {
		case forget:
			g.forget = false
		case register:
			g.register, g.held = false, true
		default:
			g.runs = false
		}
		g.mu.Unlock()
		switch {
		case forget:
			t.forgetMemory(cause)
		case register && t.ctx.Err() == nil:
			t.registerAnew()
		default:
			return
		}
	}
}

// forgetMemory ends all that uses the GPUs' memory, and deregisters it. When it has returned, no byte of the old memory moves.
func (t *Transport) forgetMemory(cause error) {
	g := &t.remapping
	g.turn.Lock()
	defer g.turn.Unlock()
	for _, cn := range t.sender.all() {
		cn.update(func(cn *conn) { cn.forget(cause) })
	}
	var wg sync.WaitGroup
	for _, src := range t.receiver.all() {
		wg.Go(func() { src.forget(cause) })
	}
	wg.Wait()
	for _, d := range t.devices {
		d.forget(t.log)
	}
}

// registerAnew registers the memory and tells the peers.
func (t *Transport) registerAnew() {
	g := &t.remapping
	began := time.Now()
	devices, err := t.registerNow()
	if err != nil {
		err = fmt.Errorf("rdma: memory that an engine has mapped anew cannot be registered: %w", err)
	}
	g.mu.Lock()
	again := g.forget // the memory has changed again meanwhile
	switch {
	case again:
	case err != nil:
		g.cause, g.held, g.forget = err, false, true // forget also what was registered before the failure
		g.backoff = min(max(2*g.backoff, time.Second), maxBackoff)
		g.retryAt = time.Now().Add(g.backoff)
		t.stale.Store(&err)
	default:
		g.backoff = 0
		t.stale.Store(nil)
	}
	g.mu.Unlock()
	defer func() { // last, so that those who are woken find that the peers are asked already
		g.mu.Lock()
		defer g.mu.Unlock()
		if !g.register {
			g.rest()
		}
	}()
	switch {
	case again:
	case err != nil:
		t.log.Warn("rdma is not used until it has registered the GPUs' memory", zap.Error(err))
	default:
		t.log.Info("rdma memory of GPUs registered again", zap.Int("gpu_ranges", len(t.memory.gpu)), zap.Int("devices", devices), zap.Duration("registering", time.Since(began)))
		for _, cn := range t.sender.all() {
			cn.update((*conn).returned)
		}
		for _, src := range t.receiver.all() {
			src.returned()
		}
	}
}

// registerNow registers the memory with all devices, as register does.
func (t *Transport) registerNow() (took int, err error) {
	g := &t.remapping
	g.turn.Lock()
	defer g.turn.Unlock()
	if err := t.cfg.GPUs.Check(); err != nil {
		return 0, err
	}
	exports := t.memory.exports()
	defer closeExports(exports)
	errs := make([]error, len(t.devices))
	var wg sync.WaitGroup
	for i, d := range t.devices {
		switch {
		case d.memory.Load() != nil:
			wg.Go(func() { errs[i] = d.renew(&t.memory, exports) })
		case slices.ContainsFunc(d.ports, func(p *localPort) bool { return p.inactive() == nil }):
			wg.Go(func() { errs[i] = t.registerWith(d, exports) })
		}
	}
	wg.Wait()
	for i, d := range t.devices {
		switch {
		case errs[i] != nil && t.cfg.Fallback:
			t.log.Warn("rdma device is not used: it does not take the memory", zap.String("device", d.name), zap.Error(errs[i]))
		case errs[i] == nil && d.memory.Load() != nil:
			took++
		}
	}
	failed := allOf(errs...)
	if failed != nil && (took == 0 || !t.cfg.Fallback) {
		return took, failed
	}
	return took, t.cfg.GPUs.Check() // what was exported is this memory only if it is there still
}
