// The transport as its user sees it: D's half is receiver, P's is sender, and this file opens and closes both.

package local

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/kv"
)

// Config of a Transport; zero values get the defaults.
type Config struct {
	Listen         bool          // false: this agent only receives
	Workers        int           // goroutines that copy; 2, at most 16
	BatchBytes     uint64        // most bytes of one copy, for which a Revoke may wait; 1 MiB
	ConnectTimeout time.Duration // of a meeting, and of a write whose D has not come yet; core.DefaultConnectTimeout
	StallTimeout   time.Duration // if a peer reads nothing for so long, its link ends; core.DefaultStallTimeout
	StopGrace      time.Duration // how long a stopped write waits for D's word; 500 ms
	MaxLinks       int           // peers at a time; 4096, and an eighth of the process's descriptors
	MaxMapped      uint64        // bytes of peers' memory that are mapped here; 4 TiB, since that takes addresses alone
	MaxPending     int           // besides these, sockets whose peer has not proved itself; 256
	Devices        Devices       // the devices on which some regions lie; nil: all lie in host memory
	CloseGrace     time.Duration // how long Close waits for copies of a device that does not answer; 2 s
	Logger         *zap.Logger

	lookAfter time.Duration // how often P looks for memory that is not what it has told; 1 s
}

func (c Config) withDefaults() Config {
	if c.Workers <= 0 {
		c.Workers = 2
	}
	c.Workers = min(c.Workers, 16)
	if c.BatchBytes == 0 {
		c.BatchBytes = 1 << 20
	}
	if c.ConnectTimeout <= 0 {
		c.ConnectTimeout = core.DefaultConnectTimeout
	}
	if c.StallTimeout <= 0 {
		c.StallTimeout = core.DefaultStallTimeout
	}
	if c.StopGrace <= 0 {
		c.StopGrace = 500 * time.Millisecond
	}
	if c.MaxLinks <= 0 {
		c.MaxLinks = 4096
		var limit unix.Rlimit
		if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) == nil {
			c.MaxLinks = int(min(uint64(c.MaxLinks), max(limit.Cur/8, 16))) // each has two
		}
	}
	if c.MaxMapped == 0 {
		c.MaxMapped = 4 << 40
	}
	if c.MaxPending <= 0 {
		c.MaxPending = min(256, c.MaxLinks/2)
	}
	if c.lookAfter <= 0 {
		c.lookAfter = time.Second
	}
	if c.CloseGrace <= 0 {
		c.CloseGrace = 2 * time.Second
	}
	if c.Logger == nil {
		c.Logger = zap.NewNop()
	}
	return c
}

// Transport is the local core.Transport of one agent.
type Transport struct {
	cfg    Config
	layout *kv.Layout
	sink   core.Sink
	kernel kernel
	here   place
	blind  error // why this process may read no other's memory; it may open theirs
	ln     *net.UnixListener

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup // every goroutine of the transport

	receiver receiver
	sender   sender
	validity validityPages
	places   places
	handouts handouts
	late     chan struct{} // closed CloseGrace after Close has begun, or when it ends
	lateOnce sync.Once
	mapped   mapped
	memories []memory // of this process that others may open
	all      spaces   // of these
	release  func()   // ends the hold on them; called once
}

var (
	_ core.Settler = (*Transport)(nil)
	_ core.Cutter  = (*Transport)(nil)
)

// errClosed ends what is under way at Close.
var errClosed = fmt.Errorf("local %w", core.ErrTransportClosed)

// New opens a Transport over the registered memory of layout. Outcomes go to sink until Close
// returns.
func New(cfg Config, layout *kv.Layout, sink core.Sink) (*Transport, error) {
	return open(cfg, layout, sink, linux{})
}

func open(cfg Config, layout *kv.Layout, sink core.Sink, k kernel) (*Transport, error) {
	for i := range layout.Regions {
		if r := &layout.Regions[i]; r.Memory != kv.HostMemory && cfg.Devices == nil {
			return nil, fmt.Errorf("local: %v lies in device memory, and no devices were given: take rdma or tcp", r)
		}
	}
	t := &Transport{cfg: cfg.withDefaults(), layout: layout, places: placesOf(cfg.Devices, layout), sink: sink, late: make(chan struct{})}
	var err error
	if t.here, err = here(k); err != nil {
		return nil, fmt.Errorf("local: %w", err)
	}
	t.kernel, t.blind = reading(k)
	if t.memories, t.release, err = files(layout); err != nil {
		return nil, fmt.Errorf("local: %w", err)
	}
	if t.all, err = t.openable(); err == nil && cfg.Listen {
		err = t.readable()
	}
	if err != nil {
		t.release()
		return nil, fmt.Errorf("local: %w", err)
	}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.receiver.init(t)
	t.sender.init(t)
	if cfg.Listen {
		t.here.name = newName()
		if t.ln, err = net.ListenUnix("unix", &net.UnixAddr{Name: "@" + t.here.name, Net: "unix"}); err != nil {
			t.cancel()
			t.release()
			return nil, fmt.Errorf("local: cannot listen on a unix socket: %w", err)
		}
		t.goRun("local accept", t.sender.accept)
		if t.places.any() || fault.On("local-restless-prefill") {
			t.goRun("local look", t.sender.lookOut)
		}
	}
	return t, nil
}

// blinded explains why process_vm_readv is refused even on this process itself, or must not be called.
func blinded(why error) error {
	return core.NotPermitted.Mark(fmt.Errorf("local: this process may not call process_vm_readv (%w): a filter of system calls forbids it, that of its container perhaps; allow the call there (docker: a seccomp profile, or --cap-add SYS_PTRACE; systemd: SystemCallFilter=process_vm_readv)", why))
}

// goRun starts a goroutine that Close waits for.
func (t *Transport) goRun(name string, f func()) {
	t.wg.Add(1)
	safe.Go(name, func() {
		defer t.wg.Done()
		f()
	})
}

// goLeft starts a goroutine that Close waits for until it has ended, or was left.
func (t *Transport) goLeft(name string, f func(leave func())) {
	t.wg.Add(1)
	leave := sync.OnceFunc(t.wg.Done)
	safe.Go(name, func() {
		defer leave()
		f(leave)
	})
}

// Name implements core.Transport.
func (t *Transport) Name() string { return "local" }

// Endpoint implements core.Transport.
func (t *Transport) Endpoint() string {
	if t.ln == nil {
		return ""
	}
	return t.here.String()
}

// Dismiss implements core.Transport.
func (t *Transport) Dismiss(peer core.AgentID) {
	t.sender.dismiss(peer)
	t.receiver.dismiss(peer)
}

// Close implements core.Transport.
func (t *Transport) Close() error {
	t.cancel()
	late := func() { t.lateOnce.Do(func() { close(t.late) }) }
	defer late() // for a Revoke that waits for a copy of a device that does not answer
	defer time.AfterFunc(t.cfg.CloseGrace, late).Stop()
	if t.ln != nil {
		_ = t.ln.Close()
	}
	t.receiver.close()
	t.sender.close()
	t.wg.Wait()
	t.validity.freeAll()
	t.release()
	return t.receiver.after()
}
