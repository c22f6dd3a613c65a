package tcp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// middle is a host on the path of streams. It does with P's bytes what a test says.
type middle struct {
	net.Listener
	t *testing.T
}

// between has each stream's bytes from P to D go through down, and D's to P through up. A nil
// one passes all on. The streams are numbered as they come.
func between(t *testing.T, p *agent, up, down func(stream int, from io.Reader, to io.Writer)) *middle {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := &middle{l, t}
	passOn := func(_ int, from io.Reader, to io.Writer) { _, _ = io.Copy(to, from) }
	if up == nil {
		up = passOn
	}
	if down == nil {
		down = passOn
	}
	ended := make(chan struct{})
	t.Cleanup(func() {
		l.Close()
		<-ended
	})
	go func() {
		defer close(ended)
		for n := 0; ; n++ {
			d, err := l.Accept()
			if err != nil {
				return
			}
			p, err := net.Dial("tcp", p.Endpoint())
			if err != nil {
				d.Close()
				continue
			}
			go func() {
				defer p.Close()
				up(n, d, p)
			}()
			go func() {
				defer d.Close()
				defer p.Close()
				down(n, p, d)
			}()
		}
	}()
	return m
}

const wholeRecord = recordBytes + tagBytes

// take reads so many bytes. It ends its goroutine if the stream ends before them: a peer that dials
// anew leaves such streams.
func take(from io.Reader, n int) []byte {
	b := make([]byte, n)
	if _, err := io.ReadFull(from, b); err != nil {
		runtime.Goexit()
	}
	return b
}

// sealedBlocks are two frames.
const sealedBlocks = 4

// sealedPair are two agents that encrypt, with one stream, P's memory painted and D's not.
func sealedPair(t *testing.T) (p, d *agent) {
	t.Helper()
	return sealedPairIn(t, bound)
}

// sealedPairIn is sealedPair of agents that wait so long for a stream of the other's.
func sealedPairIn(t *testing.T, dial time.Duration) (p, d *agent) {
	t.Helper()
	p = newSizedAgent(t, Config{Encrypt: EncryptMust, DialTimeout: dial}, sealedBlocks, testBlock)
	d = newSizedAgent(t, Config{Encrypt: EncryptMust, Streams: 1, DialTimeout: dial}, sealedBlocks, testBlock)
	for i := range p.mem {
		p.mem[i] = byte(i*7+i>>12) | 1
	}
	return p, d
}

// noWrongByte checks that each of D's bytes is P's, or was never written.
func noWrongByte(t *testing.T, p, d *agent) (landed int) {
	t.Helper()
	for i, b := range d.mem {
		if b == p.mem[i] {
			landed++
		} else if b != 0 {
			t.Fatalf("byte %d is %#x, want %#x, or 0: a record landed before its tag was right", i, b, p.mem[i])
		}
	}
	return landed
}

// start has a transfer of some blocks begin over an endpoint.
func start(t *testing.T, p, d *agent, endpoint string, id core.TransferID, blocks [][]kv.BlockID) {
	t.Helper()
	if err := d.Connect("p", endpoint, p.admit(t, "d")); err != nil {
		t.Fatal(err)
	}
	grant := d.expect(t, id, "p", blocks)
	p.Write(core.WriteOp{ID: id, Peer: "d", Grant: grant[:], Pairs: p.pairs(t, blocks)})
}

// TestManInTheMiddle: a host that changes P's bytes ends the transfer on both sides with a
// reason. No byte lands that P has not sent for that place.
func TestManInTheMiddle(t *testing.T) {
	for name, down := range map[string]func(from io.Reader, to io.Writer){
		"a bit of the hello's answer": func(from io.Reader, to io.Writer) {
			b := take(from, headerSize)
			b[12] ^= 4
			_, _ = to.Write(b)
		},
		"a bit of a header": func(from io.Reader, to io.Writer) {
			_, _ = io.CopyN(to, from, headerSize)
			b := take(from, sealedHeader)
			b[30] ^= 1
			_, _ = to.Write(b)
		},
		"a bit of a record": func(from io.Reader, to io.Writer) {
			_, _ = io.CopyN(to, from, headerSize+sealedHeader+3*wholeRecord)
			b := take(from, wholeRecord)
			b[recordBytes/2] ^= 0x80
			_, _ = to.Write(b)
		},
		"a bit of a tag": func(from io.Reader, to io.Writer) {
			_, _ = io.CopyN(to, from, headerSize+sealedHeader)
			b := take(from, wholeRecord)
			b[wholeRecord-1] ^= 1
			_, _ = to.Write(b)
		},
		"a record again": func(from io.Reader, to io.Writer) {
			_, _ = io.CopyN(to, from, headerSize+sealedHeader+wholeRecord)
			b := take(from, wholeRecord)
			_, _ = to.Write(append(b, b...))
		},
		"a record left out": func(from io.Reader, to io.Writer) {
			_, _ = io.CopyN(to, from, headerSize+sealedHeader+wholeRecord)
			take(from, wholeRecord)
		},
		"two records in another order": func(from io.Reader, to io.Writer) {
			_, _ = io.CopyN(to, from, headerSize+sealedHeader)
			a, b := take(from, wholeRecord), take(from, wholeRecord)
			_, _ = to.Write(append(b, a...))
		},
		"a frame again": func(from io.Reader, to io.Writer) {
			_, _ = io.CopyN(to, from, headerSize)
			b := take(from, sealedHeader+32*wholeRecord)
			_, _ = to.Write(append(b, b...))
		},
		"a frame of its own": func(_ io.Reader, to io.Writer) {
			_, _ = to.Write(frameBytes(header{kind: frameData, length: 1 << 20}))
		},
		"zeros": func(from io.Reader, to io.Writer) {
			_, _ = io.CopyN(to, from, headerSize)
			_, _ = to.Write(make([]byte, 1<<20))
		},
	} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			p, d := sealedPair(t)
			m := between(t, p, nil, func(_ int, from io.Reader, to io.Writer) {
				down(from, to)
				_, _ = io.Copy(to, from)
			})
			start(t, p, d, m.Addr().String(), "t", allBlocks(sealedBlocks))
			got := d.sink.Wait("received", "t", 1)
			if want := "a wrong tag"; got.Err == nil || name != "a frame of its own" && !strings.Contains(got.Err.Error(), want) {
				t.Errorf("received: %v, want %q in it", got.Err, want)
			}
			t.Logf("%d bytes had landed", noWrongByte(t, p, d))
			p.Stop("t") // as the decode agent's word does
			if o := p.sink.Wait("written", "t", 1); o.Err == nil {
				t.Error("P's half ended well")
			}
			noWrongByte(t, p, d)
			start(t, p, d, p.Endpoint(), "after", allBlocks(sealedBlocks)) // on a path without that host
			if o := d.sink.Wait("received", "after", 1); o.Err != nil {
				t.Errorf("afterwards: %v", o.Err)
			}
			if !bytes.Equal(d.mem, p.mem) {
				t.Error("wrong bytes afterwards")
			}
		})
	}
}

// TestOldStreamAgain: what P has said on one stream is worth nothing on the next.
func TestOldStreamAgain(t *testing.T) {
	leaktest.Check(t)
	p, d := sealedPair(t)
	var old bytes.Buffer
	recorded := make(chan struct{})
	m := between(t, p, nil, func(n int, from io.Reader, to io.Writer) {
		if n == 0 {
			_, _ = io.CopyN(io.MultiWriter(to, &old), from, headerSize+sealedHeader+5*wholeRecord)
			close(recorded)
			return // the stream is cut
		}
		<-recorded
		_, _ = to.Write(old.Bytes())
		_, _ = io.Copy(to, from)
	})
	start(t, p, d, m.Addr().String(), "t", allBlocks(sealedBlocks))
	if o := d.sink.Wait("received", "t", 1); !errors.Is(o.Err, errForged) {
		t.Errorf("received: %v", o.Err)
	}
	if n := noWrongByte(t, p, d); n > 5*recordBytes {
		t.Errorf("%d bytes have landed of 5 records", n)
	}
}

// TestHelloAgain: a hello that is said again opens no stream.
func TestHelloAgain(t *testing.T) {
	leaktest.Check(t)
	p, _ := sealedPair(t)
	ticket := p.admit(t, "d")
	said := sealedHello(random(ticket[:len(random{})]), secret(ticket[len(random{}):]), 0, 5, 0)
	c := dial(t, p)
	c.say(said.bytes())
	if h := c.next(); h.kind != frameHelloReply {
		t.Fatalf("answered by %+v", h)
	}
	p.refuses(t, "d", said.bytes())
	plain := said // of the other kind
	(&header{kind: frameHello, key: random(ticket[:len(random{})]).name(), length: 6 << numberBits}).encode(&plain.of)
	p.refuses(t, "d", append(plain.of[:], plain.got[:]...))
	p.refuses(t, "d", hello(random(ticket[:len(random{})]), 0, 7, 0)) // as one that has the ticket, and wants no encryption
}

// TestCutStream: a stream that is cut in the midst of a record, or between two, is no end of a
// transfer. It goes on where the last whole record ended.
func TestCutStream(t *testing.T) {
	for at, cuts := range map[int]int{headerSize - 1: 3, headerSize + sealedHeader - 1: 3, headerSize + sealedHeader: 3, headerSize + sealedHeader + wholeRecord + 100: 3, headerSize + sealedHeader + 32*wholeRecord: 1} {
		t.Run(fmt.Sprint(at), func(t *testing.T) {
			leaktest.Check(t)
			p, d := sealedPair(t)
			p.sender.grace, d.receiver.redial = bound, time.Millisecond
			m := between(t, p, nil, func(n int, from io.Reader, to io.Writer) {
				if n < cuts {
					_, _ = io.CopyN(to, from, int64(at))
					return
				}
				_, _ = io.Copy(to, from)
			})
			start(t, p, d, m.Addr().String(), "t", allBlocks(sealedBlocks))
			if o := d.sink.Wait("received", "t", 1); o.Err != nil {
				t.Fatalf("received: %v", o.Err)
			}
			if o := p.sink.Wait("written", "t", 1); o.Err != nil {
				t.Errorf("written: %v", o.Err)
			}
			if !bytes.Equal(d.mem, p.mem) {
				t.Error("wrong bytes")
			}
		})
	}
}

// TestForgedAnswer: D's answers are sealed too.
func TestForgedAnswer(t *testing.T) {
	leaktest.Check(t)
	p, d := sealedPair(t)
	m := between(t, p, func(_ int, from io.Reader, to io.Writer) {
		_, _ = io.CopyN(to, from, headerSize+16+16)
		b := take(from, sealedHeader)
		b[5] ^= 2
		_, _ = to.Write(b)
		_, _ = io.Copy(to, from)
	}, nil)
	start(t, p, d, m.Addr().String(), "t", allBlocks(sealedBlocks))
	if o := p.sink.Wait("written", "t", 1); !errors.Is(o.Err, errForged) {
		t.Errorf("written: %v", o.Err)
	}
	if o := d.sink.Wait("received", "t", 1); o.Err != nil {
		t.Errorf("received: %v", o.Err)
	}
}

// TestDowngrade: a host on the path that has D's hello say that it wants no encryption gets
// nothing from P, and D takes nothing that is not encrypted.
func TestDowngrade(t *testing.T) {
	leaktest.Check(t)
	p, d := sealedPairIn(t, time.Second) // P's write waits for it
	m := between(t, p, func(_ int, from io.Reader, to io.Writer) {
		b := take(from, headerSize+16+16)
		b[7] = byte(frameHello)
		_, _ = to.Write(append(b[:headerSize:headerSize], b[headerSize+16:]...))
		_, _ = io.Copy(to, from)
	}, nil)
	start(t, p, d, m.Addr().String(), "t", allBlocks(sealedBlocks))
	if o := p.sink.Wait("written", "t", 1); o.Err == nil {
		t.Error("P has written to a stream that is not encrypted")
	}
	d.Dismiss("p")
	if o := d.sink.Wait("received", "t", 1); o.Err == nil {
		t.Error("D has taken a stream that is not encrypted")
	}
	if n := noWrongByte(t, p, d); n != 0 {
		t.Errorf("%d bytes have landed", n)
	}
}
