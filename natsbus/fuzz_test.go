package natsbus

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/tinylib/msgp/msgp"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/alloctest"
	"github.com/kvconn/kvconn/wire"
)

// hostile is a server's end of a connection: it says text, again and again when
// it is endless, and counts what is read of it. Writes go nowhere.
type hostile struct {
	net.Conn
	text    []byte
	endless bool
	at      int
	read    int
}

func (h *hostile) Write(b []byte) (int, error)      { return len(b), nil }
func (h *hostile) Close() error                     { return nil }
func (h *hostile) SetDeadline(time.Time) error      { return nil }
func (h *hostile) SetReadDeadline(time.Time) error  { return nil }
func (h *hostile) SetWriteDeadline(time.Time) error { return nil }

func (h *hostile) Read(b []byte) (int, error) {
	if h.at == len(h.text) {
		if !h.endless || len(h.text) == 0 {
			return 0, io.EOF
		}
		h.at = 0
	}
	n := copy(b, h.text[h.at:])
	h.at += n
	h.read += n
	return n, nil
}

// FuzzUpgradeAnswer is the client's half against any server, also one that never
// stops: the answer is read to a bound, with bounded memory; only a 101 to nats
// becomes a connection, and of its bytes none is lost.
func FuzzUpgradeAnswer(f *testing.F) {
	const upgraded = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: nats\r\n\r\n"
	for _, s := range []string{
		upgraded + "INFO {}\r\n", upgraded, upgraded[:40], strings.Replace(upgraded, "nats", "websocket, nats", 1) + "x", strings.Replace(upgraded, "nats", "h2c", 1),
		"HTTP/1.1 200 OK\r\nContent-Length: 4294967296\r\n\r\nx", "HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 4\r\n\r\nfull", "HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffff\r\n", "HTTP/1.1 100 Continue\r\n\r\n" + upgraded, "HTTP/1.1 426 X\r\nA: " + strings.Repeat("b", maxResponse), "A: b\r\n", "\x15\x03\x01\x00\x02\x02\x16", "",
		"HTTP/1.1 101 X\r\nContent-Length: 9\r\nUpgrade: NATS\r\n\r\nINFO {}\r\n",
	} {
		f.Add([]byte(s), false)
		f.Add([]byte(s), true)
	}
	f.Fuzz(func(t *testing.T, text []byte, endless bool) {
		h := &hostile{text: text, endless: endless}
		var conn net.Conn
		var err error
		alloctest.Bound(t, 4<<20, func() { conn, err = clientUpgrade(h, "h:1") })
		if h.read > maxResponse {
			t.Errorf("%d bytes are read before the upgrade", h.read)
		}
		if err != nil {
			if len(err.Error()) > 5*maxResponse { // a byte is four where it is quoted
				t.Errorf("an error of %d bytes", len(err.Error()))
			}
			return
		}
		resp, perr := http.ReadResponse(bufio.NewReader(bytes.NewReader(text)), nil)
		if perr == nil && (resp.StatusCode != 101 || !hasToken(resp.Header["Upgrade"], "nats")) {
			t.Fatalf("%q is taken for an upgrade", text)
		}
		if endless {
			return
		}
		rest, err := io.ReadAll(conn)
		head := bytes.Index(text, []byte("\n\r\n"))
		if bare := bytes.Index(text, []byte("\n\n")); bare >= 0 && (head < 0 || bare < head) {
			head = bare - 1
		}
		if err != nil || head < 0 || !bytes.Equal(rest, text[head+3:]) {
			t.Errorf("of %q come %q, %v", text, rest, err)
		}
	})
}

// FuzzServer is nats.go over a link to a server that lets it in and then says
// anything: nothing ends this process, no claim of a size is believed, and the
// connection ends when the server's words do.
func FuzzServer(f *testing.F) {
	for _, s := range []string{
		"MSG _INBOX.a 1 5\r\nhello\r\nPING\r\n", "HMSG a 1 r 12 17\r\nNATS/1.0\r\n\r\nhello\r\n", "MSG a 1 0\r\n\r\nPING\r\n", "INFO {\"max_payload\":-1}\r\n+OK\r\n-ERR 'x'\r\n",
		"MSG a 1 9223372036854775807\r\nabc", "MSG a 1 1000000000000\r\nabc", "hmsg a 1 2 99999999999\r\nabc", "MSG a 1 00000000000000000000000000000007\r\nabc\r\n", "MSG a 1 18446744073709551617\r\n",
		"INFO \nMSG a 1 5\r\nMSG a 1 99999999999\r\nab", "-ERR\t\nMSG a 1 5\r\nMSG a 1 99999999999\r\nab", "MSG a 1 5\r0\r\nabcdef", "MSG \na 1 99999999999\r\nab", "MSG a 1 5\nhello\n", "MSG a 1 3\r\nabc\nMSG a 1 99999999999\r\nab\n",
		"MSG " + strings.Repeat("a", maxLine), "INFO " + strings.Repeat("{", maxLine), "PONG\r\nPONG\r\nMSGX 1\r\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		h := &hostile{text: append([]byte("INFO {\"max_payload\":1048576,\"headers\":true}\r\nPONG\r\n"), text...)}
		closed := make(chan struct{})
		alloctest.Bound(t, 2*maxPayload, func() {
			nc, err := nats.Connect("nats://h:1", nats.SetCustomDialer(dialTo{newGuarded(h, new(atomic.Pointer[nats.Subscription]))}), nats.SkipHostLookup(), nats.NoReconnect(),
				nats.IgnoreDiscoveredServers(), nats.ClosedHandler(func(*nats.Conn) { close(closed) }), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
			if err != nil {
				return
			}
			defer nc.Close()
			select {
			case <-closed:
			case <-time.After(within):
				t.Errorf("%q: the connection does not end", text)
			}
		})
	})
}

// dialTo is a nats.CustomDialer that has its connection already.
type dialTo struct{ conn net.Conn }

func (d dialTo) Dial(string, string) (net.Conn, error) { return d.conn, nil }

// hijacked is a ResponseWriter over one end of a pipe.
type hijacked struct {
	*httptest.ResponseRecorder
	conn net.Conn
	took bool
}

func (h *hijacked) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	h.took = true
	return h.conn, bufio.NewReadWriter(bufio.NewReader(h.conn), bufio.NewWriter(h.conn)), nil
}

// FuzzUpgradeRequest is the server's half: any HTTP request, and any bytes after
// it. Only a GET that wants nats becomes a connection; whatever follows, the
// connection ends with the client's, and its place is free again.
func FuzzUpgradeRequest(f *testing.F) {
	const connect = "CONNECT {\"name\":\"kvconn A B\",\"verbose\":true}\r\nPING\r\n"
	for _, after := range []string{"", connect, connect + "SUB kvconn.v1.agent.A 1\r\nPUB kvconn.v1.agent.B 4294967296\r\nx", connect + "PUB x 1\r\nabc\r\n", connect + "SUB > 1\r\nUNSUB 1\r\n",
		"HPUB x 9999999999 1\r\n", "CONNECT {\"name\":\"kvconn * >\"}\r\n", strings.Repeat("x", 5000), "\x16\x03\x01", "PONG\r\n+OK\r\n-ERR\r\nINFO {}\r\n"} {
		f.Add([]byte(good), []byte(after))
	}
	for _, head := range []string{"POST /nats HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: nats\r\nContent-Length: 4294967296\r\n\r\n", "GET /nats HTTP/1.1\r\nHost: h\r\n\r\n",
		"GET /nats HTTP/1.1\r\nHost: h\r\nConnection: close\r\nConnection: , upgrade ,\r\nUpgrade: h2c,NATS\r\n\r\n", "GET /nats HTTP/1.0\r\nConnection: Upgrade\r\nUpgrade: natsx\r\n\r\n", "CONNECT h:1 HTTP/1.1\r\n\r\n"} {
		f.Add([]byte(head), []byte(connect))
	}
	p := newPort(f, "127.0.0.1:0", ServerOptions{MaxConns: 2})
	f.Fuzz(func(t *testing.T, head, after []byte) {
		r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(head)))
		if err != nil || len(after) > 1<<16 {
			return
		}
		server, client := net.Pipe()
		w := &hijacked{ResponseRecorder: httptest.NewRecorder(), conn: server}
		var said []byte
		var wg sync.WaitGroup
		_ = client.SetDeadline(time.Now().Add(within)) // a hang ends here, and is told below
		wg.Go(func() { said, _ = io.ReadAll(client) })
		wg.Go(func() {
			_, err := client.Write(after)
			if err == nil || !strings.Contains(err.Error(), "timeout") {
				_ = client.Close()
			}
		})
		began := time.Now()
		p.upgrade(w, r)
		_ = server.Close()
		wg.Wait()
		if time.Since(began) >= within {
			t.Errorf("the client's end does not end the connection")
		}
		wants := r.Method == "GET" && hasToken(r.Header["Connection"], "upgrade") && hasToken(r.Header["Upgrade"], "nats")
		if w.took != wants || !wants && (w.Code != 405 && w.Code != 426) {
			t.Errorf("%q: upgraded %v, status %d", head, w.took, w.Code)
		}
		if !wants && len(said) > 0 {
			t.Errorf("%q: the connection is used without an upgrade: %q", head, said)
		}
		if len(said) > 0 && !bytes.HasPrefix([]byte("HTTP/1.1 101 Switching Protocols\r\n"), said[:min(len(said), 34)]) {
			t.Errorf("%q: the answer begins with %.60q", head, said)
		}
		p.clients.mu.Lock()
		defer p.clients.mu.Unlock()
		if len(p.clients.conns) != 0 || p.clients.authenticated != 0 {
			t.Fatalf("%d connections, %d clients are left", len(p.clients.conns), p.clients.authenticated)
		}
	})
}

// FuzzRecord: a registry that others write holds any key, headers and value.
// Reading an entry gives the key's own rank with an agent id that a subject may
// hold, or nothing. A short value allocates little.
func FuzzRecord(f *testing.F) {
	agent := &wire.Agent{Version: wire.Version, ID: "AGENT", EngineID: "e/0", Endpoints: []wire.Endpoint{{Transport: "tcp", Address: ":1"}}, Shapes: []wire.Shape{{Name: "k"}}}
	value, err := agent.MarshalMsg(nil)
	if err != nil {
		f.Fatal(err)
	}
	agent.ID = "*.>"
	wild, err := agent.MarshalMsg(nil)
	if err != nil {
		f.Fatal(err)
	}
	key := rankKey("e/0", 0, 0)
	f.Add(key, value, "17", "")
	f.Add(key, wild, "17", "")
	f.Add(key, value[:len(value)-1], "-1", "")
	f.Add(key, []byte{}, "99999999999999999999", "DEL")
	f.Add(rankKey("other", 0, 0), value, "x", "")
	f.Add(subtree+"e!.0.0.0", value, "", "")
	f.Add("", msgp.AppendArrayHeader([]byte("\x81\xa1s"), 65536), "", "")
	f.Fuzz(func(t *testing.T, key string, value []byte, since, op string) {
		m := &nats.Msg{Data: value, Header: nats.Header{jetstream.SequenceHeader: {"5"}}}
		m.Header.Set(sinceHeader, since)
		if op != "" {
			m.Header.Set(opHeader, op)
		}
		bound := uint64(64 << 20)
		if len(value) < 1024 {
			bound = 17 << 20
		}
		var r record
		var err error
		alloctest.Bound(t, bound, func() {
			r, err = directRecord(m, key)
			r, err = checked(key, portLink, r, err)
		})
		if name := keyName(key); strings.ContainsAny(name, "\r\n") {
			t.Errorf("%q is written as %q", key, name)
		}
		if err != nil || r.agent == nil {
			return
		}
		a := r.agent
		if op != "" || rankKey(a.EngineID, a.TPRank, a.PPRank) != key || !legalID(a.ID) || strings.ContainsAny(a.ID, ".*> \r\n") {
			t.Errorf("%q with %q is read as %+v", key, op, a)
		}
		if r.since > 0 && strings.TrimLeft(since, "+0") == "" {
			t.Errorf("%q is the time %d", since, r.since)
		}
	})
}

// FuzzStreamInfo: what a host says about its registry's stream makes an agent keep no more keys than it wants,
// and allocate little beside what was sent.
func FuzzStreamInfo(f *testing.F) {
	f.Add([]byte(`{"config":{"allow_direct":true},"state":{"subjects":{"a":1,"b":2,"c":3,"d":4}}}`))
	f.Add([]byte(`{"state":{"subjects":{"a":1}},"state":{"subjects":{"b":1,"b":1,"b":1,"b":1}}}`))
	f.Add([]byte(`{"state":{"subjects":null},"config":null,"error":null}`))
	f.Add([]byte(`{"state":{"subjects":["a",1]}}`))
	f.Add([]byte(`{"state":{"subjects":{"a":{},"b":-1}}}`))
	f.Add([]byte(`{"error":{"code":404,"err_code":10059,"description":"stream not found"}}`))
	f.Add([]byte(`{"error":{"err_code":"x"}}`))
	f.Fuzz(func(t *testing.T, answer []byte) {
		const most = 3
		var info *streamInfo
		var err error
		alloctest.Bound(t, 1<<20+8*uint64(len(answer)), func() { info, err = streamInfoOf(answer, most) })
		if err == nil && len(info.State.Subjects.keys) > most {
			t.Errorf("%q: %q are kept", answer, info.State.Subjects.keys)
		}
	})
}

// FuzzRequest gives a bus any bytes as a request, and a handler that answers
// with what it was asked: there is always an answer, it can be read, and text
// that is no request never reaches the handler.
func FuzzRequest(f *testing.F) {
	for _, r := range []*wire.Request{{Kind: wire.KindRenew, From: "d", Renew: &wire.Renew{Loads: []string{"t"}}}, {Kind: wire.KindFinish, From: "d", Finishes: []wire.Finish{{TransferID: "panic"}}}, {Kind: 9, From: "d"}} {
		b, err := r.MarshalMsg(nil)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		f.Add(append(b, 0))
	}
	f.Add(msgp.AppendArrayHeader([]byte("\x82\xa1k\x04\xa1x"), 4096))
	f.Fuzz(func(t *testing.T, data []byte) {
		called := false
		b := &Bus{common: common{opt: Options{Identity: named("A")}}}
		h := core.Handler(func(_ core.Via, r *wire.Request) *wire.Reply {
			called = true
			if r.Kind == wire.KindRenew {
				return &wire.Reply{Statuses: make([]uint8, len(r.Renew.Loads))}
			}
			return nil
		})
		b.handler.Store(&h)
		bound := uint64(64 << 20)
		if len(data) < 1024 {
			bound = 9 << 20
		}
		var rep *wire.Reply
		alloctest.Bound(t, bound, func() {
			rep = b.handle(&link{endpoint: endpoint{kind: clusterLink}}, "B", &nats.Msg{Subject: subject("A", "B"), Data: data})
		})
		req := new(wire.Request)
		if valid := wire.Decode(data, req) == nil && req.Kind != wire.KindJoin; called != valid || rep == nil || !valid && rep.Code != int(core.Refused) {
			t.Fatalf("%x: handler called %v, reply %+v", data, called, rep)
		}
		if _, err := rep.MarshalMsg(nil); err != nil {
			t.Error(err)
		}
	})
}

// FuzzCommandFilter: whatever an agent that has proved itself sends, the server sees commands of
// the protocol only, and no message that names an answer outside the agent's own inbox.
func FuzzCommandFilter(f *testing.F) {
	for _, s := range []string{"PING\r\n", "SUB a 1\r\nUNSUB 1 2\r\n", "PUB a _INBOX.A.x 3\r\nabc\r\nPING\r\n", "PUB _INBOX.B.1 1\r\na\r\n", "PUB a b 0\r\n\r\n", "PUB a _INBOX.AB.x 0\r\n\r\n",
		"PUB a _INBOX.A.x 3\r\nabcde", "HPUB a _INBOX.A.x 3 3\r\nabc\r\n", "pub a _INBOX.A.x 0\r\n\r\n", "PUB\ta\t_INBOX.A.x\t0\r\n\r\n", "PUB a _INBOX.A.x 0\rPUB b c 0\r\n\r\n", "PUB > _INBOX.A.x 0\n\r\n", "PUB a _INBOX.A.x -1\r\n", "CONNECT {}\r\n", strings.Repeat("x", maxCommand)} {
		f.Add([]byte(s))
	}
	request := regexp.MustCompile(`^PUB [^ *>]+ _INBOX\.A\.[^ *>]* ([0-9]+)$`)
	answer := regexp.MustCompile(`^PUB _INBOX\.[^ *>]* ([0-9]+)$`)
	other := regexp.MustCompile(`^(PING|PONG|SUB( [^ ]+){2,3}|UNSUB( [^ ]+){1,2})$`)
	f.Fuzz(func(t *testing.T, text []byte) {
		var out bytes.Buffer
		share := newBudget(1<<30).newShare("A", func() {})
		w := newWindow(share, newRegistryQueries())
		w.close()
		w.gone, w.over = false, make(chan struct{})
		w.left = 0 // nothing waits
		in := &commandFilter{from: bufio.NewReaderSize(bytes.NewReader(append([]byte("CONNECT {\"x\":1}\r\n"), text...)), maxCommand), to: bufio.NewWriter(&out), connect: "CONNECT {}\r\n", inbox: "_INBOX.A", window: w}
		if err := in.run(); err == nil {
			t.Fatal("it goes on after its end")
		}
		_ = in.to.Flush()
		head, rest, _ := strings.Cut(out.String(), "\r\n")
		if head != "CONNECT {}" {
			t.Fatalf("the server is told %q", head)
		}
		for len(rest) > 0 {
			line, more, ok := strings.Cut(rest, "\r\n")
			rest = more
			m := request.FindStringSubmatch(line)
			if m == nil {
				m = answer.FindStringSubmatch(line)
			}
			switch {
			case !ok:
				t.Fatalf("%q: half a command %q", text, line)
			case m != nil:
				n, _ := strconv.Atoi(m[1])
				if len(rest) < n+2 {
					return // the client ended in the middle of a message
				}
				if rest[n:n+2] != "\r\n" {
					t.Fatalf("%q: a message of another length", text)
				}
				rest = rest[n+2:]
			case !other.MatchString(line):
				t.Fatalf("%q: the server sees %q", text, line)
			}
		}
	})
}
