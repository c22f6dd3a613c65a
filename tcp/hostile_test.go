package tcp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestUnauthenticatedDoNotKeepDecodersOut: connections that show no ticket are few, and the
// oldest is closed first. Connections that show a wrong ticket are closed.
func TestUnauthenticatedDoNotKeepDecodersOut(t *testing.T) {
	leaktest.Check(t)
	sink, logs := observer.New(zap.WarnLevel)
	p, d := newAgent(t, Config{MaxStreams: 4, MaxUnauthenticated: 8, DialTimeout: time.Hour, Logger: zap.New(sink)}), newAgent(t, Config{})
	pending := func() (n int) {
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		return p.sender.pending.conns.Len()
	}
	var silent []net.Conn
	for i := range 80 {
		c, err := net.Dial("tcp", p.Endpoint())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if i%2 == 0 {
			silent = append(silent, c)
			continue
		}
		_, _ = c.Write(hello(newRandom(), 0, 1, 0)) // may be refused already
		c.SetReadDeadline(time.Now().Add(bound))
		if rest, err := io.ReadAll(c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("an unauthenticated connection is let be, after %d bytes", len(rest))
		}
	}
	for _, c := range silent[:len(silent)-8] { // each made place for a later one
		c.SetReadDeadline(time.Now().Add(bound))
		if _, err := io.ReadAll(c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal("a silent unauthenticated connection is let be")
		}
	}
	if n := pending(); n > 8 {
		t.Fatalf("%d pending connections", n)
	}
	move(t, p, d, "t")
	var unlogged int
	until(t, "the decode agent's two streams are there", func() bool { // the transfer needed only one of them
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		unlogged = p.sender.pending.notLogged
		return p.sender.streams == 2
	})
	if logs.Len() == 0 || unlogged == 0 && logs.Len() >= 40 {
		t.Errorf("%d log lines and %d left out, of 72 connections", logs.Len(), unlogged)
	}
}

// TestMalformedFrames: a frame that no sender sends ends the stream and its transfers, and
// changes no byte.
func TestMalformedFrames(t *testing.T) {
	leaktest.Check(t)
	blocks := allBlocks(2)
	for name, frames := range map[string][]header{
		"beyond the end":      {{kind: frameData, position: 2*testBlock - 4, length: 8}},
		"wraps around":        {{kind: frameData, position: ^uint64(0) - 3, length: 8}},
		"twice the same byte": {{kind: frameData, position: 0, length: 0}, {kind: frameData, position: 4, length: 4}, {kind: frameData, position: 4, length: 4}},
		"unknown kind":        {{kind: 77, position: 0, length: 4}},
	} {
		t.Run(name, func(t *testing.T) {
			d := newAgent(t, Config{Streams: 1, StallTimeout: time.Hour})
			c := fakeSender(t, d, "p")
			grant := d.expect(t, "t", "p", blocks)
			for i, h := range frames {
				h.key = grant
				c.say(frameBytes(h))
				if i < len(frames)-1 { // the last frame is refused by its header
					c.say(make([]byte, h.length))
				}
			}
			until(t, "the transfer fails", func() bool { return len(d.sink.All("received", "t")) == 1 })
			if d.sink.All("received", "t")[0].Err == nil {
				t.Fatal("it ended well")
			}
			d.full(t, 0)
		})
	}
}

// rawConn speaks to an agent as no agent would.
type rawConn struct {
	net.Conn
	t *testing.T
}

func dial(t *testing.T, a *agent) *rawConn {
	t.Helper()
	return dialFrom(t, a, "127.0.0.1")
}

// dialFrom is dial from another address of this host.
func dialFrom(t *testing.T, a *agent, ip string) *rawConn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}
	c, err := d.Dial("tcp", a.Endpoint())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetReadDeadline(time.Now().Add(bound))
	return &rawConn{c, t}
}

// hello is the bytes with which peer opens a stream to a.
func (a *agent) hello(t *testing.T, peer core.AgentID, number int, attempt, received uint64) []byte {
	t.Helper()
	return hello(random(a.admit(t, peer)), number, attempt, received)
}

func frameBytes(h header) []byte {
	var b [headerSize]byte
	h.encode(&b)
	return b[:]
}

// say sends bytes; the other end may have closed the connection.
func (c *rawConn) say(b ...[]byte) { _, _ = c.Write(bytes.Join(b, nil)) }

// next reads a header.
func (c *rawConn) next() header {
	c.t.Helper()
	h, err := readHeader(c)
	if err != nil {
		c.t.Fatal(err)
	}
	return h
}

// ends waits until the agent closes the connection.
func (c *rawConn) ends() {
	c.t.Helper()
	if n, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
		c.t.Fatalf("the connection is let be, after %d bytes", n)
	}
}

// fakeP is a P that sends what the test orders.
type fakeP struct {
	net.Listener
	t      *testing.T
	ticket random
}

func newFakeP(t *testing.T, d *agent, peer core.AgentID) *fakeP {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	p := &fakeP{l, t, newRandom()}
	if err := d.Connect(peer, l.Addr().String(), p.ticket[:]); err != nil {
		t.Fatal(err)
	}
	return p
}

// stream takes d's next stream.
func (p *fakeP) stream() (*rawConn, header) {
	p.t.Helper()
	_ = p.Listener.(*net.TCPListener).SetDeadline(time.Now().Add(bound))
	conn, err := p.Accept()
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { conn.Close() })
	conn.SetReadDeadline(time.Now().Add(bound))
	c := &rawConn{conn, p.t}
	h, proof, err := readHello(c)
	if err != nil || h.kind != frameHello || h.key != p.ticket.name() || !proof.verify(p.ticket, secret{}) {
		p.t.Fatalf("the stream begins with %+v, %v, want a hello with the ticket", h, err)
	}
	return c, h
}

// fakeSender is the P of the first stream that d opens to it, and of no other.
func fakeSender(t *testing.T, d *agent, peer core.AgentID) *rawConn {
	t.Helper()
	p := newFakeP(t, d, peer)
	c, _ := p.stream()
	p.Close()
	return c
}

func (a *agent) expect(t testing.TB, id core.TransferID, peer core.AgentID, blocks [][]kv.BlockID) random {
	t.Helper()
	grant, err := a.Expect(id, peer, a.layout.Segments(blocks))
	if err != nil {
		t.Fatal(err)
	}
	return random(grant)
}

// full checks that an agent's memory holds one value throughout.
func (a *agent) full(t *testing.T, v byte) {
	t.Helper()
	for i, b := range a.mem {
		if b != v {
			t.Fatalf("byte %d is %d, want %d", i, b, v)
		}
	}
}

// TestHostileHello: a connection that does not begin with a ticket is closed within the
// bound, and disturbs nobody.
func TestHostileHello(t *testing.T) {
	leaktest.Check(t)
	hello := hello(newRandom(), 0, 1, 0)
	other := bytes.Clone(hello)
	other[3]++ // the version
	p, d := newAgent(t, Config{DialTimeout: 3 * time.Second}), newAgent(t, Config{})
	move(t, p, d, "before")
	for name, c := range map[string]struct {
		bytes []byte
		then  func(c *rawConn)
	}{
		"nothing":                    {nil, (*rawConn).ends},
		"half a header":              {hello[:headerSize/2], (*rawConn).ends},
		"half a header, and the end": {hello[:headerSize/2], func(c *rawConn) { _ = c.Conn.(*net.TCPConn).CloseWrite(); c.ends() }},
		"garbage":                    {bytes.Repeat([]byte("GET / HTTP/1.1\r\n"), 64), (*rawConn).ends},
		"another version":            {other, (*rawConn).ends},
		"data first":                 {frameBytes(header{kind: frameData, length: 1 << 62}), (*rawConn).ends},
		"a wrong ticket": {hello, func(c *rawConn) {
			if h := c.next(); h.kind != frameLeave {
				c.t.Errorf("answered by %+v", h)
			}
			c.ends()
		}},
		"no ticket":    {frameBytes(header{kind: frameHello}), (*rawConn).ends},
		"half a hello": {hello[:headerSize+3], (*rawConn).ends},
	} {
		t.Run(name, func(t *testing.T) {
			raw := dial(t, p)
			raw.say(c.bytes)
			c.then(raw)
		})
	}
	move(t, p, d, "after")
	if down := p.sink.All("down", ""); len(down) != 0 {
		t.Errorf("told %+v", down)
	}
}

// TestHostileDecoder: a frame that no decode agent sends ends its own stream and
// transfers, and no other's.
func TestHostileDecoder(t *testing.T) {
	leaktest.Check(t)
	p, d := newAgent(t, Config{}), newAgent(t, Config{})
	attempt := uint64(0)
	for name, words := range map[string][]byte{
		"garbage":       bytes.Repeat([]byte{0xff}, 400),
		"hello again":   p.hello(t, "attacker", 0, 99, 0),
		"data":          frameBytes(header{kind: frameData, length: 1 << 62}),
		"unknown kind":  frameBytes(header{kind: 99}),
		"half a header": frameBytes(header{kind: frameAck})[:13],
		"long reason":   append(frameBytes(header{kind: frameFault, length: maxFault + 1}), make([]byte, maxFault+1)...),
		"half a reason": append(frameBytes(header{kind: frameFault, length: 40}), "why"...),
	} {
		t.Run(name, func(t *testing.T) {
			attacker := dial(t, p)
			attempt++
			attacker.say(p.hello(t, "attacker", 0, attempt, 0))
			id, down := core.TransferID(name), len(p.sink.All("down", ""))
			grant := newRandom()
			p.Write(core.WriteOp{ID: id, Peer: "attacker", Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
			if h := attacker.next(); h.kind != frameData || h.key != grant {
				t.Fatalf("begins with %+v", h)
			}
			attacker.say(words)
			_ = attacker.Conn.(*net.TCPConn).CloseWrite()
			if o := p.sink.Wait("written", id, 1); !errors.Is(o.Err, core.ErrConnectionLost) {
				t.Errorf("written with %v", o.Err)
			}
			until(t, "the loss is told", func() bool { return len(p.sink.All("down", "")) == down+1 })
			move(t, p, d, core.TransferID("beside "+name))
		})
	}
}

// TestLyingDecoder: acknowledgements of bytes that were not sent, and of transfers of
// other agents, are not believed.
func TestLyingDecoder(t *testing.T) {
	leaktest.Check(t)
	p := newAgent(t, Config{})
	good, attacker := dial(t, p), dial(t, p)
	good.say(p.hello(t, "good", 0, 1, 0))
	attacker.say(p.hello(t, "attacker", 0, 1, 0))
	grant, ends := newRandom(), newRandom()
	p.Write(core.WriteOp{ID: "t", Peer: "good", Grant: grant[:], Pairs: p.pairs(t, allBlocks(1))})
	if h := good.next(); h.key != grant || h.length != testBlock {
		t.Fatalf("begins with %+v", h)
	}
	if _, err := io.CopyN(io.Discard, good, testBlock); err != nil {
		t.Fatal(err)
	}
	attacker.say(frameBytes(header{kind: frameAck, key: grant, length: testBlock}), frameBytes(header{kind: frameNack, key: grant}))
	for _, n := range []uint64{0, testBlock - 1, testBlock + 1, 1 << 63} {
		good.say(frameBytes(header{kind: frameAck, key: grant, length: n}))
	}
	// If a transfer ends on each stream, all frames before it were read.
	for _, c := range []struct {
		peer core.AgentID
		conn *rawConn
	}{{"attacker", attacker}, {"good", good}} {
		p.Write(core.WriteOp{ID: core.TransferID(c.peer), Peer: c.peer, Grant: ends[:], Pairs: p.pairs(t, allBlocks(1))})
		c.conn.say(frameBytes(header{kind: frameNack, key: ends}))
		if o := p.sink.Wait("written", core.TransferID(c.peer), 1); !errors.Is(o.Err, core.ErrNotExpected) {
			t.Fatalf("a refused write ended with %v", o.Err)
		}
	}
	if told := p.sink.All("written", "t"); len(told) != 0 {
		t.Fatalf("told %+v", told)
	}
	p.Write(core.WriteOp{ID: "again", Peer: "good", Grant: grant[:], Pairs: p.pairs(t, allBlocks(1))})
	if o := p.sink.Wait("written", "again", 1); o.Err == nil {
		t.Fatal("one grant served two transfers")
	}
	good.say(frameBytes(header{kind: frameAck, key: grant, length: testBlock}))
	if o := p.sink.Wait("written", "t", 1); o.Err != nil || o.Stats.Bytes != testBlock {
		t.Fatalf("written: %+v", o)
	}
}

// TestStreamsOfOnePeer: one ticket opens one stream of each number.
func TestStreamsOfOnePeer(t *testing.T) {
	leaktest.Check(t)
	p, d := newAgent(t, Config{MaxStreams: 4 * maxPeerStreams}), newAgent(t, Config{})
	for i := range maxPeerStreams + 9 {
		dial(t, p).say(p.hello(t, "many", i%maxPeerStreams, uint64(1+i), ^uint64(0)))
	}
	move(t, p, d, "beside")
	until(t, "each has said hello", func() bool {
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		return p.sender.peers["many"].open == maxPeerStreams && p.sender.pending.conns.Len() == 0
	})
}

// TestPeerThatNeverReads: the write to this peer ends when it has stalled. Writes to other
// peers do not wait for that.
func TestPeerThatNeverReads(t *testing.T) {
	leaktest.Check(t)
	p, d := newAgent(t, Config{StallTimeout: 3 * time.Second}), newAgent(t, Config{})
	stalled := dial(t, p)
	stalled.say(p.hello(t, "stalled", 0, 1, 0))
	grant := newRandom()
	p.Write(core.WriteOp{ID: "t", Peer: "stalled", Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
	for i := range 20 {
		move(t, p, d, core.TransferID(fmt.Sprint("beside", i)))
	}
	o := p.sink.Wait("written", "t", 1)
	if !errors.Is(o.Err, core.ErrConnectionLost) || !strings.Contains(o.Err.Error(), "no progress for 3s") {
		t.Fatalf("written: %+v", o)
	}
	until(t, "the loss is told", func() bool { return len(p.sink.All("down", "")) == 1 })
	move(t, p, d, "after")
}
