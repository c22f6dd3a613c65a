// The router as a process: its port, the bounds of its connections and of its memory, and its end.

package proxy

import (
	"context"
	"errors"
	"math"
	"net"
	"runtime/debug"
	"strconv"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/internal/httpserve"
)

// closeTimeout bounds what comes after ShutdownTimeout.
const closeTimeout = 5 * time.Second

// The router takes connsPerRequest connections for each of MaxRequests, and leastConns at least. Most of them are idle.
const (
	connsPerRequest = 2
	leastConns      = 2048
)

func maxConns(cfg Config) int { return max(leastConns, connsPerRequest*cfg.MaxRequests) }

// maxLongHeads bounds the bytes of headers that have not come whole.
const maxLongHeads = 2 << 20

// How much memory the router may take beside requests and answers: for each connection, and for all the rest.
const (
	connMemory  = 16 << 10
	otherMemory = 32 << 20
)

// memoryBound is how much the router's memory may grow at most, whatever clients do.
func memoryBound(cfg Config) int64 {
	const answers = 4 // a quarter of what requests may take
	// While the chunks of a text are joined, the text is in memory twice. Only one large text is joined at a time: hence MaxBody.
	return cfg.BodyMemory + cfg.BodyMemory/answers + cfg.MaxBody + int64(maxConns(cfg))*connMemory + otherMemory
}

// memoryFor is a --body-memory with room for so many requests and short bodies, as the defaults have.
func memoryFor(requests int) int64 { return int64(requests) * requestMemory / 7 * 8 }

// boundHeap sets a bound on Go's heap, so that Go collects memory that was let go early enough. By itself Go lets the heap double before
// it collects. Go's heap may pass its bound while it collects: so otherMemory stays free for that. A bound that is set already, as by
// GOMEMLIMIT, stays. The caller calls undo at the end.
func boundHeap(cfg Config) (undo func()) {
	if debug.SetMemoryLimit(-1) != math.MaxInt64 {
		return func() {}
	}
	debug.SetMemoryLimit(memoryBound(cfg) - otherMemory)
	return func() { debug.SetMemoryLimit(math.MaxInt64) }
}

// Run serves until ctx ends, lets running requests go on for ShutdownTimeout,
// ends them, and returns when nothing is left. The logger may be nil.
func Run(ctx context.Context, cfg Config, logger *zap.Logger) error {
	if logger != nil {
		cfg.Logger = logger
	}
	p, err := New(cfg)
	if err != nil {
		return err
	}
	defer boundHeap(p.cfg)()
	// Closing has a bound of its own: ctx has ended by then.
	closeProxy := func() error {
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		defer cancel()
		return p.Close(ctx)
	}
	srv := httpserve.New(p.Handler(), httpserve.Options{
		Name:              "proxy",
		PortSetting:       "--port",
		ReadHeaderTimeout: time.Minute,      // until its first byte, too
		HeadTimeout:       10 * time.Second, // a host that stands still for some seconds loses no request
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		MaxConns:          maxConns(p.cfg),
		MaxLongHeads:      maxLongHeads,
		Grace:             p.cfg.ShutdownTimeout,
		Logger:            p.log,
	})
	if err := srv.Listen(net.JoinHostPort(p.cfg.Host, strconv.Itoa(p.cfg.Port))); err != nil {
		return errors.Join(err, closeProxy())
	}
	p.log.Info("router is listening", zap.Stringer("address", srv.Addr()))
	served := make(chan error, 1)
	go func() { served <- srv.Serve() }()
	if p.cfg.Listening != nil {
		p.cfg.Listening(srv.Addr())
	}

	var serveErr error
	select {
	case <-ctx.Done():
		p.draining.Store(true)
		p.log.Info("draining", zap.Int("requests", len(p.places)), zap.Duration("at_most", p.cfg.ShutdownTimeout))
		err = srv.Close(context.Background())
		serveErr = <-served
	case serveErr = <-served:
		err = srv.Close(context.Background())
	}
	return errors.Join(serveErr, err, closeProxy())
}
