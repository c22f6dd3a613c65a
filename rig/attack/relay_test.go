package attack

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvconn/kvconn/wire"
)

// streamHello opens stream number n with a ticket, as package tcp does. A ticket with a second half is
// for an encrypted stream.
func streamHello(ticket []byte, attempt, n uint64) []byte {
	derive := func(key []byte, what string, of ...byte) []byte {
		mac := hmac.New(sha256.New, key)
		mac.Write([]byte("kvconn tcp " + what))
		mac.Write(of)
		return mac.Sum(nil)[:16]
	}
	first, second := ticket[:16], ticket[16:]
	kind := uint32(1)
	if len(second) > 0 {
		kind = 8
	}
	of := frame(kind, derive(first, "name"), 0, attempt<<6|n, nil)
	if len(second) == 0 {
		return append(of, derive(first, "hello", of...)...)
	}
	salt := make([]byte, 16)
	return slices.Concat(of, salt, derive(second, "sealed hello", slices.Concat(of, salt, first)...))
}

// TestHostBetween: a host that a client has named passes prefill's greeting and proof on to decode, and
// what decode answers on to prefill. Then it opens streams at prefill's data port, as many as decode
// has, with the ticket that it has got and with the newest attempt that there is, while decode loads.
// Such streams took the place of decode's. Now they are the host's own, and get nothing of decode's.
func TestHostBetween(t *testing.T) {
	for _, token := range []string{"", "a-token-0123456789"} {
		p := start(t, map[string]any{"role": "prefill", "nats_token": token})
		d := start(t, map[string]any{"role": "decode", "nats_token": token})
		p.say("fill 170")
		calm := before(t, p, d)
		a := newAttacker(t)
		at, err := a.greeted(p.boot)
		if err != nil {
			t.Fatal(err)
		}
		address, heard := a.host(at.greeting, nil)
		d.say("load mine 10 2 %s", address)
		word := await(t, "answer of decode's", heard)
		if (word == "") != (token != "") {
			t.Errorf("with the token %q decode answers prefill's greeting, which another host has passed on, by %q", token, word)
		}
		if word == "" { // then by prefill's own proof
			word = "ask token - " + strings.Fields(at.greeting)[1] + "\n"
		}
		_, _ = io.WriteString(at.conn, word) // prefill waits for 2 s
		if answer, _ := at.br.ReadString('\n'); answer == "ok\n" && token != "" {
			t.Error("prefill lets the host in")
		}
		s, err := a.enter(p.boot, "ask", token) // as a client that has the token by other means
		if err != nil {
			t.Fatal(err)
		}
		if rep, err := s.ask(p.id, d.id, aHello()); err == nil {
			t.Errorf("prefill answers a hello in decode's name: %+v", rep)
		}
		rep, err := s.ask(p.id, s.id, aHello())
		if err != nil || rep.Code != 0 || len(rep.Tickets) != 1 {
			t.Fatalf("its own hello: %+v, %v", rep, err)
		}
		rank, err := s.registered(0)
		if err != nil {
			t.Fatal(err)
		}
		_, port, _ := net.SplitHostPort(rank.Endpoints[0].Address)
		d.say("load %s 20 4 %s", "first", p.boot) // waits for prefill's engine
		var read atomic.Int64
		came := make(chan struct{}, 1)
		for n := range uint64(2) {
			c, err := net.Dial("tcp", "127.0.0.1:"+port)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Close() })
			if _, err := c.Write(streamHello(rep.Tickets[0].Ticket, 1<<57-1, n)); err != nil {
				t.Fatal(err)
			}
			if token != "" { // prefill's welcome says that it has taken the stream
				welcome := make([]byte, 40)
				if _, err := io.ReadFull(c, welcome); err != nil || binary.BigEndian.Uint32(welcome[4:]) != 9 {
					t.Fatalf("prefill refuses the host's own stream: %x, %v", welcome, err)
				}
			}
			go func() {
				for b := make([]byte, 64<<10); ; {
					n, err := c.Read(b)
					read.Add(int64(n))
					if n > 0 {
						put(came, struct{}{})
					}
					if err != nil {
						return
					}
				}
			}()
		}
		p.say("offer first 4 4")
		if l := d.report("first"); l.Code != "ok" {
			t.Errorf("the load that waited: %+v", l)
		}
		h := &honest{}
		for range loadsBefore {
			h.load(t, p, d, fmt.Sprint("secret", h.all))
		}
		stolen := read.Load()
		if stolen > 0 {
			t.Errorf("with the token %q the host has read %d bytes", token, stolen)
		}
		if got := d.say("bytes").Bytes; got["170"] != fourBlocks {
			t.Errorf("decode has %v", got)
		}
		// The streams do bring what the host loads itself.
		p.say("offer own 4 4")
		load := &wire.Load{TransferID: "own", Transport: "tcp", Grant: make([]byte, 16), Groups: []wire.Blocks{{IDs: wire.BlockIDs{0, 1, 2, 3}}}, LeaseMS: 30_000}
		if rep, err := s.ask(p.id, s.id, &wire.Request{Kind: wire.KindLoad, Load: load}); err != nil || rep.Code != 0 {
			t.Fatalf("its own load: %+v, %v", rep, err)
		}
		await(t, "byte of its own load", came)
		got(t, "another client's 32,768 bytes, in plain text", "%d bytes (token %q), %s", stolen, token, h.comparedWith(t, calm))
	}
}
