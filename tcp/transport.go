// The transport as its user sees it: D's half is receiver, P's is sender, and this file opens and closes both.

package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/internal/sleep"
	"github.com/kvconn/kvconn/kv"
)

// Config of a Transport; zero values get the defaults.
type Config struct {
	// ListenHost and ListenPort are where P listens for streams; port 0 is any
	// free one. Listen false: this agent only receives.
	Listen     bool
	ListenHost string
	ListenPort int
	// AdvertiseHost is the host that peers are told; empty means the one at
	// which they found the registry.
	AdvertiseHost      string
	Streams            int           // most connections to a peer; P uses only as many as pay; DefaultStreams, at most 64
	First              int           // connections of a peer that are opened and used at once; FirstStreams
	FrameBytes         uint64        // most bytes of a frame; 2 MiB
	StallTimeout       time.Duration // no progress for so long ends a stream; core.DefaultStallTimeout
	DialTimeout        time.Duration // core.DefaultConnectTimeout
	MaxStreams         int           // accepted at a time; 4096, and a quarter of the process's descriptors
	MaxUnauthenticated int           // accepted besides these, while they have not shown their ticket; 256
	// Guard, if set, can refuse the IP address and port of a peer's resolved endpoint, each
	// time before it is dialled.
	Guard func(endpoint, address string) error
	// Encrypt says whether streams are encrypted. A peer learns it by its ticket.
	Encrypt Encryption
	// Mover, if set, copies what lies in device memory.
	Mover Mover
	// CloseGrace is how long Close waits for the copies of a device that does not answer; 2 s.
	CloseGrace time.Duration
	Logger     *zap.Logger
}

const (
	DefaultStreams = 8 // the most connections to a peer
	FirstStreams   = 2 // those that D opens at once; each further one when P asks for it
)

func (c Config) withDefaults() Config {
	if c.Streams <= 0 {
		c.Streams = DefaultStreams
	}
	c.Streams = min(c.Streams, maxPeerStreams)
	if c.First <= 0 {
		c.First = FirstStreams
	}
	c.First = min(c.First, c.Streams)
	if c.FrameBytes == 0 {
		c.FrameBytes = 2 << 20
	}
	c.FrameBytes = min(c.FrameBytes, maxFrame)
	if c.StallTimeout <= 0 {
		c.StallTimeout = core.DefaultStallTimeout
	}
	if c.DialTimeout <= 0 {
		c.DialTimeout = core.DefaultConnectTimeout
	}
	if c.MaxStreams <= 0 {
		c.MaxStreams = 4096
		var limit unix.Rlimit
		if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) == nil {
			c.MaxStreams = int(min(uint64(c.MaxStreams), max(limit.Cur/4, 16)))
		}
	}
	if c.MaxUnauthenticated <= 0 {
		c.MaxUnauthenticated = min(256, c.MaxStreams/2)
	}
	if c.CloseGrace <= 0 {
		c.CloseGrace = 2 * time.Second
	}
	if c.Logger == nil {
		c.Logger = zap.NewNop()
	}
	return c
}

// Transport is the tcp core.Transport of one agent.
type Transport struct {
	cfg     Config
	layout  *kv.Layout
	devices devices
	sink    core.Sink
	ln      net.Listener
	port    int

	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	late     chan struct{} // closed CloseGrace after Close has begun, or when it ends
	lateOnce sync.Once
	wg       sync.WaitGroup // every goroutine of the transport

	receiver receiver
	sender   sender
	buffers  recordBuffers // for the records of sealed streams
}

var _ core.Cutter = (*Transport)(nil)

// errClosed ends what is under way at Close.
var errClosed = fmt.Errorf("tcp %w", core.ErrTransportClosed)

// New opens a Transport over the registered memory of layout. Outcomes go to
// sink until Close returns.
func New(cfg Config, layout *kv.Layout, sink core.Sink) (*Transport, error) {
	t := &Transport{cfg: cfg.withDefaults(), layout: layout, devices: devicesOf(cfg.Mover, layout), sink: sink, late: make(chan struct{})}
	t.buffers.create = newRecordBuffer
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.receiver.init(t)
	t.sender.init(t)
	if cfg.Listen {
		addr := net.JoinHostPort(cfg.ListenHost, fmt.Sprint(cfg.ListenPort))
		ln, err := net.Listen("tcp", addr)
		if errors.Is(err, syscall.EADDRINUSE) {
			return nil, fmt.Errorf("tcp: the port of %s is in use: stop the process that holds it, or set tcp_port to a free one, or to 0 for any: %w", addr, err)
		}
		if err != nil {
			return nil, fmt.Errorf("tcp: cannot listen on %s (tcp_listen_host, tcp_port): %w", addr, err)
		}
		t.ln = ln
		t.port = ln.Addr().(*net.TCPAddr).Port
		t.goRun("tcp accept", t.sender.accept)
	}
	return t, nil
}

// goRun starts a goroutine that Close waits for.
func (t *Transport) goRun(name string, f func()) {
	t.wg.Add(1)
	safe.Go(name, func() {
		defer t.wg.Done()
		f()
	})
}

// pause waits. It returns false if the transport was closed meanwhile.
func (t *Transport) pause(d time.Duration) bool { return sleep.For(t.ctx, d) == nil }

// Dismiss implements core.Transport.
func (t *Transport) Dismiss(peer core.AgentID) {
	t.sender.forgetPeer(peer)
	t.receiver.forgetPeer(peer)
}

// Name implements core.Transport.
func (t *Transport) Name() string { return "tcp" }

// Endpoint implements core.Transport.
func (t *Transport) Endpoint() string {
	if t.ln == nil {
		return ""
	}
	return net.JoinHostPort(t.cfg.AdvertiseHost, fmt.Sprint(t.port))
}

// Close implements core.Transport.
func (t *Transport) Close() error {
	t.cancel()
	late := func() { t.lateOnce.Do(func() { close(t.late) }) }
	defer late() // for a Revoke that waits for a copy of a device that does not answer
	defer time.AfterFunc(t.cfg.CloseGrace, late).Stop()
	if t.ln != nil {
		t.ln.Close()
	}
	t.receiver.close()
	t.sender.close()
	t.wg.Wait()
	t.buffers.close()
	return t.receiver.after()
}

// tune sets an open stream's bounds at both ends. A dead host is noticed by keep-alive
// when idle and by the user time-out when bytes are unacknowledged.
func (t *Transport) tune(c *net.TCPConn) {
	c.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 3})
	if raw, err := c.SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) {
			unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(t.cfg.StallTimeout.Milliseconds()))
		})
	}
}

// describe adds to an error of an open stream what it means here.
func (t *Transport) describe(err error) error {
	if errors.Is(err, errStuck) {
		return err
	}
	var ne net.Error
	if errors.As(err, &ne) && ne.Timeout() {
		return fmt.Errorf("no progress for %v: %w", t.cfg.StallTimeout, err)
	}
	if errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
		return fmt.Errorf("the peer closed the connection: %w", err)
	}
	return err
}
