package stubengine

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
)

// Minimal serves completions as Handler does, each event in a write of its own, with as
// little work as can be: a benchmark is to measure the router, not the engine. It knows
// /health, and takes every POST for a completion with a Content-Length. It returns when
// the listener and its connections are closed.
func Minimal(l net.Listener, o Options) {
	var wg sync.WaitGroup
	defer wg.Wait()
	var mu sync.Mutex
	conns := map[net.Conn]bool{}
	defer func() {
		mu.Lock()
		defer mu.Unlock()
		for c := range conns {
			_ = c.Close()
		}
	}()
	chunk := func(text string) string { return strconv.FormatInt(int64(len(text)), 16) + "\r\n" + text + "\r\n" }
	var writes [][]byte
	head := "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
	for _, e := range events(o) {
		writes = append(writes, []byte(head+chunk(string(e))))
		head = ""
	}
	writes = append(writes, []byte(chunk("data: [DONE]\n\n")+"0\r\n\r\n"))
	whole := fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(answer(o)), answer(o))
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		mu.Lock()
		conns[c] = true
		mu.Unlock()
		wg.Go(func() {
			defer func() {
				_ = c.Close()
				mu.Lock()
				defer mu.Unlock()
				delete(conns, c)
			}()
			in := bufio.NewReaderSize(c, 16<<10)
			for {
				method, body, err := readRequest(in)
				if err != nil {
					return
				}
				out := [][]byte{whole}
				if bytes.Contains(body, []byte(`"stream":true`)) {
					out = writes
				} else if method != "POST" {
					out = [][]byte{[]byte("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")}
				}
				for _, b := range out {
					if _, err := c.Write(b); err != nil {
						return
					}
				}
			}
		})
	}
}

func readRequest(in *bufio.Reader) (method string, body []byte, err error) {
	length := 0
	for first := true; ; first = false {
		line, err := in.ReadSlice('\n')
		if err != nil {
			return "", nil, err
		}
		text := strings.TrimRight(string(line), "\r\n")
		if text == "" {
			break
		}
		if first {
			method, _, _ = strings.Cut(text, " ")
		} else if name, value, _ := strings.Cut(text, ":"); strings.EqualFold(name, "Content-Length") {
			if length, err = strconv.Atoi(strings.TrimSpace(value)); err != nil || length < 0 || length > maxBody {
				return "", nil, fmt.Errorf("stubengine: Content-Length %q", value)
			}
		}
	}
	body = make([]byte, length)
	_, err = io.ReadFull(in, body)
	return method, body, err
}
