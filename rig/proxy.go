// kvconn-rig bench-proxy: what a router costs a request, beside another router and none.

package rig

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvconn/kvconn/internal/freeport"
	"github.com/kvconn/kvconn/internal/sleep"
)

// routerBench is the command line of kvconn-rig bench-proxy.
type routerBench struct {
	clients []int
	rounds  int
	slice   time.Duration
	chunks  int
	prompt  int
	soak    int      // > 0: so many requests through our router, and its memory
	router  []string // our own, if it is not beside this program
	beside  []string
	json    bool
	log     string
}

// routerResult is one way to the engines with so many clients.
type routerResult struct {
	Way     string  `json:"way"`
	Clients int     `json:"clients"`
	Rate    float64 `json:"requests_per_s"` // median of the rounds
	Best    float64 `json:"best_requests_per_s"`
	P50     float64 `json:"p50_ms"` // of all requests, until the last byte
	P99     float64 `json:"p99_ms"`
	Count   int     `json:"requests"`
	CPU     float64 `json:"router_cpu_us"` // of the router, a request
	Engines float64 `json:"engines_cpu_us"`
	Callers float64 `json:"clients_cpu_us"`
}

func parseRouterBench(args []string) (routerBench, error) {
	var c routerBench
	fs := flag.NewFlagSet("kvconn-rig bench-proxy", flag.ContinueOnError)
	fs.SetOutput(os.Stderr)
	clients := fs.String("clients", "1,32", "closed-loop clients, several figures separated by commas")
	fs.IntVar(&c.rounds, "rounds", 5, "rounds; in each every way is measured once")
	fs.DurationVar(&c.slice, "time", 2*time.Second, "how long a way is measured in a round")
	fs.IntVar(&c.chunks, "chunks", 16, "events of a streamed answer")
	fs.IntVar(&c.prompt, "prompt", 1000, "bytes of a prompt")
	fs.IntVar(&c.soak, "requests", 0, "send so many requests through kvconn proxy, and print its memory after each tenth")
	router := fs.String("router", "", "the command of kvconn's router; by default the kvconn beside this program, with proxy")
	beside := fs.String("beside", "", "another router's command, to which --prefill URL PORT --decode URL --port N is added")
	fs.BoolVar(&c.json, "json", false, "print JSON")
	fs.StringVar(&c.log, "log", os.DevNull, "file for the output of the routers")
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return c, err
		}
		return c, fmt.Errorf("%w: %w", errUsage, err)
	}
	if fs.NArg() > 0 {
		return c, fmt.Errorf("%w: bench-proxy takes no argument %q", errUsage, fs.Arg(0))
	}
	c.router, c.beside = strings.Fields(*router), strings.Fields(*beside)
	for _, s := range strings.Split(*clients, ",") {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 || n > 1024 {
			return c, fmt.Errorf("%w: --clients %q: want numbers from 1 to 1024", errUsage, s)
		}
		c.clients = append(c.clients, n)
	}
	if c.rounds < 1 || c.slice <= 0 || c.chunks < 1 || c.prompt < 0 || c.soak < 0 {
		return c, fmt.Errorf("%w: want at least 1 round, some time and 1 chunk", errUsage)
	}
	return c, nil
}

// runBenchProxy measures the cost of a router. It sends the same requests straight to the
// decode engine and through each router, in turn. The engines compute nothing.
func runBenchProxy(ctx context.Context, args []string, out io.Writer) error {
	c, err := parseRouterBench(args)
	if errors.Is(err, flag.ErrHelp) {
		return nil
	}
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	log, err := os.OpenFile(c.log, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	var stubs stubAddrs
	engines, err := startChild(ctx, []string{self, stubsCommand, strconv.Itoa(c.chunks)}, log, &stubs)
	if err != nil {
		return fmt.Errorf("stub engines: %w", err)
	}
	defer engines.stop()

	type way struct {
		name, addr string
		pid        int
	}
	ways := []way{{"direct", stubs.Decode, 0}}
	ours := c.router
	if len(ours) == 0 { // as a build puts it
		ours = []string{filepath.Join(filepath.Dir(self), "kvconn"), "proxy"}
	}
	routers := [][]string{ours}
	if len(c.beside) > 0 {
		routers = append(routers, c.beside)
	}
	for i, command := range routers {
		name := []string{"kvconn proxy", "beside"}[i]
		ports, err := freeport.Take(1)
		if err != nil {
			return err
		}
		r, err := startChild(ctx, append(slices.Clone(command), "--prefill", "http://"+stubs.Prefill, stubs.Bootstrap,
			"--decode", "http://"+stubs.Decode, "--port", strconv.Itoa(ports[0])), log, nil)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		defer r.stop()
		addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(ports[0]))
		ways = append(ways, way{name, addr, r.cmd.Process.Pid})
	}

	body, err := json.Marshal(map[string]any{"model": "stub", "prompt": strings.Repeat("x", c.prompt), "max_tokens": c.chunks, "stream": true})
	if err != nil {
		return err
	}
	for _, w := range ways {
		if err := untilAnswered(ctx, w.addr, body, c.chunks); err != nil {
			return fmt.Errorf("%s at %s: %w", w.name, w.addr, err)
		}
	}
	if c.soak > 0 {
		return c.runSoak(ctx, ways[1].addr, ways[1].pid, body, out)
	}
	var results []routerResult
	if !c.json {
		fmt.Fprintf(out, "%-13s %8s %12s %8s %9s %9s %14s %9s %14s\n", "way", "clients", "requests/s", "best", "p50 ms", "p99 ms", "added p50 ms", "requests", "router CPU µs")
	}
	for _, n := range c.clients {
		rates, times := make([][]float64, len(ways)), make([][]time.Duration, len(ways))
		cpu := make([][3]time.Duration, len(ways))
		for range c.rounds {
			for i, w := range ways {
				pids := [3]int{w.pid, engines.cmd.Process.Pid, os.Getpid()}
				before, err := cpuTimes(pids)
				if err != nil {
					return err
				}
				took, elapsed, err := closedLoop(ctx, w.addr, n, load{time: c.slice}, body, c.chunks)
				if err != nil {
					return fmt.Errorf("%s with %d clients: %w", w.name, n, err)
				}
				rates[i] = append(rates[i], float64(len(took))/elapsed.Seconds())
				times[i] = append(times[i], took...)
				after, err := cpuTimes(pids)
				if err != nil {
					return err
				}
				for k := range after {
					cpu[i][k] += after[k] - before[k]
				}
			}
		}
		for i, w := range ways {
			slices.Sort(times[i])
			ms := func(q int) float64 { return times[i][len(times[i])*q/100].Seconds() * 1e3 }
			r := routerResult{Way: w.name, Clients: n, Rate: median(rates[i]), Best: slices.Max(rates[i]), P50: ms(50), P99: ms(99), Count: len(times[i])}
			each := func(k int) float64 { return cpu[i][k].Seconds() * 1e6 / float64(r.Count) }
			r.CPU, r.Engines, r.Callers = each(0), each(1), each(2)
			results = append(results, r)
			if c.json {
				continue
			}
			added := "-"
			if i > 0 {
				added = fmt.Sprintf("%.3f", r.P50-results[len(results)-1-i].P50)
			}
			fmt.Fprintf(out, "%-13s %8d %12.0f %8.0f %9.3f %9.3f %14s %9d %14.0f   (engines %.0f, clients %.0f)\n", r.Way, n, r.Rate, r.Best, r.P50, r.P99, added, r.Count, r.CPU, r.Engines, r.Callers)
		}
		if k := results[len(results)-len(ways):]; !c.json && len(ways) == 3 {
			fmt.Fprintf(out, "with %d clients kvconn proxy does %.1f times the requests of the one beside it (best rounds: %.1f), for %.1f times less processor time each\n",
				n, k[1].Rate/k[2].Rate, k[1].Best/k[2].Best, k[2].CPU/k[1].CPU)
		}
	}
	if c.json {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		return enc.Encode(map[string]any{"results": results})
	}
	fmt.Fprintln(out, "every answer had all its events")
	return nil
}

// runSoak prints the router's memory while requests go through it.
func (c routerBench) runSoak(ctx context.Context, addr string, pid int, body []byte, out io.Writer) error {
	n := c.clients[len(c.clients)-1]
	done := 0
	for tenth := range 10 {
		end := load{requests: max((c.soak*(tenth+1)/10-done)/n, 1)}
		took, _, err := closedLoop(ctx, addr, n, end, body, c.chunks)
		if err != nil {
			return err
		}
		done += len(took)
		rss, err := residentKiB(pid)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "after %7d requests, %d clients: %.1f MiB resident\n", done, n, float64(rss)/1024)
	}
	return nil
}

// cpuTimes are the processor times of processes so far; 0 where the way has no router.
func cpuTimes(pids [3]int) (out [3]time.Duration, err error) {
	for i, pid := range pids {
		if pid == 0 {
			continue
		}
		if out[i], err = cpuTime(pid); err != nil {
			return out, err
		}
	}
	return out, nil
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

// benchStart bounds how long a router may take until it answers.
const benchStart = 60 * time.Second

// untilAnswered asks until a router has found its engines.
func untilAnswered(ctx context.Context, addr string, body []byte, chunks int) error {
	for deadline := time.Now().Add(benchStart); ; {
		_, _, err := closedLoop(ctx, addr, 1, load{requests: 1}, body, chunks)
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("no answer within %v: %w", benchStart, err)
		}
		if err := sleep.For(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
}

// load says when a client has sent enough: after a time, or so many requests.
type load struct {
	time     time.Duration
	requests int
}

// closedLoop has n clients, each with a connection, that send the next request when they
// have the whole answer to the last. It returns how long each request took.
func closedLoop(ctx context.Context, addr string, n int, enough load, body []byte, chunks int) ([]time.Duration, time.Duration, error) {
	request := fmt.Appendf(nil, "POST /v1/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", addr, len(body), body)
	took, errs := make([][]time.Duration, n), make([]error, n)
	var wg sync.WaitGroup
	start := time.Now()
	for i := range n {
		wg.Go(func() { took[i], errs[i] = oneClient(ctx, addr, enough, request, chunks) })
	}
	wg.Wait()
	return slices.Concat(took...), time.Since(start), errors.Join(errs...)
}

func oneClient(ctx context.Context, addr string, enough load, request []byte, chunks int) ([]time.Duration, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	in := bufio.NewReaderSize(conn, 16<<10)
	var answer bytes.Buffer
	var took []time.Duration
	began := time.Now()
	for {
		start := time.Now()
		if len(took) > 0 && (enough.requests > 0 && len(took) >= enough.requests || enough.time > 0 && start.Sub(began) > enough.time) {
			return took, nil
		}
		if err := conn.SetDeadline(start.Add(benchStart)); err != nil {
			return nil, err
		}
		if _, err := conn.Write(request); err != nil {
			return nil, err
		}
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			return nil, err
		}
		answer.Reset()
		if _, err := answer.ReadFrom(resp.Body); err != nil {
			return nil, err
		}
		took = append(took, time.Since(start))
		if got := bytes.Count(answer.Bytes(), []byte("data: ")); resp.StatusCode != http.StatusOK || got != chunks+1 {
			return nil, fmt.Errorf("%s with %d of %d events: %.200s", resp.Status, got, chunks+1, answer.Bytes())
		}
	}
}
