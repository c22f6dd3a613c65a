// An engine may run on another host, and its driver here.

package chaos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/internal/sleep"
)

// meetBound is how long an engine on another host and its driver wait for each
// other.
const meetBound = 2 * time.Minute

// ServeEngine is RunEngine for a driver on another host: it takes the commands of the first
// driver that connects to address. Nothing proves which driver that is: ServeEngine is for
// tests, on a network of their own.
func ServeEngine(ctx context.Context, address string) error {
	ln, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	defer ln.Close()
	_ = ln.(*net.TCPListener).SetDeadline(time.Now().Add(meetBound))
	defer context.AfterFunc(ctx, func() { _ = ln.Close() })()
	conn, err := ln.Accept()
	if err != nil {
		return fmt.Errorf("no driver has come to %s within %v: %w", address, meetBound, err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	return RunEngine(conn, conn)
}

// Relay is the driver's end of ServeEngine: it stands for the engine's process,
// and ends when the engine has.
func Relay(ctx context.Context, address string, in io.Reader, out io.Writer) error {
	var conn net.Conn
	for end := time.Now().Add(meetBound); ; _ = sleep.For(ctx, 100*time.Millisecond) {
		d := net.Dialer{Timeout: time.Second}
		var err error
		if conn, err = d.DialContext(ctx, "tcp", address); err == nil {
			break
		}
		if ctx.Err() != nil || time.Now().After(end) {
			return fmt.Errorf("no engine at %s within %v: %w", address, meetBound, err)
		}
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	safe.Go("chaos relay", func() { // ends with the input, or with the process
		_, _ = io.Copy(conn, in)
		_ = conn.(*net.TCPConn).CloseWrite()
	})
	_, err := io.Copy(out, conn)
	if errors.Is(err, net.ErrClosed) {
		err = ctx.Err()
	}
	return err
}
