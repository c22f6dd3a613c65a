package local

import (
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// waits is a kernel that keeps a copy of one page waiting until it is let go, and others not.
type waits struct {
	linux
	page    atomic.Uintptr
	reached func()
	goes    chan struct{}
}

func (k *waits) readv(pid int, into, from []iovec) (uint64, syscall.Errno) {
	page := k.page.Load()
	for _, v := range from {
		if page != 0 && v.base <= page && page < v.base+v.len {
			k.reached()
			<-k.goes
		}
	}
	return k.linux.readv(pid, into, from)
}

// TestUnmappedInCopy: P's engine unmaps memory while D copies a transfer out of it. That transfer fails on both sides with the region's
// name, and others of the pair, before, beside and after it, go well over the same link.
func TestUnmappedInCopy(t *testing.T) {
	leaktest.Check(t)
	const at, page = (blocks + 12) * blockBytes, 4096 // of the block that is copied last, see agent.all
	reached := make(chan struct{})
	k := &waits{reached: sync.OnceFunc(func() { close(reached) }), goes: make(chan struct{})}
	p, d := start(t, "p", Config{}, nil), start(t, "d", Config{Workers: 2, BatchBytes: blockBytes}, k)
	d.connect(p)
	moves(t, "before", p, d)
	armed := d.expect("armed", "p")
	hole := unsafe.Pointer(&p.mem[at])
	k.page.Store(uintptr(hole))
	p.write("t", "d", d.expect("t", "p"))
	<-reached
	d.small("beside", p)
	if o := d.sink.Wait("received", "beside", 1); o.Err != nil {
		t.Error(o.Err)
	}
	if all := append(d.sink.All("received", "t"), p.sink.All("written", "t")...); len(all) > 0 {
		t.Errorf("it has ended, and its copy is under way: %+v", all)
	}
	if err := unix.MunmapPtr(hole, page); err != nil {
		t.Fatal(err)
	}
	close(k.goes)
	wants(t, d.sink.Wait("received", "t", 1).Err, `region "v" of prefill agent p cannot be read`, "not mapped any more")
	wants(t, p.sink.Wait("written", "t", 1).Err, "decode agent d", `region "v" cannot be read`, "not mapped")
	if _, err := unix.MmapPtr(-1, 0, hole, page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_FIXED_NOREPLACE); err != nil {
		t.Fatal("the memory is somebody else's by now:", err)
	}
	p.write("armed", "d", armed)
	if o := d.sink.Wait("received", "armed", 1); o.Err != nil || o.Stats.Bytes != whole {
		t.Errorf("%+v", o)
	}
	moves(t, "after", p, d)
	if down := append(d.sink.All("down", ""), p.sink.All("down", "")...); len(down) > 0 {
		t.Errorf("the link ended: %+v", down)
	}
}
