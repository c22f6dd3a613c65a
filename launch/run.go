// Everything is started, runs, and is stopped as soon as one part of it has ended.

package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/kvconn/kvconn/internal/sleep"
	"github.com/kvconn/kvconn/proxy"
)

// routerGrace is how long requests may go on when all is to stop.
const routerGrace = 2 * time.Second

// Run starts everything and returns when ctx, the benchmark or a server has ended. Nothing
// of it is alive then. The end of ctx is no error.
func Run(ctx context.Context, c Config) (err error) {
	if c, err = c.withDefaults(); err != nil {
		return err
	}
	program, err := engines[c.Engine].find(ctx, &c)
	if err != nil {
		return err
	}
	if err := errors.Join(c.giveDevices(ctx), c.checkPorts()); err != nil {
		return err
	}
	if err := os.MkdirAll(c.LogDir, 0o755); err != nil {
		return fmt.Errorf("launch: the logs' directory: %w", err)
	}
	var all []*process
	defer func() {
		fmt.Fprintln(c.Out, "stopping all servers")
		err = errors.Join(err, stopAll(all))
	}()
	routes := c.routes()
	var servers []*server
	add := func(role string, i int, ports []int, devices []string, bootstrap int) error {
		name, device := fmt.Sprintf("%s %d", role, i+1), ""
		if len(devices) > 0 {
			device = devices[i]
		}
		s, err := c.startServer(program, name, role, ports[i], bootstrap, device)
		if err != nil {
			return err
		}
		servers, all = append(servers, s), append(all, s.process)
		if device != "" {
			device = ", " + c.DeviceVariable + "=" + device
		}
		fmt.Fprintf(c.Out, "%s: %s%s, log %s\n", name, s.url, device, s.logPath)
		return nil
	}
	for i := range c.Prefill {
		if err := add(prefillRole, i, c.PrefillPorts, c.PrefillDevices, c.BootstrapPorts[i]); err != nil {
			return err
		}
		routes.Prefill = append(routes.Prefill, proxy.Prefill{URL: servers[len(servers)-1].url, BootstrapPort: c.BootstrapPorts[i]})
	}
	for i := range c.Decode {
		if err := add(decodeRole, i, c.DecodePorts, c.DecodeDevices, 0); err != nil {
			return err
		}
		routes.Decode = append(routes.Decode, servers[len(servers)-1].url)
	}
	if err := c.waitReady(ctx, servers); err != nil {
		return unlessEnded(ctx, err)
	}
	return unlessEnded(ctx, c.serve(ctx, program, routes, servers, &all))
}

// unlessEnded is nil for errors that the end of ctx explains.
func unlessEnded(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// serve runs the router until ctx, the benchmark or a server ends.
func (c Config) serve(ctx context.Context, program []string, routes proxy.Config, servers []*server, all *[]*process) error {
	logPath := filepath.Join(c.LogDir, "router.log")
	log, err := os.Create(logPath)
	if err != nil {
		return fmt.Errorf("launch: %w", err)
	}
	defer log.Close()
	listening, ended := make(chan net.Addr, 1), make(chan error, 1)
	routes.Listening = func(a net.Addr) { listening <- a }
	rctx, stop := context.WithCancel(ctx)
	defer func() {
		stop()
		<-ended // Run is bounded
	}()
	go func() {
		defer close(ended)
		ended <- proxy.Run(rctx, routes, fileLogger(log))
	}()
	select {
	case <-listening:
	case err := <-ended:
		return err
	}
	url := "http://" + net.JoinHostPort(c.Host, strconv.Itoa(c.Port))
	for begin := time.Now(); ; {
		if _, err = ask(ctx, http.MethodGet, url+"/health", "", nil, 5*time.Second); err == nil {
			break
		}
		if time.Since(begin) > time.Minute || ctx.Err() != nil {
			return fmt.Errorf("launch: the router does not find its servers: %w", err)
		}
		_ = sleep.For(ctx, 100*time.Millisecond)
	}
	if !engines[c.Engine].alone() {
		// Each server gets one request, as the router takes them in turn.
		for i := range max(c.Prefill, c.Decode) {
			if err := warmUp(ctx, url, c.servedName(), fmt.Sprint(i), c.apiKey()); err != nil {
				return fmt.Errorf("launch: the servers do not answer a request: %w; their logs, and the router's, are in %s", err, c.LogDir)
			}
		}
	}
	fmt.Fprintf(c.Out, "router: %s, log %s\nready: send requests to %s/v1/completions\n", url, logPath, url)
	// The first server to end ends all.
	failed := make(chan error, len(servers))
	quit := make(chan struct{})
	defer close(quit)
	for _, s := range servers {
		go func() {
			select {
			case <-s.ended:
				failed <- s.died()
			case <-quit:
			}
		}()
	}
	var benched <-chan struct{}
	var bench *process
	if c.Bench {
		if bench, err = c.startBench(program); err != nil {
			return err
		}
		*all = append(*all, bench)
		benched = bench.ended
	}
	select {
	case <-ctx.Done():
		return nil
	case err := <-failed:
		return err
	case err := <-ended:
		return err
	case <-benched:
		if bench.err != nil {
			return fmt.Errorf("launch: %s failed: %w; its output is above and in %s", bench.name, bench.err, bench.logPath)
		}
		return nil
	}
}

// startBench runs the engine's own benchmark on the router.
func (c Config) startBench(program []string) (*process, error) {
	name, command, defaults := engines[c.Engine].bench(&c, program)
	for _, d := range defaults {
		if !slices.ContainsFunc(c.BenchArgs, func(a string) bool { return a == d[0] || strings.HasPrefix(a, d[0]+"=") }) {
			command = append(command, d[0], d[1])
		}
	}
	command = append(command, c.BenchArgs...)
	logPath := filepath.Join(c.LogDir, "bench.log")
	log, err := os.Create(logPath)
	if err != nil {
		return nil, fmt.Errorf("launch: %w", err)
	}
	fmt.Fprintf(c.Out, "%s\n", strings.Join(command, " "))
	var env []string
	if key := c.apiKey(); key != "" { // not on the command line, which all can read
		env = []string{"OPENAI_API_KEY=" + key}
	}
	p, err := c.start(name, logPath, command, env, io.MultiWriter(c.Out, log))
	if err != nil {
		_ = log.Close()
		return nil, err
	}
	go func() { // ends with the benchmark
		<-p.ended
		_ = log.Close()
	}()
	return p, nil
}

func fileLogger(f *os.File) *zap.Logger {
	enc := zap.NewDevelopmentEncoderConfig()
	enc.EncodeTime = zapcore.TimeEncoderOfLayout("15:04:05.000")
	return zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(enc), zapcore.Lock(f), zap.InfoLevel))
}
