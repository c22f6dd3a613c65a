package local

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/shmem"
)

// sharingEnv tells a test binary to be a prefill agent over memory that it has allocated.
const sharingEnv = "KVCONN_TEST_SHARING"

// sharing is that process. It says its endpoint and a ticket, and writes all blocks under each grant that it is told.
func sharing() {
	if os.Getenv(sharingEnv) == "" {
		return
	}
	m, err := shmem.Alloc(whole)
	if err != nil {
		panic(err)
	}
	fillPattern(m.Bytes())
	l, err := kv.NewLayout([]kv.Region{{Name: "k", Base: m.Base(), BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: 2 * blocks}})
	if err != nil {
		panic(err)
	}
	tr, err := New(Config{Listen: true}, l, deafSink{})
	if err != nil {
		panic(err)
	}
	ticket, err := tr.Admit("d")
	if err != nil {
		panic(err)
	}
	fmt.Printf("%s\n%x\n", tr.Endpoint(), ticket)
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		grant, _ := hex.DecodeString(in.Text())
		tr.Write(core.WriteOp{ID: core.TransferID(in.Text()), Peer: "d", Grant: grant, Pairs: []kv.Pair{{Length: whole}}})
	}
	os.Exit(0)
}

func fillPattern(b []byte) {
	for i := range b {
		b[i] = byte(i>>12) ^ byte(i)
	}
}

// mappings counts those of this process that are of allocated memory, and lists what is in /dev/shm.
func mappings(t *testing.T) (n int, files []string) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	all, err := os.ReadDir("/dev/shm")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range all {
		if strings.Contains(e.Name(), "kvconn") {
			files = append(files, e.Name())
		}
	}
	return strings.Count(string(b), "memfd:kvconn"), files
}

// TestSharingKilled: nothing is left of a prefill agent that is killed while its memory is mapped here.
func TestSharingKilled(t *testing.T) {
	leaktest.Check(t)
	sameDescriptors(t)
	d := start(t, "d", Config{}, nil)
	p := startChild(t, sharingEnv+"=1")
	endpoint, ticket := p.met()
	if err := d.tr.Connect("p", endpoint, ticket); err != nil {
		t.Fatal(err)
	}
	if list, _ := d.opened(); fmt.Sprint(list) != "[1: 2097152]" {
		t.Errorf("%v is open", list)
	}
	expect := func(id core.TransferID) string {
		grant, err := d.tr.Expect(id, "p", []kv.Segment{{Region: 0, Length: whole / 2}, {Region: 1, Length: whole / 2}})
		if err != nil {
			t.Fatal(err)
		}
		return hex.EncodeToString(grant)
	}
	p.told(expect("t"))
	if o := d.sink.Wait("received", "t", 1); o.Err != nil {
		t.Error(o.Err)
	}
	want := make([]byte, whole)
	if fillPattern(want); !bytes.Equal(d.mem, want) {
		t.Error("not what the prefill agent has")
	}
	if n, _ := mappings(t); n != 1 {
		t.Errorf("%d mappings, want one", n)
	}
	expect("u")
	p.kill()
	if o := d.sink.Wait("received", "u", 1); !errors.Is(o.Err, core.ErrConnectionLost) {
		t.Error(o.Err)
	}
	d.down("")
	if n, files := mappings(t); n != 0 || len(files) != 0 {
		t.Errorf("%d mappings and %q are left", n, files)
	}
}

// TestSharedUnwritable: if D's engine has given its caches back, a copy out of a mapping ends as one out of a process.
func TestSharedUnwritable(t *testing.T) {
	leaktest.Check(t)
	p, d := start(t, "p", Config{}, nil), start(t, "d", Config{}, nil)
	p.shares(0, whole, seals, 1)
	d.connect(p)
	d.hide(18*blockBytes, 4096)
	p.write("t", "d", d.expect("t", "p"))
	wants(t, d.sink.Wait("received", "t", 1).Err, `region "v" cannot be written`)
	wants(t, p.sink.Wait("written", "t", 1).Err, "decode agent d", `region "v" cannot be written`)
	_ = unix.Mprotect(d.mem, unix.PROT_READ|unix.PROT_WRITE)
	moves(t, "after", p, d)
}

// TestPunched: what P takes out of its file reads as zeros, and nobody gets a signal.
func TestPunched(t *testing.T) {
	leaktest.Check(t)
	p, d := start(t, "p", Config{}, nil), start(t, "d", Config{}, nil)
	p.shares(0, whole, seals, 1)
	d.connect(p)
	moves(t, "before", p, d)
	f, err := p.tr.memories[0].open()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(0); !errors.Is(err, syscall.EPERM) {
		t.Errorf("the file can be cut: %v", err)
	}
	if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, whole); err != nil {
		t.Fatal(err)
	}
	p.write("t", "d", d.expect("t", "p"))
	if o := d.sink.Wait("received", "t", 1); o.Err != nil {
		t.Error(o.Err)
	}
	if !bytes.Equal(d.mem, make([]byte, whole)) {
		t.Error("no zeros")
	}
	moves(t, "after", p, d)
}

// TestFreed: memory that is freed while a transport is over it stays until that is closed, and no other
// transport takes it.
func TestFreed(t *testing.T) {
	leaktest.Check(t)
	m, err := shmem.Alloc(whole)
	if err != nil {
		t.Fatal(err)
	}
	l, err := kv.NewLayout([]kv.Region{{Name: "k", Base: m.Base(), BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: 2 * blocks}})
	if err != nil {
		t.Fatal(err)
	}
	tr, err := New(Config{Listen: true}, l, deafSink{})
	if err != nil {
		t.Fatal(err)
	}
	if err := shmem.Free(m.Base()); err != nil {
		t.Fatal(err)
	}
	m.Bytes()[whole-1] = 1
	if _, err := New(Config{Listen: true}, l, deafSink{}); err == nil || !contains(err, "was freed") {
		t.Error(err)
	}
	_ = tr.Close()
	_ = tr.Close()
	if n, _ := mappings(t); n != 0 {
		t.Errorf("%d mappings are left", n)
	}
}
