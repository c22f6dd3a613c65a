package local

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// file makes a memory file of so many bytes.
func file(t *testing.T, n, seals int) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("kvconn-test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "memory")
	t.Cleanup(func() { _ = f.Close() })
	if err := f.Truncate(int64(n)); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
	return f
}

// shares puts bytes of an agent's memory into a file, and lists that as a memory of a space.
func (a *agent) shares(from, n, seals int, space uint32) {
	a.t.Helper()
	f := file(a.t, n, seals)
	if _, err := unix.MmapPtr(int(f.Fd()), 0, unsafe.Pointer(&a.mem[from]), uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		a.t.Fatal(err)
	}
	a.lists(memory{space: space, kind: memoryFile, base: uint64(uintptr(unsafe.Pointer(&a.mem[from]))), size: uint64(n), handle: make([]byte, 8), open: func() (*os.File, error) {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		return os.NewFile(uintptr(fd), "memory"), err
	}})
}

func (a *agent) lists(m memory) {
	a.t.Helper()
	a.tr.memories = append(a.tr.memories, m)
	var err error
	if a.tr.all, err = spacesOf(a.tr.memories); err != nil {
		a.t.Fatal(err)
	}
}

// opened is what a decode agent has opened of "p".
func (a *agent) opened() (list []string, process bool) {
	a.t.Helper()
	if err := a.tr.Usable(a.t.Context(), "p"); err != nil {
		a.t.Fatal(err)
	}
	a.tr.receiver.mu.Lock()
	defer a.tr.receiver.mu.Unlock()
	r := &a.tr.receiver.sources["p"].access
	for _, s := range r.spaces {
		list = append(list, fmt.Sprintf("%d: %d", s.space, s.end-s.base))
	}
	return list, r.process
}

// descriptors checks that a test leaves as many as there were.
func sameDescriptors(t *testing.T) {
	t.Helper()
	before := openFiles(t)
	t.Cleanup(func() {
		if after := openFiles(t); len(after) > len(before) {
			t.Errorf("%d descriptors before, %d after: %q", len(before), len(after), after)
		}
	})
}

func openFiles(t *testing.T) (list []string) {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		to, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err == nil && !strings.Contains(to, "/proc/") { // the list's own is gone
			list = append(list, to)
		}
	}
	return list
}

// TestShared: what lies in files is copied out of their mappings, what does not, out of the process.
func TestShared(t *testing.T) {
	for name, c := range map[string]struct {
		shares func(p *agent)
		lists  string
		mapped uint64 // of the bytes that move
	}{
		"none":           {func(p *agent) {}, "[]", 0},
		"all":            {func(p *agent) { p.shares(0, whole, seals, 1) }, "[1: 2097152]", whole},
		"one region":     {func(p *agent) { p.shares(0, whole/2, seals, 1) }, "[1: 1048576]", whole / 2},
		"two files":      {func(p *agent) { p.shares(0, whole/2, seals, 1); p.shares(whole/2, whole/2, seals, 1) }, "[1: 2097152]", whole},
		"two spaces":     {func(p *agent) { p.shares(0, whole/2, seals, 7); p.shares(whole/2, whole/2, seals, 2) }, "[7: 1048576 2: 1048576]", whole},
		"within a block": {func(p *agent) { p.shares(4096, whole/2, seals, 1); p.shares(whole/2+8192, 4096, seals, 1) }, "[1: 1048576 1: 4096]", whole/2 + 4096},
		"unsealed":       {func(p *agent) { p.shares(0, whole/2, 0, 1); p.shares(whole/2, whole/2, seals, 1) }, "[1: 1048576]", whole / 2},
		"none sealed":    {func(p *agent) { p.shares(0, whole, 0, 1) }, "[]", 0},
	} {
		for _, plans := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " plans ", plans), func(t *testing.T) {
				sameDescriptors(t)
				leaktest.Check(t)
				p, d := start(t, "p", Config{}, nil), start(t, "d", Config{BatchBytes: 50_000}, nil)
				c.shares(p)
				d.connect(p)
				if list, process := d.opened(); fmt.Sprint(list) != c.lists || !process {
					t.Errorf("%v is open, want %v; process %v", list, c.lists, process)
				}
				moves(t, "t", p, d)
				how := map[uint64]string{0: "process_vm_readv", whole: "mapping"}[c.mapped]
				if how == "" {
					how = "mapping, process_vm_readv"
				}
				if of, to := d.tr.How("p"), p.tr.How("d"); of != how || to != how {
					t.Errorf("decode says %q, prefill %q, want %q", of, to, how)
				}
				if by := d.tr.Counters(); by["bytes_by_mapping"] != c.mapped || by["bytes_by_process_vm_readv"] != whole-c.mapped {
					t.Errorf("%v, want %d by mapping", by, c.mapped)
				}
				_ = d.tr.Close()
				if of := d.tr.How("p"); of != how || d.tr.How("other") != "" {
					t.Errorf("decode says %q after the end", of)
				}
				if d.tr.mapped.bytes != 0 {
					t.Errorf("%d bytes are mapped after the end", d.tr.mapped.bytes)
				}
				_ = p.tr.Close()
			})
		}
	}
}

// TestSharedAlone: a D that may not read P's process goes well with memories alone, if all of P's regions lie there.
func TestSharedAlone(t *testing.T) {
	for _, mode := range []string{"", "1"} {
		k := &stern{mode: mode, errno: syscall.EPERM}
		p, d := unmetAgents(t, k)
		p.shares(0, whole/2, seals, 1)
		p.shares(whole/2, whole/2, seals, 1)
		d.connect(p)
		if list, process := d.opened(); fmt.Sprint(list) != "[1: 2097152]" || process {
			t.Errorf("%v is open, process %v", list, process)
		}
		moves(t, "t", p, d)
		if len(k.calls) != 0 {
			t.Error("the kernel was asked to let D read, which was of no use")
		}
	}
}

// TestSharedInPart: if one of P's regions lies in no memory, D needs P's process.
func TestSharedInPart(t *testing.T) {
	p, d := unmetAgents(t, &stern{errno: syscall.EPERM})
	p.shares(0, whole-4096, seals, 1)
	d.connect(p)
	d.down("the kernel does not let this process read")
}

// TestSharedWillNotDo: if D can open none by the two methods, both say why.
func TestSharedWillNotDo(t *testing.T) {
	p, d := unmetAgents(t, &stern{errno: syscall.EPERM})
	p.shares(0, whole, unix.F_SEAL_GROW, 1)
	d.connect(p)
	d.down("has the seals 0x4, and 0x3 are needed", "the kernel does not let this process read")
	if p.sink.All("down", "") != nil {
		t.Error("the prefill agent was told of a peer that it has not met")
	}
}

// TestMappedBudget: D maps no more than it is allowed to, and reads the rest out of the process.
func TestMappedBudget(t *testing.T) {
	leaktest.Check(t)
	p, d := start(t, "p", Config{}, nil), start(t, "d", Config{MaxMapped: whole - 1}, nil)
	p.shares(0, whole/2, seals, 1)
	p.shares(whole/2, whole/2, seals, 1)
	d.connect(p)
	if list, _ := d.opened(); fmt.Sprint(list) != "[1: 1048576]" {
		t.Errorf("%v is open", list)
	}
	moves(t, "t", p, d)
}

// hugePages is a sealed file of hugetlbfs; a plain one where the kernel has none.
func hugePages(t *testing.T) (f *os.File, says string) {
	t.Helper()
	fd, err := unix.MemfdCreate("kvconn-test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_HUGETLB)
	if err != nil {
		return file(t, whole, 0), "may shrink"
	}
	f = os.NewFile(uintptr(fd), "huge pages")
	t.Cleanup(func() { _ = f.Close() })
	if err := f.Truncate(whole); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
	return f, "no memory file of small pages"
}

// TestBadFiles: D maps no file that may end under it, whatever P says of it.
func TestBadFiles(t *testing.T) {
	d := start(t, "d", Config{}, nil)
	plain, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	if err := plain.Truncate(whole); err != nil {
		t.Fatal(err)
	}
	sealed := file(t, whole, seals)
	socket, _ := net.ListenUnix("unix", &net.UnixAddr{Name: "@" + newName(), Net: "unix"})
	defer socket.Close()
	end, err := socket.File()
	if err != nil {
		t.Fatal(err)
	}
	defer end.Close()
	pages, says := hugePages(t)
	at := func(offset uint64) []byte { return binary.BigEndian.AppendUint64(nil, offset) }
	for name, c := range map[string]struct {
		file   *os.File
		handle []byte
		size   uint64
		says   string
	}{
		"plain":             {plain, at(0), 4096, "it has no seals"}, // and is asked for nothing else
		"huge pages":        {pages, at(0), whole, says},
		"a socket":          {end, at(0), 4096, "it has no seals"},
		"no seals":          {file(t, whole, 0), at(0), 4096, "may shrink"},
		"may be unsealed":   {file(t, whole, unix.F_SEAL_SHRINK), at(0), 4096, "may shrink"},
		"grows only":        {file(t, whole, unix.F_SEAL_GROW|unix.F_SEAL_SEAL), at(0), 4096, "may shrink"},
		"too long":          {sealed, at(0), whole + 1, "has 2097152 bytes, and not 2097153 from 0 on"},
		"behind the end":    {sealed, at(whole), 4096, "has 2097152 bytes"},
		"within a page":     {sealed, at(5), 4096, "has 2097152 bytes"},
		"around":            {sealed, at(1<<64 - 4096), 8192, "has 2097152 bytes"},
		"no offset":         {sealed, nil, 4096, "handle has 0 bytes"},
		"a longer offset":   {sealed, make([]byte, 9), 4096, "handle has 9 bytes"},
		"of the whole room": {sealed, at(0), 1<<64 - 1, "has 2097152 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			v := &views{t: d.tr}
			defer v.close()
			wants(t, v.open(&memory{space: 1, kind: memoryFile, base: 4096, size: c.size, handle: c.handle}, c.file), c.says)
			if len(v.list) != 0 || d.tr.mapped.bytes != 0 {
				t.Error("it is open")
			}
		})
	}
}
