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

// connsPerRequest is how many connections there may be for each of MaxRequests,
// most of them idle.
const connsPerRequest = 2

// maxLongHeads bounds the bytes of headers that have not come whole.
const maxLongHeads = 2 << 20

// What the router's memory may be beside bodies: of each request under way, and of the rest.
const (
	requestMemory = 128 << 10
	otherMemory   = 64 << 20
)

// boundHeap has Go collect what was let go before there is more of it than of what is held: by itself Go lets a heap
// double. undo is for the end. A bound that was set already stays, as by GOMEMLIMIT.
func boundHeap(cfg Config) (undo func()) {
	// A text of which the chunks become one is held twice, one at a time.
	most := cfg.BodyMemory + cfg.BodyMemory/4 + cfg.MaxBody + int64(cfg.MaxRequests)*requestMemory + otherMemory
	if debug.SetMemoryLimit(-1) != math.MaxInt64 {
		return func() {}
	}
	debug.SetMemoryLimit(most)
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
		ReadHeaderTimeout: time.Minute, // a host that stands still for some seconds loses no request
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		MaxConns:          connsPerRequest * p.cfg.MaxRequests,
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
