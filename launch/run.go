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

	"github.com/kvconn/kvconn/proxy"
)

// routerGrace is how long requests may go on when all is to stop.
const routerGrace = 2 * time.Second

// Run starts everything and returns when ctx has ended, the benchmark has, or a
// server; nothing of it is alive then. The end of ctx is no error.
func Run(ctx context.Context, c Config) (err error) {
	if c, err = c.withDefaults(); err != nil {
		return err
	}
	vllm, err := c.findVLLM()
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
	routes := proxy.Config{Host: c.Host, Port: c.Port, Retries: proxy.DefaultRetries, AccessLog: true, ShutdownTimeout: routerGrace}
	var servers []*server
	add := func(name, role string, port int, devices []string, i int, extra map[string]any) error {
		device := ""
		if len(devices) > 0 {
			device = devices[i]
		}
		s, err := c.startServer(vllm, name, role, port, device, extra)
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
		if err := add(fmt.Sprintf("prefill %d", i+1), "kv_producer", c.PrefillPorts[i], c.PrefillDevices, i, map[string]any{"bootstrap_port": c.BootstrapPorts[i]}); err != nil {
			return err
		}
		routes.Prefill = append(routes.Prefill, proxy.Prefill{URL: servers[len(servers)-1].url, BootstrapPort: c.BootstrapPorts[i]})
	}
	for i := range c.Decode {
		if err := add(fmt.Sprintf("decode %d", i+1), "kv_consumer", c.DecodePorts[i], c.DecodeDevices, i, nil); err != nil {
			return err
		}
		routes.Decode = append(routes.Decode, servers[len(servers)-1].url)
	}
	if err := c.waitReady(ctx, servers); err != nil {
		return unlessEnded(ctx, err)
	}
	return unlessEnded(ctx, c.serve(ctx, vllm, routes, servers, &all))
}

// unlessEnded is nil for errors that the end of ctx explains.
func unlessEnded(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// serve runs the router until it is enough.
func (c Config) serve(ctx context.Context, vllm string, routes proxy.Config, servers []*server, all *[]*process) error {
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
		if _, err = ask(ctx, http.MethodGet, url+"/health", nil, 5*time.Second); err == nil {
			break
		}
		if time.Since(begin) > time.Minute || ctx.Err() != nil {
			return fmt.Errorf("launch: the router does not find its servers: %w", err)
		}
		wait(ctx, 100*time.Millisecond)
	}
	fmt.Fprintf(c.Out, "router: %s, log %s\nready: send requests to %s/v1/completions\n", url, logPath, url)
	// Whichever server ends first ends all.
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
		if bench, err = c.startBench(vllm); err != nil {
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
			return fmt.Errorf("launch: vllm bench serve failed: %w; its output is above and in %s", bench.err, bench.logPath)
		}
		return nil
	}
}

// startBench runs vLLM's own benchmark on the router. The arguments are those of
// vLLM's launch script for Mooncake, unless BenchArgs say otherwise.
func (c Config) startBench(vllm string) (*process, error) {
	command := []string{vllm, "bench", "serve"}
	for _, d := range [][2]string{{"--backend", "vllm"}, {"--host", c.Host}, {"--port", strconv.Itoa(c.Port)}, {"--model", c.Model},
		{"--served-model-name", c.servedName()}, {"--seed", strconv.FormatInt(time.Now().Unix(), 10)}, {"--dataset-name", "random"},
		{"--random-input-len", "7500"}, {"--random-output-len", "200"}, {"--num-prompts", "200"}, {"--burstiness", "100"}, {"--request-rate", "2"}} {
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
	p, err := c.start("vllm bench serve", logPath, command, nil, io.MultiWriter(c.Out, log))
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

func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
