// bench-proxy's engines, in a process of their own, compute nothing.

package rig

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"

	"github.com/kvconn/kvconn/bootstrap"
	"github.com/kvconn/kvconn/rig/stubengine"
)

// stubsCommand is the hidden command of bench-proxy's engines.
const stubsCommand = "__stubs"

// stubAddrs is the line that it prints: host:port of each, and the bootstrap port.
type stubAddrs struct {
	Prefill, Decode, Bootstrap string
}

// runStubs serves a prefill and a decode engine that compute nothing until its
// input ends.
func runStubs(ctx context.Context, args []string, in io.Reader, out io.Writer) error {
	if len(args) != 1 {
		return errUsage
	}
	chunks, err := strconv.Atoi(args[0])
	if err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	var table bootstrap.Table
	if err := table.Register(bootstrap.Registration{EngineID: "stub", Addr: "tcp://127.0.0.1:1"}); err != nil {
		return err
	}
	engine := stubengine.Options{Model: "stub", Chunks: chunks}
	boot := &http.Server{Handler: bootstrap.NewHandler(&table, nil, nil), ReadHeaderTimeout: childStop}
	var addrs []net.Addr
	for _, serve := range []func(net.Listener){
		func(l net.Listener) { stubengine.Minimal(l, engine) },
		func(l net.Listener) { stubengine.Minimal(l, engine) },
		func(l net.Listener) { _ = boot.Serve(l) }, // ends by Close
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		defer l.Close()
		go serve(l)
		addrs = append(addrs, l.Addr())
	}
	defer boot.Close()
	_, bootstrapPort, err := net.SplitHostPort(addrs[2].String())
	if err != nil {
		return err
	}
	if err := json.NewEncoder(out).Encode(stubAddrs{addrs[0].String(), addrs[1].String(), bootstrapPort}); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, in)
	return err
}
