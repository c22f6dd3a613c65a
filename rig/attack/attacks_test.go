package attack

import (
	"bufio"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/wire"
)

// host is the attacker's own host, to which a client's request sends a decode agent. It
// speaks first with a greeting, and hears what the agent answers: "" if it goes away.
func (a *attacker) host(greeting string, then func(d *session)) (address string, heard <-chan string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(func() { _ = l.Close() })
	words := make(chan string, 16)
	go func() {
		for {
			raw, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer raw.Close()
				head := bufio.NewReader(raw)
				if _, err := http.ReadRequest(head); err != nil {
					return
				}
				_, _ = io.WriteString(raw, "HTTP/1.1 101 x\r\nConnection: Upgrade\r\nUpgrade: nats\r\n\r\n")
				conn := tls.Server(&prefixed{raw, head}, a.tls)
				if conn.Handshake() != nil {
					return
				}
				_, _ = io.WriteString(conn, greeting)
				br := bufio.NewReader(conn)
				word, _ := br.ReadString('\n')
				words <- word
				if word != "" && then != nil {
					then(&session{a: a, conn: conn, br: br, id: idOf(a.public)})
				}
			}()
		}
	}()
	return "http://" + l.Addr().String(), words
}

// TestHostThatAClientNames: a client of a decode engine names the attacker's host. The
// attacker passed what the agent proved on to prefill, asked in the agent's name, was given
// the agent's ticket, and read another client's KV cache: 32,768 bytes in plain text, and
// the agent's load got no report for 15 s. Now an agent with a token tells the attacker
// nothing. An agent without one tells it an id that is known nowhere else. The attacker may
// ask in its own name only.
func TestHostThatAClientNames(t *testing.T) {
	for _, token := range []string{"", "a-token-0123456789"} {
		p := start(t, map[string]any{"role": "prefill", "nats_token": token})
		d := start(t, map[string]any{"role": "decode", "nats_token": token})
		p.say("fill 170")
		a := newAttacker(t)
		address, heard := a.host("kvconn - -\n", nil)
		d.say("load mine 10 2 %s", address)
		word := <-heard
		if (word == "") != (token != "") {
			t.Fatalf("with the token %q the agent tells the host %q", token, word)
		}
		if token != "" {
			if _, err := a.enter(p.boot, "ask", ""); err == nil {
				t.Fatal("prefill lets it in without the token")
			}
		}
		s, err := a.enter(p.boot, "ask", token) // as a client that has the token by other means
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{d.id, p.id, "x"} {
			if rep, err := s.ask(p.id, name, aHello()); err == nil {
				t.Errorf("prefill answers a hello in the name of %s: %+v", name, rep)
			}
		}
		if rep, err := s.ask(p.id, s.id, aHello()); err != nil || rep.Code != 0 || len(rep.Tickets) != 1 {
			t.Fatalf("its own hello: %+v, %v", rep, err)
		}
		if l := transfer(t, p, d, "secret"); l.Code != "ok" {
			t.Errorf("the honest load beside it: %+v", l)
		}
		if got := d.say("bytes").Bytes; got["170"] != 4*layers*blockBytes {
			t.Errorf("the decode engine has %v", got)
		}
	}
	got(t, "another client's 32,768 bytes, in plain text", "0 bytes, and no id with a token")
}

// TestRankOfTheAttacker: an agent with the token of decode engines listened as a joined
// rank and got a part of that rank's loads, or took the rank's place: a decode engine
// reported ok with 32,768 bytes of the attacker's. Now the token does not let it join, and
// where all may join nobody takes the place of a rank that lives.
func TestRankOfTheAttacker(t *testing.T) {
	for _, token := range []string{"", "a-token-0123456789"} {
		p0 := start(t, map[string]any{"role": "prefill", "nats_token": token, "pp_size": 2})
		p1 := start(t, map[string]any{"role": "prefill", "nats_token": token, "pp_size": 2, "pp_rank": 1, "bootstrap_join": p0.boot})
		p0.say("fill 1")
		p1.say("fill 1")
		a := newAttacker(t)
		if _, err := a.enter(p0.boot, "join", token); (err == nil) != (token == "") {
			t.Errorf("with the token %q it joins: %v", token, err)
		}
		right, secret := "ask", token
		if token == "" {
			right = "join"
		}
		s, err := a.enter(p0.boot, right, secret)
		if err != nil {
			t.Fatal(err)
		}
		rank, err := s.registered(1)
		if err != nil || rank.ID != p1.id {
			t.Fatalf("the registry: %+v, %v", rank, err)
		}
		mine := *rank
		mine.ID, mine.Endpoints = s.id, []wire.Endpoint{{Transport: "tcp", Address: "127.0.0.1:1"}}
		data, err := (&wire.Request{Kind: wire.KindJoin, Join: &wire.Join{Agent: &mine, New: true, Since: 1 << 62}}).MarshalMsg(nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, subject := range []string{"kvconn.v1.join." + s.id, "kvconn.v1.join." + p1.id, "kvconn.v1.agent." + p0.id + "." + s.id} {
			rep := new(wire.Reply)
			if b, err := s.request(subject, data); err == nil && (wire.Decode(b, rep) != nil || rep.Code == 0) {
				t.Errorf("it takes the place of a rank by %s: %+v", subject, rep)
			}
		}
		for i, subject := range []string{"kvconn.v1.agent." + p1.id + ".*", "kvconn.v1.agent.*.*", "kvconn.v1.join.*"} {
			fmt.Fprintf(s.conn, "SUB %s agent %d\r\n", subject, 900+i)
			if _, err := s.request("kvconn.v1.agent."+p0.id+"."+s.id, nil); err == nil || !strings.Contains(err.Error(), "Permissions Violation") {
				t.Errorf("it listens at %s: %v", subject, err)
			}
		}
		if rank, err := s.registered(1); err != nil || rank.ID != p1.id {
			t.Errorf("the registry has %+v, %v", rank, err)
		}
	}
	got(t, "32,768 of its bytes taken for good, 2 to 3 of 6 loads", "0 bytes, 0 loads: it is no rank and hears nothing")
}

// TestAnswersThatWrite: one message whose subject for answers was a key of the registry
// made prefill, or the server itself, write there. After that no decode engine found
// prefill until its restart. Now the message ends its connection.
func TestAnswersThatWrite(t *testing.T) {
	p := start(t, map[string]any{"role": "prefill"})
	key := "$KV.kvconn_ranks.e" + base64.RawURLEncoding.EncodeToString([]byte("p0")) + ".0.0"
	renew, err := (&wire.Request{Kind: wire.KindRenew, Renew: &wire.Renew{Loads: []string{"a"}}}).MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, subject := range []string{"kvconn.v1.agent." + p.id, "$JS.API.STREAM.INFO.KV_kvconn_ranks", "$JS.API.STREAM.MSG.GET.KV_kvconn_ranks", "$JS.API.DIRECT.GET.KV_kvconn_ranks." + key} {
		a := newAttacker(t)
		s, err := a.enter(p.boot, "ask", "")
		if err != nil {
			t.Fatal(err)
		}
		if subject == "kvconn.v1.agent."+p.id {
			subject += "." + s.id
		}
		_ = s.publish(subject, key, renew)
		fmt.Fprint(s.conn, "PING\r\n")
		_ = s.conn.SetReadDeadline(time.Now().Add(bound))
		if rest, err := io.ReadAll(s.br); err != nil && !strings.Contains(err.Error(), "EOF") && !strings.Contains(err.Error(), "reset") || strings.Contains(string(rest), "PONG") {
			t.Errorf("%s with an answer at the registry: %q, %v", subject, rest, err)
		}
	}
	d := start(t, map[string]any{"role": "decode"})
	if l := transfer(t, p, d, "after"); l.Code != "ok" {
		t.Errorf("a new decode engine: %+v", l)
	}
	got(t, "new decode engines failed until prefill's restart", "its connection ends, a new decode engine loads")
}

// TestHostThatRenews: a host to which a decode agent was sent flooded the agent with
// renewals of 131,072 transfers: one start_load took 14.8 s, 6 of 8 honest loads failed,
// 870 MiB. Now an agent answers for transfers of agents that have said hello to it, a few
// at a time. In a cluster a prefill engine does so that decode has not met.
func TestHostThatRenews(t *testing.T) { atBoth(t, hostThatRenews) }

func hostThatRenews(t *scenario) {
	p, d := t.startPlain("prefill", nil), t.startPlain("decode", nil)
	calm := before(t, p, d)
	many := &wire.Renew{}
	for i := range 1024 {
		many.Loads, many.Claims = append(many.Loads, fmt.Sprint("a", i)), append(many.Claims, fmt.Sprint("b", i))
	}
	req := &wire.Request{Kind: wire.KindRenew, Renew: many}
	if t.cluster {
		heard := t.floodBy(t.open(t.options("prefill")), d.id, req)
		underWay(t, "answers of decode's", heard.answered.Load, 1)
		defer func() {
			if heard.told.Load() > 0 {
				t.Errorf("decode tells it something of %d transfers of others", heard.told.Load())
			}
		}()
	} else {
		t.floodAsHost(d, req)
	}
	h := &honest{}
	for i := range 100 {
		h.load(t, p, d, fmt.Sprint("honest", i))
	}
	got(t, "start_load 14.8 s, 6 of 8 honest loads failed, 870 MiB", "start_load at most %.2f ms, %s, %s", d.slowest, h.comparedWith(t, calm), d.growth(t))
	if !raced && d.slowest > 1000 {
		t.Errorf("the longest start_load took %.1f ms", d.slowest)
	}
	if !t.cluster { // a NATS server ends with its test
		settle(t, p, d)
	}
}

// floodAsHost sends d to a host that asks it again and again, each time as soon as the last is read.
func (s *scenario) floodAsHost(d *victim, req *wire.Request) {
	s.Helper()
	text, err := req.MarshalMsg(nil)
	if err != nil {
		s.Fatal(err)
	}
	flooding := make(chan struct{}, 1)
	a := newAttacker(s)
	address, _ := a.host("kvconn - -\n", func(s *session) {
		fmt.Fprint(s.conn, "ok\nINFO {\"server_id\":\"x\",\"version\":\"2.11.0\",\"proto\":1,\"headers\":true,\"max_payload\":8388608}\r\n")
		go func() {
			for {
				line, err := s.br.ReadString('\n')
				if err != nil {
					return
				}
				if strings.HasPrefix(line, "PING") {
					fmt.Fprint(s.conn, "PONG\r\n")
				}
				if strings.HasPrefix(line, "SUB kvconn.v1.agent.") { // the id under which d is here
					f := strings.Fields(line)
					put(flooding, struct{}{}) // d may come more than once
					go func() {
						for {
							if _, err := fmt.Fprintf(s.conn, "MSG %s %s _INBOX.%s.x %d\r\n%s\r\n", strings.Replace(f[1], "*", s.id, 1), f[len(f)-1], s.id, len(text), text); err != nil {
								return
							}
						}
					}()
				}
			}
		}()
		<-s.a.t.Context().Done() // the connection stays open
	})
	d.say("load mine 10 2 %s", address)
	await(s, "subscription of decode's", flooding)
}

// TestAnswersThatNobodyReads: 400 connections asked and did not read; 25 MB sent made
// prefill hold 5.4 GiB. As many could announce messages of 8 MiB each and never send them.
// Now all clients together have a budget, and the greediest connection is ended. It is an attack on a
// port: in a cluster such answers are the NATS server's, and no agent holds any.
func TestAnswersThatNobodyReads(t *testing.T) { atPorts(t, answersThatNobodyReads) }

func answersThatNobodyReads(t *scenario) {
	patient := map[string]any{"peer_timeout_s": 30} // prefill chews the flood when the first loads begin
	p, d := t.startPlain("prefill", patient), t.startPlain("decode", patient)
	calm := before(t, p, d)
	many := &wire.Renew{}
	for i := range 1024 {
		many.Loads = append(many.Loads, fmt.Sprint("a", i))
	}
	renew, err := (&wire.Request{Kind: wire.KindRenew, Renew: many}).MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	a := newAttacker(t)
	const conns = 64
	done := make(chan struct{}, conns)
	for range conns {
		s, err := a.enter(p.boot, "ask", t.token)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			defer func() { done <- struct{}{} }()
			in := "_INBOX." + s.id + ".x"
			_ = s.conn.SetWriteDeadline(time.Now().Add(4 * time.Second))
			fmt.Fprintf(s.conn, "SUB %s.> 1\r\n", in)
			for i := range 500 {
				if s.publish("$JS.API.STREAM.INFO.KV_kvconn_ranks", fmt.Sprint(in, ".", i), nil) != nil || s.publish("kvconn.v1.agent."+p.id+"."+s.id, fmt.Sprint(in, ".r", i), renew) != nil {
					return
				}
			}
			_, _ = fmt.Fprintf(s.conn, "PUB kvconn.v1.agent.%s.%s %s.z 8388608\r\nxx", p.id, s.id, in)
		}()
	}
	h := &honest{}
	for left := conns; left > 0 || h.all < loadsBefore; {
		select {
		case <-done:
			left--
		default:
			h.load(t, p, d, fmt.Sprint("beside", h.all))
		}
	}
	got(t, "5.4 GiB held after 25 MB sent", "%s, %s", p.growth(t), h.comparedWith(t, calm))
	settle(t, p, d)
}
