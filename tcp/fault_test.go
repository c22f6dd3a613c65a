package tcp

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// badMemory are the ways in which memory is not what the engine said. Each changes the memory so.
var badMemory = map[string]struct {
	spoil func(t *testing.T, b []byte)
	why   string
	reads bool // it can be read
}{
	"read-only": {func(t *testing.T, b []byte) { mustBe(t, unix.Mprotect(b, unix.PROT_READ)) }, "not writable", true},
	"closed":    {func(t *testing.T, b []byte) { mustBe(t, unix.Mprotect(b, unix.PROT_NONE)) }, "not readable", false},
	"unmapped": {func(t *testing.T, b []byte) {
		if _, _, errno := unix.Syscall(unix.SYS_MUNMAP, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), 0); errno != 0 {
			t.Fatal(errno)
		}
	}, "not mapped", false},
	"truncated": {func(t *testing.T, b []byte) {
		f, err := os.Create(filepath.Join(t.TempDir(), "kv"))
		mustBe(t, err)
		defer f.Close() // the file is empty
		_, err = unix.MmapPtr(int(f.Fd()), 0, unsafe.Pointer(&b[0]), uintptr(len(b)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED)
		mustBe(t, err)
	}, "nothing behind it", false},
}

func mustBe(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantNamed(t *testing.T, err error, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if err == nil || !strings.Contains(err.Error(), p) {
			t.Errorf("%v, want %q in it", err, p)
		}
	}
	if errors.Is(err, core.ErrConnectionLost) || errors.Is(err, core.ErrNotExpected) {
		t.Errorf("told as the peer's doing: %v", err)
	}
}

// oneBlock is a transfer's blocks.
func oneBlock(id int) [][]kv.BlockID { return [][]kv.BlockID{{kv.BlockID(id)}} }

// TestMemoryThatIsNotThere: one of many transfers has blocks that cannot be read or
// written. It fails on either side, by name, and at once. All others end well, also
// those before it and behind it on the same stream.
func TestMemoryThatIsNotThere(t *testing.T) {
	for how, c := range badMemory {
		for _, at := range []int{0, 4 << 10, 700 << 10} { // places in the bad block
			for _, side := range []string{"prefill", "decode"} {
				if side == "prefill" && c.reads {
					continue
				}
				for _, encrypt := range []Encryption{EncryptMay, EncryptMust} {
					t.Run(fmt.Sprintf("%s at %d of the %s engine's block, encryption %d", how, at, side, encrypt), func(t *testing.T) {
						leaktest.Check(t)
						const bad, n = 7, 24
						cfg := Config{Streams: 1, StallTimeout: time.Hour, Encrypt: encrypt}
						if at == 4<<10 { // a frame of it is on each stream
							cfg.Streams, cfg.First, cfg.FrameBytes = 3, 3, testBlock/8
						}
						p, d := newSizedAgent(t, cfg, n, testBlock), newSizedAgent(t, cfg, n, testBlock)
						p.paint()
						of := d
						if side == "prefill" {
							of = p
						}
						spoiled := of.mem[bad*testBlock+at : (bad+1)*testBlock]
						c.spoil(t, spoiled)
						before := d.attempts()
						mustBe(t, d.Connect("p", p.Endpoint(), p.admit(t, "d")))
						name := func(i int) core.TransferID { return core.TransferID(fmt.Sprint("t", i)) }
						grants := make([]random, n)
						for i := range n {
							grants[i] = d.expect(t, name(i), "p", oneBlock(i))
						}
						for i := range n {
							p.Write(core.WriteOp{ID: name(i), Peer: "d", Grant: grants[i][:], Pairs: p.pairs(t, oneBlock(i))})
						}
						for i := range n {
							if i != bad {
								for _, o := range []coretest.Outcome{d.sink.Wait("received", name(i), 1), p.sink.Wait("written", name(i), 1)} {
									if o.Err != nil || o.Stats.Bytes != testBlock {
										t.Errorf("transfer %d: %s: %+v", i, o.Kind, o)
									}
								}
							}
						}
						sent := p.sink.Wait("written", name(bad), 1).Err
						if side == "prefill" {
							wantNamed(t, sent, `tcp: region "r" cannot be read`, c.why)
							if all := d.sink.All("received", name(bad)); len(all) > 0 {
								t.Errorf("D was told %v: it has to wait for P's word", all)
							}
							d.Revoke(name(bad))
						} else {
							wantNamed(t, sent, `tcp: decode agent d: tcp: region "r" cannot be written`)
							wantNamed(t, d.sink.Wait("received", name(bad), 1).Err, `tcp: region "r" cannot be written`)
							if how != "closed" {
								wantNamed(t, sent, c.why)
							}
						}
						most := uint64(cfg.Streams)
						if side == "prefill" && at > 0 {
							most += most // of frames that could not be ended
						}
						if opened := d.attempts() - before; opened > most {
							t.Errorf("%d streams were opened, want at most %d", opened, most)
						}
						for i := range n {
							if i != bad && !slices.Equal(d.mem[i*testBlock:(i+1)*testBlock], p.mem[i*testBlock:(i+1)*testBlock]) {
								t.Errorf("block %d has other bytes", i)
							}
						}
					})
				}
			}
		}
	}
}

// TestReasonOfAnotherPeer: D ends its own transfers and no other, and what it says goes
// into a log as text.
func TestReasonOfAnotherPeer(t *testing.T) {
	leaktest.Check(t)
	p := newAgent(t, Config{})
	grants := map[core.AgentID]random{}
	conns := map[core.AgentID]*rawConn{}
	for _, peer := range []core.AgentID{"d", "attacker"} {
		c, grant := dial(t, p), newRandom()
		c.say(p.hello(t, peer, 0, 1, 0))
		p.Write(core.WriteOp{ID: core.TransferID(peer), Peer: peer, Grant: grant[:], Pairs: p.pairs(t, oneBlock(0))})
		if h := c.next(); h.kind != frameData || h.key != grant {
			t.Fatalf("%+v", h)
		}
		conns[peer], grants[peer] = c, grant
	}
	const why = "no\xff memory"
	conns["attacker"].say(frameBytes(header{kind: frameFault, key: grants["d"], length: uint64(len(why))}), []byte(why))
	conns["attacker"].say(frameBytes(header{kind: frameFault, key: grants["attacker"], length: uint64(len(why))}), []byte(why))
	if _, err := io.CopyN(io.Discard, conns["attacker"], testBlock); err != nil {
		t.Fatal(err)
	}
	if o := p.sink.Wait("written", "attacker", 1); o.Err == nil || o.Err.Error() != "tcp: decode agent attacker: no memory" {
		t.Error(o.Err)
	}
	if all := p.sink.All("written", "d"); len(all) != 0 {
		t.Errorf("another peer's transfer was ended: %v", all)
	}
}
