package tcp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
)

// gates is a Mover of two devices, which are host memory. Each device ends as many of its copies as a
// test lets it, in the order in which they began.
type gates struct {
	mu      sync.Mutex
	changed sync.Cond
	free    [2]int
	host    int // the region of no device
	bytes   int
	begun   [2]int
	sizes   [2][]int // of the copies
	waited  [2]int   // copies that somebody has waited for, by the last of them
	allowed [2]int
	lost    int    // the copy of device 0 that may read for ever, from 1
	fails   [2]int // the copy of each device that fails, from 1
	early   int    // slots that were given back before their copies were waited for
	held    int
	keeps   int  // the copy of device 0 whose slot's Release does not return, from 1
	keeping bool // it was called
	waiting int  // for a slot, now
	waits   int  // for a slot that have begun while one was held
}

const gateBytes = 8 << 20 // of a slot, and of a frame

func newGates(slots, bytes int) *gates {
	m := &gates{free: [2]int{slots, slots}, host: -1, bytes: bytes}
	m.changed.L = &m.mu
	return m
}

const all = 1 << 30

// allow lets a device end so many copies in all.
func (m *gates) allow(device, copies int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.allowed[device] = copies
	m.changed.Broadcast()
}

// keep has the Release of the slot of device 0's copy of a number not return, 0: of none.
func (m *gates) keep(number int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.keeps = number
	m.changed.Broadcast()
}

// sees says whether something is so.
func (m *gates) sees(f func() bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return f()
}

func (m *gates) Of(region uint32) int {
	if int(region) == m.host {
		return -1
	}
	return int(region)
}

func (m *gates) Slot(ctx context.Context, device int, to Direction, _ core.AgentID) (Slot, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for m.free[device] == 0 {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if m.held > 0 { // all tests that get here have one stream
			m.waits++
			return nil, errors.New("the stream would wait for itself")
		}
		m.waiting++
		m.changed.Wait()
		m.waiting--
	}
	m.free[device]--
	m.held++
	return &gateSlot{m: m, device: device, to: to, b: make([]byte, m.bytes)}, nil
}

type gateSlot struct {
	m      *gates
	device int
	number int // of its copy, from 1
	to     Direction
	b      []byte
	waited bool
}

func (s *gateSlot) Memory() []byte { return s.b }

func (s *gateSlot) Copy(runs []Run) {
	at := 0
	for _, r := range runs {
		device := unsafe.Slice(*(**byte)(unsafe.Pointer(&r.Addr)), r.Len)
		if slot := s.b[at : at+int(r.Len)]; s.to == FromDevice {
			copy(slot, device)
		} else {
			copy(device, slot)
		}
		at += int(r.Len)
	}
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	s.m.begun[s.device]++
	s.number = s.m.begun[s.device]
	s.m.sizes[s.device] = append(s.m.sizes[s.device], at)
}

func (s *gateSlot) Wait() error {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	m.waited[s.device] = max(m.waited[s.device], s.number)
	for m.allowed[s.device] < s.number {
		m.changed.Wait()
	}
	s.waited = true
	if s.device == 0 && s.number == m.lost {
		return fmt.Errorf("a test: %w", ErrMayCopy)
	}
	if s.number == m.fails[s.device] {
		return errors.New("a copy of a test fails")
	}
	return nil
}

func (s *gateSlot) Release() {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if s.number > 0 && !s.waited {
		m.early++
	}
	for s.device == 0 && m.keeps == s.number && s.number > 0 {
		m.keeping = true
		m.changed.Wait()
	}
	m.free[s.device]++
	m.held--
	m.changed.Broadcast()
}

// onGates is an agent of two regions, each of four blocks on a device of its own. Each word of them names its place.
func onGates(t *testing.T, cfg Config, m *gates) *agent {
	t.Helper()
	const size = 4 * gateBytes
	mem, err := unix.Mmap(-1, 0, 2*size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	var regions []kv.Region
	for i := range 2 {
		regions = append(regions, kv.Region{Name: fmt.Sprint("r", i), Base: uint64(uintptr(unsafe.Pointer(&mem[i*size]))), BlockStride: gateBytes, BlockBytes: gateBytes, NumBlocks: 4})
	}
	layout, err := kv.NewLayout(regions)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Listen, cfg.ListenHost, cfg.AdvertiseHost, cfg.Mover = true, "127.0.0.1", "127.0.0.1", m
	if cfg.FrameBytes == 0 {
		cfg.FrameBytes = gateBytes
	}
	a := &agent{sink: coretest.NewRecorder(t, "agent"), mem: mem}
	if a.Transport, err = New(cfg, layout, a.sink); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		m.keep(0)
		for device := range m.allowed {
			m.allow(device, all)
		}
		_ = a.Close()
		_ = unix.Munmap(mem)
		if m.waits > 0 {
			t.Errorf("%d times a stream waited for a slot while it had one", m.waits)
		}
		if m.early > 0 {
			t.Errorf("%d slots were given back while a copy used them", m.early)
		}
	})
	a.paintWords()
	return a
}

// part of a transfer: so many bytes of a device from a place on.
type gatePart struct{ device, at, bytes int }

// block is one that is a frame of its own.
func gateBlock(device, number int) gatePart { return gatePart{device, number * gateBytes, gateBytes} }

// writes begins a transfer, and gives its grant.
func (a *agent) writes(id core.TransferID, parts ...gatePart) random {
	grant := newRandom()
	op := core.WriteOp{ID: id, Peer: "d", Grant: grant[:]}
	for _, p := range parts {
		op.Pairs = append(op.Pairs, kv.Pair{SrcRegion: uint32(p.device), SrcOffset: uint64(p.at), Length: uint64(p.bytes)})
	}
	a.Write(op)
	return grant
}

// deafTo is a connection that has said nothing yet, and takes few bytes before it is read.
func deafTo(t *testing.T, a *agent) *rawConn {
	t.Helper()
	c := dial(t, a)
	_ = c.Conn.(*net.TCPConn).SetReadBuffer(64 << 10)
	return c
}

// takes reads a frame of a transfer, whose bytes must be those of these parts.
func (c *rawConn) takes(grant random, parts ...gatePart) {
	c.t.Helper()
	h := c.next()
	if h.key != grant {
		c.t.Fatalf("the next frame is %+v, want one of %v", h, grant)
	}
	c.rest(h, parts...)
}

// rest reads the bytes behind a header.
func (c *rawConn) rest(h header, parts ...gatePart) {
	c.t.Helper()
	bytes := 0
	for _, p := range parts {
		bytes += p.bytes
	}
	if h.kind != frameData || h.length != uint64(bytes) {
		c.t.Fatalf("the next frame is %+v, want %d bytes", h, bytes)
	}
	b := make([]byte, bytes)
	if _, err := io.ReadFull(c, b); err != nil {
		c.t.Fatal(err)
	}
	for _, p := range parts {
		for i := 0; i < p.bytes; i += 8 {
			at := p.device*4*gateBytes + p.at + i
			if got, want := binary.LittleEndian.Uint64(b[i:]), uint64(at)*0x9E3779B97F4A7C15; got != want {
				c.t.Fatalf("byte %d of %+v is %#x, want %#x", i, p, got, want)
			}
		}
		b = b[p.bytes:]
	}
}

// acks says that D has all bytes of a transfer, and waits for its end.
func (c *rawConn) acks(p *agent, id core.TransferID, grant random, bytes uint64) {
	c.t.Helper()
	c.say(frameBytes(header{kind: frameAck, key: grant, length: bytes}))
	if o := p.sink.Wait("written", id, 1); o.Err != nil {
		c.t.Error(o.Err)
	}
}
