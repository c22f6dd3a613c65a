package rdma_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
)

type (
	agentID = core.AgentID
	blockID = kv.BlockID
)

// openFor is New on some memory, closed again.
func openFor(cfg rdma.Config, bytes uint64) error {
	mem, err := unix.Mmap(-1, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Munmap(mem) }()
	layout, err := kv.NewLayout([]kv.Region{{Name: "r", Base: uint64(uintptr(unsafe.Pointer(&mem[0]))), BlockStride: 4096, BlockBytes: 4096, NumBlocks: uint32(bytes / 4096)}})
	if err != nil {
		return err
	}
	tr, err := rdma.New(cfg, "one", layout, &coretest.Recorder{}, nil)
	if err != nil {
		return err
	}
	return tr.Close()
}

// wants requires an error that says all of these.
func wants(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one that says %q", words)
	}
	t.Log(err)
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("the error does not say %q: %v", w, err)
		}
	}
}

// TestRefused: a configuration that cannot work is refused with the value and the remedy.
func TestRefused(t *testing.T) {
	needsMachine(t)
	const some = 1 << 20
	config := func(change func(*rdma.Config)) rdma.Config {
		cfg := rdma.DefaultConfig()
		change(&cfg)
		return cfg
	}
	t.Run("unknown device", func(t *testing.T) {
		leaktest.Check(t)
		err := openFor(config(func(c *rdma.Config) { c.Devices = []string{"mlx5_7"} }), some)
		wants(t, err, "rdma_devices", "mlx5_7", "rxe0")
	})
	t.Run("all devices denied", func(t *testing.T) {
		leaktest.Check(t)
		err := openFor(config(func(c *rdma.Config) { c.Deny = []string{"rxe*"} }), some)
		wants(t, err, "rdma_deny", "rxe0")
	})
	t.Run("GID index beyond the table", func(t *testing.T) {
		leaktest.Check(t)
		err := openFor(config(func(c *rdma.Config) { c.GIDIndex = 200 }), some)
		wants(t, err, "rdma_gid_index", "200", "rxe0", "10.77.0.1")
	})
	t.Run("port down", func(t *testing.T) {
		leaktest.Check(t)
		cutLink(t, 0)
		err := openFor(config(func(c *rdma.Config) { c.Devices = []string{"rxe0"} }), some)
		wants(t, err, "rxe0:1", "down", "ip link set")
		cfg := config(func(c *rdma.Config) { c.Devices = []string{"rxe0"} })
		if r := rdma.Inspect(cfg); r.Available || !r.Later || !strings.Contains(r.Problem, "once it is active") {
			t.Errorf("of a port that is down: %+v", r)
		}
		if paths() > 1 { // the others serve
			if err := openFor(rdma.DefaultConfig(), some); err != nil {
				t.Error(err)
			}
		}
	})
	t.Run("locked memory", func(t *testing.T) {
		wants(t, asNobody(t, 64<<20, 1<<20, false), "RLIMIT_MEMLOCK", "1 MiB", fmt.Sprint(64*paths(), " MiB"), "ulimit -l", "--ulimit memlock")
		wants(t, asNobody(t, 64<<20, 1<<20, true), "RLIMIT_MEMLOCK", "1 MiB", "ulimit -l")
		if err := asNobody(t, 256<<10, 1<<20, false); err != nil {
			t.Errorf("what fits: %v", err)
		}
		if paths() > 1 { // the first device may take it, and no other
			wants(t, asNobody(t, 16<<20, 24<<20, false), "RLIMIT_MEMLOCK", "24 MiB")
			if err := asNobody(t, 16<<20, 24<<20, true); err != nil {
				t.Errorf("what one device may take, where there is another transport: %v", err)
			}
		}
	})
	t.Run("device file", func(t *testing.T) {
		files, err := filepath.Glob("/dev/infiniband/uverbs*")
		if err != nil || len(files) == 0 {
			t.Fatal(files, err)
		}
		for _, name := range files {
			if err := os.Chmod(name, 0o600); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.Chmod(name, 0o666) })
		}
		wants(t, asNobody(t, 256<<10, 1<<20, false), "permission", "/dev/infiniband/uverbs", "--device")
	})
}

// nobodyEnv has the test binary open a transport: bytes of memory, the limit of those
// that may be locked, and Fallback.
const nobodyEnv = "KVCONN_TEST_NOBODY"

// asNobody opens a transport in a process without root's rights.
func asNobody(t *testing.T, bytes, limit uint64, fallback bool) error {
	t.Helper()
	cmd := exec.Command("/proc/self/exe") // its folder may be closed to others
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %d %v", nobodyEnv, bytes, limit, fallback))
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &exit) && exit.ExitCode() == 3:
		return errors.New(string(out))
	}
	t.Fatalf("%v: %s", err, out)
	return nil
}

// serveNobody is asNobody's other process. It does not return in one.
func serveNobody() {
	what, asked := os.LookupEnv(nobodyEnv)
	if !asked {
		return
	}
	var bytes, limit uint64
	cfg := rdma.DefaultConfig()
	_, err := fmt.Sscan(what, &bytes, &limit, &cfg.Fallback)
	if err == nil {
		err = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: limit, Max: limit})
	}
	if err == nil {
		err = openFor(cfg, bytes)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(3)
	}
	os.Exit(0)
}
