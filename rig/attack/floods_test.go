package attack

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/proxy"
)

// beRouter is the router of a command line. Its standard output says where it listens.
func beRouter(args []string) {
	die := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	cfg, err := proxy.ParseArgs(args)
	die(err)
	out := json.NewEncoder(os.Stdout)
	cfg.Listening = func(at net.Addr) { die(out.Encode(said{Ready: true, Bootstrap: at.String()})) }
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		for in := bufio.NewScanner(os.Stdin); in.Scan(); { // it ends with the test
			free()
			die(out.Encode(said{Call: "free"}))
		}
		cancel()
	}()
	die(proxy.Run(ctx, cfg, nil))
}

// serveEngine is a prefill or decode server. A request for the model "odd" is answered by odd, all others at once.
func serveEngine(t *testing.T, odd http.HandlerFunc) *httptest.Server {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/query" {
			_, _ = io.WriteString(w, `{"0":{"engine_id":"e0","worker_addr":{"0":{"0":"tcp://127.0.0.1:1"}}}}`)
			return
		}
		begin := make([]byte, 64)
		n, _ := io.ReadFull(r.Body, begin)
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		if strings.Contains(string(begin[:n]), `"odd"`) {
			odd(w, r)
			return
		}
		_, _ = io.WriteString(w, `{"choices":[{"text":"x"}],"kv_transfer_params":{"remote_engine_id":"e0","remote_block_ids":[1],"remote_host":"h","remote_port":1}}`)
	}))
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	return s
}

// startRouter starts a router before engines of which decode answers odd requests.
func startRouter(t *testing.T, odd http.HandlerFunc, options string) *victim {
	t.Helper()
	return startRouterBefore(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{}`) }, odd, options)
}

// startRouterBefore starts a router before a prefill and a decode server, which answer odd requests.
func startRouterBefore(t *testing.T, oddPrefill, oddDecode http.HandlerFunc, options string) *victim {
	t.Helper()
	prefill, decode := serveEngine(t, oddPrefill), serveEngine(t, oddDecode)
	u, err := url.Parse(prefill.URL)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), routerVariable+"="+fmt.Sprintf("--port 0 --no-access-log --prefill %s %s --decode %s %s", prefill.URL, u.Port(), decode.URL, options))
	v := &victim{t: t}
	v.run(cmd)
	v.boot = "http://" + v.until(func(l said) bool { return l.Ready }).Bootstrap
	for deadline := time.Now().Add(bound); ; time.Sleep(10 * time.Millisecond) {
		if resp, err := http.Get(v.boot + "/health"); err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return v
			}
		}
		if time.Now().After(deadline) {
			t.Fatal("the router is not ready")
		}
	}
}

// completeFrom makes an honest request from an address, on a connection of its own, with a prompt of so many bytes.
func (h *honest) completeFrom(t *testing.T, v *victim, from string, size int) {
	t.Helper()
	began := time.Now()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c := http.Client{Timeout: bound, Transport: &http.Transport{DisableKeepAlives: true, DialContext: d.DialContext}}
	resp, err := c.Post(v.boot+"/v1/completions", "application/json", strings.NewReader(`{"model":"m","prompt":"`+strings.Repeat("x", size)+`"}`))
	h.all++
	if err == nil {
		text, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode == http.StatusOK && strings.Contains(string(text), "choices") {
			h.well++
		} else {
			t.Logf("honest request: %s %s", resp.Status, text)
		}
	} else {
		t.Log("honest request: ", err)
	}
	h.times = append(h.times, time.Since(began))
}

// completions are honest requests from an address.
func completions(t *testing.T, v *victim, from string) *honest {
	t.Helper()
	h := &honest{}
	for range loadsBefore {
		h.completeFrom(t, v, from, 8<<10)
	}
	return h
}

// sendTime bounds what a client of a flood sends.
const sendTime = 3 * time.Second

// flood makes so many connections, and sends something on each. They stay open until the test ends.
func flood(t *testing.T, v *victim, n int, send func(c net.Conn)) (sent *sync.WaitGroup) {
	t.Helper()
	sent = &sync.WaitGroup{}
	for range n {
		c, err := net.Dial("tcp", strings.TrimPrefix(v.boot, "http://"))
		if err != nil {
			t.Log("flood: ", err)
			continue
		}
		t.Cleanup(func() { _ = c.Close() })
		sent.Go(func() {
			_ = c.(*net.TCPConn).SetReadBuffer(4 << 10) // of those that do not read
			_ = c.SetWriteDeadline(time.Now().Add(sendTime))
			send(c)
		})
	}
	return sent
}

// TestRouterFlood: clients that send the router much, or nothing, or that do not read what they get. Beside each it serves
// others as before, and holds little.
func TestRouterFlood(t *testing.T) {
	long := `{"model":"odd","prompt":"` + strings.Repeat("x", 31<<20) + `"}`
	modest := `{"model":"odd","stream":true,"prompt":"` + strings.Repeat("x", 512<<10) + `"}`
	short := `{"model":"odd","stream":true,"prompt":"` + strings.Repeat("x", 8<<10) + `"}`
	several := strings.Builder{}
	for i := range 255 { // as many as the router takes, with names as long as it keeps
		fmt.Fprintf(&several, `,"%042d":1`, i)
	}
	many := []string{`{"model":"odd"` + strings.Repeat(`,"":1`, 4090) + "}", `{"model":"odd"` + several.String() + "}"}
	post := func(body string, most int) func(c net.Conn) {
		return func(c net.Conn) {
			fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n", len(body))
			_, _ = io.WriteString(c, body[:most])
		}
	}
	chunked := func(c net.Conn) {
		fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n", len(long), long)
	}
	var fields strings.Builder
	for i := 0; fields.Len() < 18<<10; i++ {
		fmt.Fprintf(&fields, "%c%c%c:\r\n", 'a'+i%26, 'a'+i/26%26, 'a'+i/676)
	}
	hang := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	endless := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for b := []byte(strings.Repeat("data: {}\n\n", 1000)); ; {
			if _, err := w.Write(b); err != nil {
				return
			}
		}
	}
	begun := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: {}\n\n")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}
	const same, other = "127.0.0.1", "127.0.0.2" // whence honest requests come
	for _, a := range []struct {
		name, before string
		conns        int
		odd          http.HandlerFunc
		send         func(c net.Conn)
		honest       string
	}{
		{"the longest bodies", "3,459 MiB held for 24 of 40 MiB (at fd8c2a0)", 24, hang, post(long, len(long)), same},
		{"chunked bodies that never end", "2,203 MiB held for 24 of 40 MiB (at fd8c2a0)", 24, hang, chunked, same},
		{"requests that wait", "all of --max-requests were one client's to take (at 1ada3a7)", 1500, hang, post(short, len(short)), other},
		{"many streams that wait", "all of --max-requests were one client's to take (at 1ada3a7)", 1500, begun, post(short, len(short)), other},
		{"many members", "427 MiB held (at b0def7e)", 1500, hang, func(c net.Conn) {
			for _, body := range many {
				post(body, len(body))(c)
			}
		}, other},
		{"streams that nobody reads", "133 MiB held for 64, for as long as they last (at fd8c2a0)", 200, endless, post(modest, len(modest)), same},
		{"bodies that never come", "0 of 25 honest requests well (at 27c5a91), 946 MiB held (at fd8c2a0)", 2200, hang, post(long, 1), same},
		{"headers of 60 KB", "1,900 MiB held for 9,000", 9000, hang, func(c net.Conn) {
			fmt.Fprintf(c, "GET /health HTTP/1.1\r\nHost: h\r\nX-A: %s", long[len(long)-60000:])
		}, same},
		{"headers that never end", "362 MiB held (at 27c5a91)", 2200, hang, func(c net.Conn) { fmt.Fprintf(c, "GET /health HTTP/1.1\r\nHost: h\r\n%s", &fields) }, same},
		{"long headers without bodies", "not tried", 2200, hang, func(c net.Conn) {
			fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\nX-A: %s\r\n\r\n", long[1000:16<<10])
		}, same},
	} {
		t.Run(strings.ReplaceAll(a.name, " ", "-"), func(t *testing.T) {
			v := startRouter(t, a.odd, "") // at its defaults
			calm := completions(t, v, a.honest)
			v.watch()
			if raced {
				a.conns /= 8 // no figures are held to anything
			}
			sent := flood(t, v, a.conns, a.send)
			during := completions(t, v, a.honest)
			sent.Wait()
			h := completions(t, v, a.honest)
			v.watch()
			v.peak = v.mib("VmHWM")
			h.all, h.well = h.all+during.all, h.well+during.well // its times are those of a machine that makes the flood
			got(t, a.before, "%s, %s", h.comparedWith(t, calm), v.growth(t))
			if a.name == "the longest bodies" {
				settle(t, v)
			}
		})
	}
}

// TestRouterGreedyClient: a client fills the memory for bodies, and does so again whenever one of its bodies gives way. The
// large bodies of a client at another address are served.
func TestRouterGreedyClient(t *testing.T) {
	const size = 2 << 20
	v := startRouter(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, "") // at its defaults
	calm := &honest{}
	for range loadsBefore {
		calm.completeFrom(t, v, "127.0.0.2", size)
	}
	v.watch()
	ctx, cancel := context.WithCancel(t.Context())
	var greedy sync.WaitGroup
	t.Cleanup(func() { cancel(); greedy.Wait() })
	part := []byte(strings.Repeat("x", 64<<10))
	var filling sync.WaitGroup
	for range 48 { // all that large bodies may take
		filling.Add(1)
		full := sync.OnceFunc(filling.Done)
		greedy.Go(func() {
			defer full()
			for ctx.Err() == nil {
				c, err := net.Dial("tcp", strings.TrimPrefix(v.boot, "http://"))
				if err != nil {
					t.Log("greedy: ", err)
					return
				}
				stop := context.AfterFunc(ctx, func() { _ = c.Close() })
				fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n", size+1)
				for sent := 0; sent < size; sent += len(part) { // then it waits for its turn to give way, and keeps what it has
					if _, err = c.Write(part); err != nil {
						break
					}
				}
				full()
				if err == nil {
					_, _ = c.Read(make([]byte, 1))
				}
				stop()
				_ = c.Close()
			}
		})
	}
	filling.Wait()
	during, h := &honest{}, &honest{}
	for range loadsBefore {
		during.completeFrom(t, v, "127.0.0.2", size)
	}
	cancel()
	greedy.Wait()
	for range loadsBefore {
		h.completeFrom(t, v, "127.0.0.2", size)
	}
	v.watch()
	v.peak = v.mib("VmHWM")
	h.all, h.well = h.all+during.all, h.well+during.well // its times are those of a machine that makes the flood
	got(t, "0 honest requests well of 2 MiB, for as long as the client goes on (at 92e162a)", "%s, %s", h.comparedWith(t, calm), v.growth(t))
}
