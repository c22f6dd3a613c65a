package local

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
)

// saysMemory says a memory with so many descriptors.
func saysMemory(t *testing.T, c *net.UnixConn, m memory, files ...*os.File) {
	var fds []int
	for _, f := range files {
		fds = append(fds, int(f.Fd()))
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	if _, _, err := c.WriteMsgUnix(m.bytes(), rights, nil); err != nil && !closed(err) {
		t.Error(err)
	}
}

// TestBadMemories: a list that no prefill agent says ends the meeting, and D keeps no descriptor of it.
func TestBadMemories(t *testing.T) {
	sealed := file(t, whole, seals)
	count := func(c *net.UnixConn, n uint32) { _, _ = c.Write(binary.BigEndian.AppendUint32(nil, n)) }
	good := memory{space: 1, kind: memoryFile, base: 1 << 20, size: 4096, handle: make([]byte, 8)}
	but := func(change func(m *memory)) memory {
		m := good
		change(&m)
		return m
	}
	for name, c := range map[string]struct {
		does func(t *testing.T, c *net.UnixConn)
		says string
	}{
		"too many":  {func(t *testing.T, c *net.UnixConn) { count(c, mostMemories+1) }, "4097 memories"},
		"it leaves": {func(t *testing.T, c *net.UnixConn) { count(c, 2); saysMemory(t, c, good, sealed) }, "closed the socket"},
		"it leaves in the middle": {func(t *testing.T, c *net.UnixConn) {
			count(c, 1)
			_, _, _ = c.WriteMsgUnix(good.bytes()[:9], unix.UnixRights(int(sealed.Fd())), nil)
		}, "closed the socket"},
		"two descriptors": {func(t *testing.T, c *net.UnixConn) { count(c, 1); saysMemory(t, c, good, sealed, sealed) }, "several descriptors"},
		"a hundred":       {func(t *testing.T, c *net.UnixConn) { count(c, 1); saysMemory(t, c, good, slicesOf(sealed, 100)...) }, "several descriptors"},
		"one more behind it": {func(t *testing.T, c *net.UnixConn) {
			count(c, 1)
			_, _, _ = c.WriteMsgUnix(good.bytes()[:9], unix.UnixRights(int(sealed.Fd())), nil)
			_, _, _ = c.WriteMsgUnix(good.bytes()[9:], unix.UnixRights(int(sealed.Fd())), nil)
		}, "several descriptors"},
		"one in the count": {func(t *testing.T, c *net.UnixConn) {
			_, _, _ = c.WriteMsgUnix([]byte{0, 0, 0, 1}, unix.UnixRights(int(sealed.Fd())), nil)
		}, "in the middle of its words"},
		"one in the handle": {func(t *testing.T, c *net.UnixConn) {
			count(c, 1)
			_, _, _ = c.WriteMsgUnix(good.bytes()[:memorySize], nil, nil)
			_, _, _ = c.WriteMsgUnix(good.bytes()[memorySize:], unix.UnixRights(int(sealed.Fd())), nil)
		}, "in the middle of its words"},
		"space 0": {func(t *testing.T, c *net.UnixConn) {
			count(c, 1)
			saysMemory(t, c, but(func(m *memory) { m.space = 0 }), sealed)
		}, "space 0"},
		"empty": {func(t *testing.T, c *net.UnixConn) {
			count(c, 1)
			saysMemory(t, c, but(func(m *memory) { m.size = 0 }), sealed)
		}, "a memory of 0 bytes"},
		"around": {func(t *testing.T, c *net.UnixConn) {
			count(c, 1)
			saysMemory(t, c, but(func(m *memory) { m.base = 1<<64 - 4095 }), sealed)
		}, "a memory of 4096 bytes"},
		"a long handle": {func(t *testing.T, c *net.UnixConn) {
			count(c, 1)
			saysMemory(t, c, but(func(m *memory) { m.handle = make([]byte, 257) }), sealed)
		}, "a handle of 257 bytes"},
		"twice the same": {func(t *testing.T, c *net.UnixConn) {
			count(c, 2)
			saysMemory(t, c, good, sealed)
			saysMemory(t, c, but(func(m *memory) { m.base += 4095; m.space = 2 }), sealed)
		}, "and other memory from"},
		"another kind in a space": {func(t *testing.T, c *net.UnixConn) {
			count(c, 2)
			saysMemory(t, c, good, sealed)
			saysMemory(t, c, but(func(m *memory) { m.kind = 9; m.base += 4096 }))
		}, "others of its space"},
	} {
		t.Run(name, func(t *testing.T) {
			d := start(t, "d", Config{}, nil)
			ticket := newRandom()
			where := impostor(t, func(conn *net.UnixConn) {
				if _, err := answers(conn, ticket, func(*challenge) {}); err != nil {
					t.Error(err)
					return
				}
				_, _ = conn.Write(verdictReady.bytes(0))
				c.does(t, conn)
				_ = conn.CloseWrite()
				_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
				ends(t, conn)
			})
			sameDescriptors(t)
			e := start(t, "e", Config{}, nil)
			_ = e.tr.Close()
			if err := d.tr.Connect("p", where, ticket[:]); err != nil {
				t.Fatal(err)
			}
			d.down(c.says)
			if d.tr.mapped.bytes != 0 {
				t.Errorf("%d bytes are mapped", d.tr.mapped.bytes)
			}
			_ = d.tr.Close()
		})
	}
}

func slicesOf(f *os.File, n int) (all []*os.File) {
	for range n {
		all = append(all, f)
	}
	return all
}

// lister is a poser that lists memories first, each of which D answers.
func withLister(t *testing.T, list func(c *net.UnixConn) (n int), wants []string, does func(p *poser), after func(d *agent)) {
	t.Helper()
	posing(t, func(c *net.UnixConn) {
		n := list(c)
		reasons, err := hearAnswer(c, n)
		if err != nil {
			t.Error(err)
		}
		for i, why := range reasons {
			if (why == "") != (wants[i] == "") || !strings.Contains(why, wants[i]) {
				t.Errorf("memory %d: %q, want %q", i, why, wants[i])
			}
		}
	}, does, after)
}

// TestBadRuns: runs that leave the memory that they are said to lie in end the link.
func TestBadRuns(t *testing.T) {
	sealed := file(t, whole, seals)
	const base = 1 << 30
	list := func(c *net.UnixConn) int {
		_, _ = c.Write([]byte{0, 0, 0, 3})
		saysMemory(t, c, memory{space: 3, kind: memoryFile, base: base, size: 4096, handle: make([]byte, 8)}, sealed)
		saysMemory(t, c, memory{space: 3, kind: 1, base: base + 4096, size: 4096}, sealed)
		saysMemory(t, c, memory{space: 4, kind: 77, base: base + 1<<20, size: 4096}, sealed)
		return 3
	}
	answer := []string{"", "a file's handle has 0 bytes", "of kind 77, which this version does not know"}
	for name, c := range map[string]spoken{
		"of no space":           {piece: piece{space: 5, runs: []run{{base, 10}}}},
		"of one that is closed": {piece: piece{space: 4, runs: []run{{base + 1<<20, 10}}}},
		"before it":             {piece: piece{space: 3, runs: []run{{base - 1, 10}}}},
		"behind it":             {piece: piece{space: 3, runs: []run{{base + 4096, 10}}}},
		"over its end":          {piece: piece{space: 3, runs: []run{{base, 10}, {base + 4000, 97}}}},
		"around":                {piece: piece{space: 3, runs: []run{{base + 4095, 1<<64 - base - 4095 - 1}}}},
	} {
		t.Run(name, func(t *testing.T) {
			c.total = whole
			if name == "around" {
				c.total = 1<<64 - 1
			}
			withLister(t, list, answer, func(p *poser) {
				p.says(c.append(nil, p.grant))
				ends(t, p.c)
			}, func(d *agent) {
				o := d.sink.Wait("received", "t", 1)
				wants(t, o.Err, "leaves the memory of space")
				if !errors.Is(o.Err, core.ErrConnectionLost) {
					t.Error(o.Err)
				}
			})
		})
	}
}

// TestSharedByLiar: what P lists D reads, whatever P says of validity pages and addresses.
func TestSharedByLiar(t *testing.T) {
	sealed := file(t, whole, seals)
	content := make([]byte, whole)
	for i := range content {
		content[i] = byte(i>>8) + 1
	}
	if _, err := sealed.WriteAt(content, 0); err != nil {
		t.Fatal(err)
	}
	copied := make(chan struct{})
	withLister(t, func(c *net.UnixConn) int {
		_, _ = c.Write([]byte{0, 0, 0, 1})
		saysMemory(t, c, memory{space: 3, kind: memoryFile, base: 4096, size: whole, handle: make([]byte, 8)}, sealed)
		return 1
	}, []string{""}, func(p *poser) {
		s := spoken{total: whole, validity: 8, piece: piece{space: 3, runs: []run{{4096, whole}}}}
		p.says(s.append(nil, p.grant))
		frames(t, p.c, frameDone)
		close(copied)
		ends(t, p.c)
	}, func(d *agent) {
		<-copied
		if string(d.mem) != string(content) {
			t.Error("not what the file has")
		}
		if all := d.sink.All("received", ""); len(all) != 0 {
			t.Errorf("%+v without the prefill agent's word", all)
		}
		d.tr.Revoke("t")
	})
}

// TestSpaces: P cuts what it says at the borders of memories.
func TestSpaces(t *testing.T) {
	all, err := spacesOf([]memory{{space: 2, base: 300, size: 100}, {space: 1, base: 100, size: 50}, {space: 1, base: 150, size: 50}, {space: 2, base: 200, size: 10}})
	if err != nil || fmt.Sprint(all) != "[{100 200 1} {200 210 2} {300 400 2}]" {
		t.Fatal(all, err)
	}
	p := piece{position: 7, runs: []run{{390, 10}, {310, 20}, {205, 15}, {120, 1}, {100, 250}, {10, 5}, {395, 10}}}
	var got []string
	var said []run
	at := p.position
	for len(p.runs) > 0 {
		var head piece
		head, p = all.cut(p)
		if head.position != at {
			t.Errorf("position %d, want %d", head.position, at)
		}
		at += head.bytes()
		got = append(got, fmt.Sprintf("%d%v", head.space, head.runs))
		said = append(said, head.runs...)
	}
	const want = "2[{390 10} {310 20} {205 5}] 0[{210 10}] 1[{120 1} {100 100}] 2[{200 10}] 0[{210 90}] 2[{300 50}] 0[{10 5}] 2[{395 5}] 0[{400 5}]"
	if strings.Join(got, " ") != want {
		t.Errorf("%v\nwant %v", strings.Join(got, " "), want)
	}
	if at != 7+10+20+15+1+250+5+10 {
		t.Errorf("%d bytes of %v", at, said)
	}
}
