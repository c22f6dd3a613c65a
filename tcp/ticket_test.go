package tcp

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestTicketOfOneAgent: a ticket is one decode agent's, until it is dismissed. A stream that proves
// it is that agent's, and no other's.
func TestTicketOfOneAgent(t *testing.T) {
	leaktest.Check(t)
	for name, config := range map[string]Config{"plain": {}, "sealed": {Encrypt: EncryptMust}} {
		t.Run(name, func(t *testing.T) {
			p := newAgent(t, config)
			admit := func(d core.AgentID) []byte {
				ticket, err := p.Admit(d)
				if config.Encrypt == EncryptMust {
					ticket, err = p.AdmitSealed(d)
				}
				if err != nil {
					t.Fatal(err)
				}
				return ticket
			}
			said := func(ticket []byte, attempt uint64) []byte {
				if config.Encrypt == EncryptMust {
					h := sealedHello(random(ticket[:len(random{})]), secret(ticket[len(random{}):]), 0, attempt, 0)
					return h.bytes()
				}
				return hello(random(ticket), 0, attempt, 0)
			}
			first, second := admit("first"), admit("second")
			if bytes.Equal(first[:len(random{})], second[:len(random{})]) {
				t.Fatal("two agents have one ticket")
			}
			if again := admit("first"); !bytes.Equal(again, first) { // the streams of a transfer are dialled again with it
				t.Error("a second hello has got another ticket")
			}
			c := dial(t, p)
			c.say(said(first, 3))
			until(t, "its stream is open", func() bool { return p.open("first") == 3 })
			if n := p.open("second"); n != 0 {
				t.Errorf("attempt %d of another's stream is open", n)
			}
			p.Dismiss("first")
			c.ends()
			if anew := admit("first"); bytes.Equal(anew[:len(random{})], first[:len(random{})]) {
				t.Error("an agent that was dismissed has its ticket again")
			}
			late := dial(t, p)
			late.say(said(first, 4))
			if h := late.next(); h.kind != frameLeave {
				t.Errorf("a dead ticket is answered by %+v", h)
			}
			late.ends()
		})
	}
}

// refuses says hello to an agent, which is to close the connection and open no stream of peer with
// it. The result is how many bytes it answers.
func (a *agent) refuses(t *testing.T, peer core.AgentID, hello []byte) (answer int) {
	t.Helper()
	stream := func() (st *outStream) {
		a.sender.mu.Lock()
		defer a.sender.mu.Unlock()
		for _, slot := range a.sender.peers[peer].slots {
			if slot.stream != nil {
				st = slot.stream
			}
		}
		return st
	}
	old, c, closed := stream(), dial(t, a), make(chan int, 1)
	c.say(hello)
	go func() {
		b, _ := io.ReadAll(c)
		closed <- len(b)
	}()
	until(t, "the connection is closed", func() bool {
		if now := stream(); now != nil && now != old {
			t.Error("the hello has opened a stream")
			old = now
			_ = c.Close()
		}
		select {
		case answer = <-closed:
			return true
		default:
			return false
		}
	})
	return answer
}

// TestPlainHelloAgain: a hello in the clear opens one stream. Whoever has seen it on its way opens
// none with it, while that stream is open, when it has ended, or after the agent was met anew; nor
// with one that was held back until a newer one had come.
func TestPlainHelloAgain(t *testing.T) {
	leaktest.Check(t)
	p := newAgent(t, Config{})
	held, said := p.hello(t, "d", 0, 4, 0), p.hello(t, "d", 0, 5, 0)
	refused := func(what string, hello []byte, answer int) {
		t.Helper()
		if n := p.refuses(t, "d", hello); n != answer {
			t.Errorf("%s: %d bytes of an answer, want %d", what, n, answer)
		}
	}
	c := dial(t, p)
	c.say(said)
	until(t, "its stream is open", func() bool { return p.open("d") == 5 })
	refused("the hello again", said, 0)
	refused("one that was held back", held, 0)
	if n := p.open("d"); n != 5 {
		t.Errorf("attempt %d is open, want the agent's own", n)
	}
	_ = c.Close()
	until(t, "the stream has ended", func() bool { return p.open("d") == 0 })
	refused("the hello of a stream that has ended", said, 0)
	next := dial(t, p)
	next.say(p.hello(t, "d", 0, 6, 0)) // the agent itself comes back with its ticket
	until(t, "its next stream is open", func() bool { return p.open("d") == 6 })
	p.Dismiss("d")
	next.ends()
	p.admit(t, "d")
	refused("the hello of an agent that was met anew", said, headerSize) // "it is unknown", in a frame
}

// TestHelloHeldBack: a host on the path keeps the hello of an encrypted stream, and says it itself
// from elsewhere. It gets a stream of which it can read nothing, and whose end it cannot tell.
func TestHelloHeldBack(t *testing.T) {
	leaktest.Check(t)
	p, _ := sealedPair(t)
	ticket, blocks := p.admit(t, "d"), allBlocks(sealedBlocks)
	said := sealedHello(random(ticket[:len(random{})]), secret(ticket[len(random{}):]), 0, 5, 0)
	c := dial(t, p)
	c.say(said.bytes())
	grant := newRandom()
	p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: p.pairs(t, blocks)})
	got := make([]byte, headerSize+sealedHeader+wholeRecord)
	if _, err := io.ReadFull(c, got); err != nil {
		t.Fatal(err)
	}
	for at := 0; at < recordBytes; at += 64 {
		if bytes.Contains(got, p.mem[at:at+64]) {
			t.Fatalf("it reads bytes from %d on of what prefill sends", at)
		}
	}
	c.say(frameBytes(header{kind: frameAck, key: grant, length: sealedBlocks * testBlock}), make([]byte, sealedHeader))
	if o := p.sink.Wait("written", "t", 1); !errors.Is(o.Err, errForged) {
		t.Errorf("written: %v", o.Err)
	}
}
