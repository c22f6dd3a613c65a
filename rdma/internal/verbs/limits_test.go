package verbs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

func command(name string, arg ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return exec.CommandContext(ctx, name, arg...).CombinedOutput()
}

func TestRegisterRefused(t *testing.T) {
	leaktest.Check(t)
	d := openFirst(t)
	pd, err := d.NewPD()
	if err != nil {
		t.Fatal(err)
	}
	defer pd.Close()
	mem := memory(t, 1<<16)
	at := uintptr(address(mem))
	for name, f := range map[string]struct {
		addr   uintptr
		length uint64
		want   error
	}{
		"nothing":      {at, 0, syscall.EINVAL},
		"no address":   {0, 4096, syscall.EINVAL},
		"it wraps":     {^uintptr(0) - 4095, 8192, syscall.EINVAL},
		"not mapped":   {4096, 4096, syscall.EFAULT},
		"beyond a max": {at, d.Attr().MaxMRSize + 1, syscall.EINVAL},
	} {
		mr, err := pd.Register(f.addr, f.length, LocalWrite)
		var e *RegisterError
		if !errors.Is(err, f.want) || !errors.As(err, &e) || e.Length != f.length {
			t.Errorf("%s: %v, want %v", name, err, f.want)
		}
		if mr != nil {
			t.Errorf("%s is registered", name)
			_ = mr.Close()
		}
	}
	if c := d.Counts(); c.MRs != 0 {
		t.Errorf("%d regions are open", c.MRs)
	}
}

func TestQueuesRefused(t *testing.T) {
	leaktest.Check(t)
	w := newWire(t, Caps{SendDepth: 4, ReceiveDepth: 4, Pieces: 1})
	a := w.dev.Attr()
	for _, c := range []Caps{
		{SendDepth: 0, Pieces: 1}, {SendDepth: a.MaxQPWR + 1, Pieces: 1}, {SendDepth: 1, ReceiveDepth: a.MaxQPWR + 1, Pieces: 1},
		{SendDepth: 1, Pieces: 0}, {SendDepth: 1, Pieces: a.MaxSGE + 1},
	} {
		q, err := NewQP(w.pd, w.cqA, c)
		if err == nil {
			t.Errorf("%+v is taken", c)
			_ = q.Destroy()
		}
	}
	for _, depth := range []int{0, -1, a.MaxCQE + 1} {
		if _, err := w.dev.NewCQ(depth, 0); !errors.Is(err, syscall.EINVAL) || !strings.Contains(err.Error(), fmt.Sprint(a.MaxCQE)) {
			t.Errorf("a queue of %d: %v", depth, err)
		}
	}
	if _, err := w.dev.NewCQ(1, 1<<20); err == nil {
		t.Error("vector 1048576 is taken")
	}
	q, err := NewQP(w.pd, w.cqA, Caps{SendDepth: 4, Pieces: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer q.Destroy()
	p := w.routeA
	p.RemoteWrite = false
	if err := q.Init(&p); err != nil {
		t.Fatal(err)
	}
	p.SourceGIDIndex = 200
	if err := q.ReadyToReceive(&p); err == nil || !strings.Contains(err.Error(), "GID index 200 of port 1") {
		t.Errorf("an empty GID index: %v", err)
	}
	p.MTU = 100
	if err := q.ReadyToReceive(&p); !errors.Is(err, syscall.EINVAL) || !strings.Contains(err.Error(), "MTU is 100 bytes") {
		t.Errorf("an MTU of 100: %v", err)
	}
	p.Retry = 9
	if err := q.ReadyToSend(&p); !errors.Is(err, syscall.EINVAL) || !strings.Contains(err.Error(), "Retry is 9") {
		t.Errorf("retry 9: %v", err)
	}
}

// The limits hold for a user without capabilities, so a child becomes one: it
// runs this test with its part in the environment.
func TestUnprivileged(t *testing.T) {
	switch os.Getenv("KVCONN_TEST_UNPRIVILEGED") {
	case "memlock":
		memlockChild(t)
		return
	case "file":
		fileChild(t)
		return
	}
	d := openFirst(t)
	if !inMachine {
		t.Skip("it needs root and changes a device file; make rdma-test runs it in a machine of its own")
	}
	child := func(part string) {
		t.Helper()
		exe, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		// nobody, without capabilities, with 256 KiB of locked memory
		out, err := command("env", "KVCONN_TEST_UNPRIVILEGED="+part, "prlimit", "--memlock=262144", "setpriv", "--reuid=65534", "--regid=65534",
			"--clear-groups", exe, "-test.run=^TestUnprivileged$", "-test.v")
		if err != nil || !strings.Contains(string(out), "PASS: TestUnprivileged") {
			t.Errorf("%s: %v\n%s", part, err, out)
		}
	}
	if err := os.Chmod(d.Info().File, 0o666); err != nil {
		t.Fatal(err)
	}
	child("memlock")
	if err := os.Chmod(d.Info().File, 0o600); err != nil {
		t.Fatal(err)
	}
	child("file")
	if err := os.Chmod(d.Info().File, 0o666); err != nil {
		t.Fatal(err)
	}
}

func memlockChild(t *testing.T) {
	d := openFirst(t)
	pd, err := d.NewPD()
	if err != nil {
		t.Fatal(err)
	}
	defer pd.Close()
	mem := memory(t, 1<<20)
	_, err = pd.Register(uintptr(address(mem)), 1<<20, LocalWrite)
	var e *RegisterError
	if !errors.As(err, &e) || !errors.Is(err, syscall.ENOMEM) || e.Memlock != 262144 || e.Length != 1<<20 {
		t.Fatalf("1 MiB with 256 KiB of locked memory: %v", err)
	}
	for _, want := range []string{"1048576", "262144", "ulimit -l"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %q", want, err)
		}
	}
	mr, err := pd.Register(uintptr(address(mem)), 4096, LocalWrite)
	if err != nil {
		t.Fatalf("4 KiB with 256 KiB of locked memory: %v", err)
	}
	if err := mr.Close(); err != nil {
		t.Error(err)
	}
}

func fileChild(t *testing.T) {
	l, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	all, err := l.Devices()
	if err != nil || len(all) == 0 {
		t.Fatal(all, err)
	}
	_, err = l.Open(all[0].Name)
	for _, err := range []error{all[0].Problem, err} {
		if !errors.Is(err, syscall.EACCES) || !strings.Contains(err.Error(), all[0].File) || !strings.Contains(err.Error(), "--device="+all[0].File) {
			t.Errorf("a device file without permission: %v", err)
		}
	}
}
