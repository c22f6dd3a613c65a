package local

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// say writes a hello and reads the challenge.
func (a *agent) hail(c *net.UnixConn, h hello) challenge {
	a.t.Helper()
	if _, err := c.Write(h.bytes()); err != nil {
		a.t.Fatal(err)
	}
	b, err := read(c, challengeSize)
	if err != nil {
		a.t.Fatal(err)
	}
	w, err := parseChallenge(b)
	if err != nil {
		a.t.Fatal(err)
	}
	return w
}

// responds says a response and reads the verdict.
func (a *agent) responds(c *net.UnixConn, cl *response) verdict {
	a.t.Helper()
	if _, err := c.Write(cl.bytes()); err != nil {
		a.t.Fatal(err)
	}
	b, err := read(c, verdictSize)
	if err != nil {
		a.t.Fatal(err)
	}
	v, _ := parseVerdict(b)
	return v
}

// poses meets an agent as the decode agent of a name, and leaves the frames to the test.
func (a *agent) poses(peer core.AgentID) *net.UnixConn {
	a.t.Helper()
	ticket, c := random(a.ticket(peer)), a.socket()
	h := hello{ticket.name(), newRandom()}
	w := a.hail(c, h)
	cl := response{kind: responseRead}
	var errno syscall.Errno
	if cl.read, errno = readRandom(linux{}, os.Getpid(), w.address); errno != 0 {
		a.t.Fatal(errno)
	}
	cl.prove(ticket, h, &w)
	if v := a.responds(c, &cl); v != verdictReady {
		a.t.Fatalf("verdict %d", v)
	}
	if b, err := read(c, 4+verdictSize); err != nil || string(b) != string(append(make([]byte, 4), verdictReady.bytes(0)...)) {
		a.t.Fatalf("%x, %v; want no memories, and to be taken", b, err)
	}
	return c
}

// TestUnauthenticated: whoever does not prove himself is refused, and the others go on.
func TestUnauthenticated(t *testing.T) {
	p, d := two(t, nil)
	moves(t, "before", p, d)
	ticket := random(p.ticket("unknown"))
	knows := func(change func(cl *response)) func(c *net.UnixConn) {
		return func(c *net.UnixConn) {
			h := hello{ticket.name(), newRandom()}
			w := p.hail(c, h)
			if !w.proof.equals(w.proofOf(ticket, h)) {
				t.Error("the prefill agent has not proved itself")
			}
			cl := response{kind: responseRead}
			cl.read, _ = readRandom(linux{}, os.Getpid(), w.address)
			cl.prove(ticket, h, &w)
			change(&cl)
			if v := p.responds(c, &cl); v == verdictReady || v == verdictAgain {
				t.Errorf("verdict %d", v)
				c.Close()
			}
		}
	}
	for name, does := range map[string]func(c *net.UnixConn){
		"leaves":       func(c *net.UnixConn) { _ = c.CloseWrite() },
		"junk":         func(c *net.UnixConn) { _, _ = c.Write([]byte(strings.Repeat("GET / HTTP/1.1\n", 3))) },
		"half a hello": func(c *net.UnixConn) { _, _ = c.Write(hello{}.bytes()[:9]); _ = c.CloseWrite() },
		"another version": func(c *net.UnixConn) {
			b := hello{name: ticket.name()}.bytes()
			b[3]++
			_, _ = c.Write(b)
		},
		"no ticket": func(c *net.UnixConn) {
			if w := p.hail(c, hello{name: newRandom()}); w.refused != refusedTicket || w.address != 0 {
				t.Errorf("%+v", w)
			}
		},
		"the name alone":   knows(func(cl *response) { cl.proof = newRandom() }),
		"another response": knows(func(cl *response) { cl.kind = responseBarred }), // of which the proof is not
	} {
		t.Run(name, func(t *testing.T) {
			c := p.socket()
			does(c)
			ends(t, c)
		})
	}
	t.Run("not what was put there", func(t *testing.T) {
		c := p.socket()
		h := hello{ticket.name(), newRandom()}
		w := p.hail(c, h)
		cl := response{kind: responseRead, read: newRandom()}
		cl.prove(ticket, h, &w)
		if v := p.responds(c, &cl); v != verdictWrong {
			t.Errorf("verdict %d", v)
			c.Close()
		}
		ends(t, c)
	})
	moves(t, "after", p, d)
	if down := p.sink.All("down", ""); len(down) != 0 {
		t.Errorf("the prefill agent was told %+v", down)
	}
}

// TestOverheardWords: what was said on one socket is worth nothing on another.
func TestOverheardWords(t *testing.T) {
	p, _ := two(t, nil)
	ticket := random(p.ticket("d2"))
	one, other := p.socket(), p.socket()
	h := hello{ticket.name(), newRandom()}
	w := p.hail(one, h)
	p.hail(other, h)
	cl := response{kind: responseRead}
	cl.read, _ = readRandom(linux{}, os.Getpid(), w.address)
	cl.prove(ticket, h, &w)
	if v := p.responds(other, &cl); v != verdictWrong {
		t.Errorf("verdict %d on another socket", v)
	}
	if v := p.responds(one, &cl); v != verdictReady {
		t.Errorf("verdict %d", v)
	}
}

// impostor listens where a dead agent did.
func impostor(t *testing.T, serve func(c *net.UnixConn)) (endpoint string) {
	t.Helper()
	name := newRandom().name()
	own, err := here(linux{})
	if err != nil {
		t.Fatal(err)
	}
	own.name = namePrefix + strings.Repeat("e", int(name[0]%9)+1) + time.Now().Format("150405.000000000")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: "@" + own.name, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { ln.Close(); <-done })
	go func() {
		defer close(done)
		for {
			c, err := ln.AcceptUnix()
			if err != nil {
				return
			}
			serve(c)
			c.Close()
		}
	}()
	return own.String()
}

// answers is a prefill agent's part of a meeting.
func answers(c *net.UnixConn, ticket random, change func(w *challenge)) (cl response, err error) {
	b, err := read(c, helloSize)
	if err != nil {
		return cl, err
	}
	h, err := parseHello(b)
	if err != nil {
		return cl, err
	}
	secret := new(random)
	*secret = newRandom()
	defer held(secret)()
	w := challenge{salt: newRandom(), address: uint64(uintptr(unsafe.Pointer(secret)))}
	change(&w)
	w.prove(ticket, h)
	if _, err := c.Write(w.bytes()); err != nil {
		return cl, err
	}
	if b, err = read(c, responseSize); err != nil {
		return cl, err
	}
	return parseResponse(b), nil
}

// TestImpostor: a process that listens at a dead agent's name proves nothing and learns nothing.
func TestImpostor(t *testing.T) {
	leaktest.Check(t)
	ticket := newRandom()
	for name, c := range map[string]struct {
		serve func(t *testing.T, c *net.UnixConn)
		says  string
	}{
		"closes": {func(t *testing.T, c *net.UnixConn) {}, "has not answered the hello"},
		"junk":   {func(t *testing.T, c *net.UnixConn) { _, _ = c.Write(make([]byte, challengeSize)) }, "no kvconn agent"},
		"no ticket": {func(t *testing.T, c *net.UnixConn) {
			if _, err := answers(c, newRandom(), func(*challenge) {}); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("it got more than a hello: %v", err)
			}
		}, "another program"},
		"an address of nothing": {func(t *testing.T, c *net.UnixConn) {
			cl, err := answers(c, ticket, func(w *challenge) { w.address = 8 })
			if err != nil || cl.kind != responseGiveUp {
				t.Errorf("%+v, %v", cl, err)
			}
			_, _ = c.Write(verdictBarred.bytes(uint32(syscall.EPERM)))
		}, "has not got what"},
		"a value of another": {func(t *testing.T, c *net.UnixConn) {
			_, _ = answers(c, ticket, func(*challenge) {})
			_, _ = c.Write(verdictWrong.bytes(0))
		}, "another process listens"},
		"a refusal":     {func(t *testing.T, c *net.UnixConn) { _, _ = c.Write((&challenge{refused: refusedFull}).bytes()) }, "as many connections"},
		"a new refusal": {func(t *testing.T, c *net.UnixConn) { _, _ = c.Write((&challenge{refused: 99}).bytes()) }, "code 99"},
	} {
		t.Run(name, func(t *testing.T) {
			d := start(t, "d", Config{}, nil)
			where := impostor(t, func(conn *net.UnixConn) { c.serve(t, conn) })
			if err := d.tr.Connect("p", where, ticket[:]); err != nil {
				t.Fatal(err)
			}
			d.down(c.says)
		})
	}
}

// TestSilentImpostor: who answers nothing holds D up for no longer than its timeout.
func TestSilentImpostor(t *testing.T) {
	d := start(t, "d", Config{ConnectTimeout: 50 * time.Millisecond}, nil)
	hold := make(chan struct{})
	where := impostor(t, func(*net.UnixConn) { <-hold })
	defer close(hold)
	ticket := newRandom()
	if err := d.tr.Connect("p", where, ticket[:]); err != nil {
		t.Fatal(err)
	}
	d.down("in time")
}

// TestOtherWords: each word of a meeting is in its proofs.
func TestOtherWords(t *testing.T) {
	ticket, h := newRandom(), hello{newRandom(), newRandom()}
	w := challenge{salt: newRandom(), address: 1 << 40}
	w.prove(ticket, h)
	cl := response{kind: responseRead, read: newRandom()}
	cl.prove(ticket, h, &w)
	for i := range challengeSize - 16 {
		if i < 4 { // the magic is checked by itself
			continue
		}
		b := w.bytes()
		b[i] ^= 1
		if got, err := parseChallenge(b); err != nil || got.proof.equals(got.proofOf(ticket, h)) {
			t.Errorf("byte %d of the challenge is not proved", i)
		}
	}
	for i := range responseSize - 16 {
		b := cl.bytes()
		b[i] ^= 1
		if got := parseResponse(b); got.proof.equals(got.proofOf(ticket, h, &w)) {
			t.Errorf("byte %d of the response is not proved", i)
		}
	}
	if w.proof.equals(w.proofOf(newRandom(), h)) || cl.proof.equals(cl.proofOf(newRandom(), h, &w)) {
		t.Error("another ticket proves the same")
	}
	if binary.BigEndian.Uint64(h.bytes()[4:]) == binary.BigEndian.Uint64(ticket[:]) {
		t.Error("the ticket is said in the clear")
	}
}

// another is a kernel under which this process is another user's than its sockets say.
type another struct{ linux }

func (another) user() int { return os.Geteuid() + 1 }

// TestOtherUser: a socket whose other end is another user's is refused on either side, whatever the
// endpoint says and though this process might read the other.
func TestOtherUser(t *testing.T) {
	leaktest.Check(t)
	p := start(t, "p", Config{}, another{})
	ticket := random(p.ticket("d"))
	c := p.socket()
	if w := p.hail(c, hello{ticket.name(), newRandom()}); w.refused != refusedUser || w.address != 0 {
		t.Errorf("%+v", w)
	}
	ends(t, c)
	q, d := start(t, "q", Config{}, nil), start(t, "d", Config{}, another{})
	there := q.tr.here
	there.uid++
	if err := d.tr.Connect("q", there.String(), q.ticket("d")); err != nil {
		t.Fatal(err)
	}
	d.down("another user's", "run both as one user")
}
