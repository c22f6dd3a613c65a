package verbs

import (
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// inMachine: rxe-vm's guest, where a device that is not there is a failure.
var inMachine = os.Getenv("RXE_VM") != ""

// openFirst opens the first device that can be opened.
func openFirst(t testing.TB) *Device {
	t.Helper()
	skip := t.Skipf
	if inMachine {
		skip = t.Fatalf
	}
	l, err := Load()
	if err != nil {
		skip("make rdma-test runs this in a machine with RDMA devices: %v", err)
	}
	all, err := l.Devices()
	if err != nil || len(all) == 0 {
		skip("make rdma-test runs this in a machine with RDMA devices: here are %d (%v)", len(all), err)
	}
	d, err := l.Open(all[0].Name)
	if err != nil {
		skip("make rdma-test runs this in a machine with RDMA devices: %v", err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// memory is memory of its own pages that the garbage collector does not know.
func memory(t testing.TB, size int) []byte {
	t.Helper()
	b, err := syscall.Mmap(-1, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Munmap(b) })
	return b
}

func address(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

func TestDevice(t *testing.T) {
	leaktest.Check(t)
	d := openFirst(t)
	i, a := d.Info(), d.Attr()
	if i.Transport != TransportIB || i.Problem != nil {
		t.Errorf("info: %+v", i)
	}
	if _, err := os.Stat(i.SysPath); err != nil {
		t.Error(err)
	}
	if a.MaxMRSize == 0 || a.MaxMR < 1 || a.MaxPD < 1 || a.MaxQP < 1 || a.MaxQPWR < 1 || a.MaxSGE < 1 || a.MaxCQ < 1 || a.MaxCQE < 1 || a.Ports < 1 || a.Vectors < 1 {
		t.Errorf("attr: %+v", a)
	}
	p, err := d.Port(1)
	if err != nil {
		t.Fatal(err)
	}
	if p.State != PortActive || p.LinkLayer != LinkEthernet || p.ActiveMTU != 4096 || p.Speed == 0 || p.GIDs == 0 {
		t.Errorf("port: %+v", p)
	}
	if _, err := d.Port(2); err == nil || !strings.Contains(err.Error(), "no port 2, it has 1 to 1") {
		t.Errorf("port 2: %v", err)
	}
	gids, err := d.GIDs(1)
	if err != nil {
		t.Fatal(err)
	}
	slow, err := d.gidsBySysfs(p)
	if err != nil {
		t.Fatal(err)
	}
	if len(gids) < 2 || len(gids) != len(slow) {
		t.Fatalf("GIDs %v, by sysfs %v", gids, slow)
	}
	for k, g := range gids {
		if g != slow[k] || g.Type != GIDRoCEv2 || !strings.HasPrefix(g.NetDev, "path") {
			t.Errorf("GID %v, by sysfs %v", g, slow[k])
		}
	}
	l, _ := Load()
	if _, err := l.Open("mlx5_77"); !errors.Is(err, syscall.ENODEV) || !strings.Contains(err.Error(), i.Name) {
		t.Errorf("a device that is not there: %v", err)
	}
}

func TestEventsOfALink(t *testing.T) {
	leaktest.Check(t)
	d := openFirst(t)
	if !inMachine {
		t.Skip("it takes a link down; make rdma-test runs it in a machine of its own")
	}
	events := make(chan Event, 64)
	ended := make(chan error)
	go func() {
		for {
			e, err := d.NextEvent()
			if err != nil {
				ended <- err
				return
			}
			events <- e
		}
	}()
	wait := func(want EventType) {
		t.Helper()
		timeout := time.After(30 * time.Second)
		for {
			select {
			case e := <-events:
				if e.Type == want && e.Port == 1 {
					return
				}
			case <-timeout:
				t.Fatalf("no event %v", want)
			}
		}
	}
	link := func(how string) {
		t.Helper()
		if out, err := command("rxe-link", "0", how); err != nil {
			t.Fatalf("rxe-link 0 %s: %v: %s", how, err, out)
		}
	}
	link("off")
	defer link("on")
	wait(EventPortError)
	if p, err := d.Port(1); err != nil || p.State == PortActive {
		t.Errorf("the port is %v, %v", p.State, err)
	}
	link("on")
	wait(EventPortActive)
	if p, err := d.Port(1); err != nil || p.State != PortActive {
		t.Errorf("the port is %v, %v", p.State, err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, ErrClosed) {
		t.Errorf("NextEvent ends with %v", err)
	}
	if _, err := d.NextEvent(); !errors.Is(err, ErrClosed) {
		t.Errorf("NextEvent after close: %v", err)
	}
}
