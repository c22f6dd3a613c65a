package cuda

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rig/testdouble"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// A process has one driver: these tests run themselves in processes of their own, with another one.

// again runs tests of this program in a process that has these variables too.
func again(t *testing.T, tests string, env ...string) string {
	t.Helper()
	c := exec.Command(os.Args[0], "-test.run", tests, "-test.v", "-test.timeout", "120s")
	c.Env = append(os.Environ(), env...)
	out, err := c.CombinedOutput()
	if err != nil || strings.Contains(string(out), "SKIP") {
		t.Errorf("%v: %v\n%s", env, err, out)
	}
	return string(out)
}

const inside = "KVCONN_TEST_INSIDE" // names what the process is to find

// TestBuilds: the tests pass with the driver of CUDA 12.9, and with one of 12.2 that has no batches.
func TestBuilds(t *testing.T) {
	if os.Getenv(inside) != "" {
		return
	}
	for _, kind := range []testdouble.Kind{testdouble.CUDA12, testdouble.Old} {
		out := again(t, "^(TestReadsAfterMoment|TestLocate|TestCheck|TestCopies|TestMoments|TestSticky|TestExport|TestPeer)$",
			"KVCONN_LIBCUDA="+testdouble.Library(t, kind), inside+"=1")
		if none := strings.Contains(out, "this driver has no batches"); none != (kind == testdouble.Old) {
			t.Errorf("%s: without batches is %v", kind, none)
		}
	}
}

// TestUnavailable: a missing library, one that is none, an old driver and no device are errors that say what
// to do, and the same ones at each call.
func TestUnavailable(t *testing.T) {
	if want := os.Getenv(inside); want != "" {
		_, err := Devices()
		_, second := Locate(4096, 1)
		var unavailable *UnavailableError
		if !errors.As(err, &unavailable) || !strings.Contains(err.Error(), want) || second == nil || err.Error() != second.Error() {
			t.Errorf("%v, and then %v; want %q", err, second, want)
		}
		t.Log(err)
		return
	}
	double := engine.Library(t)
	folder := t.TempDir()
	library := func(name, source string) string {
		file := filepath.Join(folder, name)
		c := exec.Command("cc", "-shared", "-fPIC", "-x", "c", "-", "-o", file)
		c.Stdin = strings.NewReader(source)
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return file
	}
	empty := library("libempty.so", "")
	part := library("libpart.so", "int cuInit(unsigned flags) { return flags != 0; } int cuDriverGetVersion(int *version) { *version = 12020; return 0; }")
	for _, c := range [][]string{
		{"install NVIDIA's driver", "KVCONN_LIBCUDA=/nonexistent/libcuda.so.1"},
		{"has no cuInit; install a driver of CUDA 12.2", "KVCONN_LIBCUDA=" + empty},
		{"libpart.so has no cuGetErrorName; install a driver of CUDA 12.2", "KVCONN_LIBCUDA=" + part},
		{"is of CUDA 11.4, and CUDA 12.2 or newer is needed", "KVCONN_LIBCUDA=" + double, "KVGPU_DRIVER=11040"},
		{"CUDA_ERROR_NO_DEVICE (100)", "KVCONN_LIBCUDA=" + double, "KVGPU_DEVICES=0"},
		{"CUDA_ERROR_UNKNOWN (999)", "KVCONN_LIBCUDA=" + double, "KVGPU_FAIL=cuInit:1:999"},
	} {
		again(t, "^TestUnavailable$", append(c[1:], inside+"="+c[0])...)
	}
}

// TestRealDriver: NVIDIA's own library, on a machine without a GPU, is opened with all its symbols and says so.
func TestRealDriver(t *testing.T) {
	out, err := exec.Command("../scripts/gpu-real-driver.sh").CombinedOutput()
	var ended *exec.ExitError
	if errors.As(err, &ended) && ended.ExitCode() == 75 {
		t.Skipf("NOT RUN: there is no real libcuda:\n%s", out)
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if _, err := os.Stat("/proc/driver/nvidia"); err == nil {
		t.Skip("NOT RUN: this machine has NVIDIA's kernel modules, and the library may be of another version")
	}
	const node = "/dev/nvidiactl"
	if _, err := os.Lstat(node); errors.Is(err, os.ErrNotExist) {
		defer os.Remove(node) // as root the library makes it
	}
	again(t, "^TestUnavailable$", "KVCONN_LIBCUDA="+strings.TrimSpace(string(out)), inside+"=CUDA_ERROR_NO_DEVICE (100)")
}

// TestNoContext: a device whose primary context is not active is refused, and nobody makes that context.
func TestNoContext(t *testing.T) {
	if os.Getenv(inside) == "" {
		out := again(t, "^TestNoContext$", inside+"=1", "KVCONN_LIBCUDA="+engine.Library(t))
		if strings.Contains(out, "violation") {
			t.Error(out)
		}
		return
	}
	if InProcess() {
		t.Error("the library was opened, and nobody has asked for anything")
	}
	all, err := Devices()
	if err != nil || len(all) < 2 || all[0].Active || all[0].UUID == all[1].UUID || all[0].PCI == all[1].PCI || !all[0].Unified {
		t.Errorf("%+v, %v", all, err)
	}
	if !InProcess() || DriverVersion() < 12000 {
		t.Errorf("in the process: %v, version %d", InProcess(), DriverVersion())
	}
	if _, err := Open(0, Options{}); !errors.Is(err, ErrInactive) {
		t.Errorf("nobody makes a context, and Open said %v", err)
	}
	if _, err := Locate(4096, 1); !errors.Is(err, ErrInactive) {
		t.Errorf("nobody makes a context, and Locate said %v", err)
	}
	if _, err := Open(len(all), Options{}); err == nil {
		t.Error("a device that is not there was opened")
	}
	if all, err := Devices(); err != nil || all[0].Active {
		t.Errorf("%+v, %v", all, err)
	}
	e := engine.New(t, 1) // the engine is on the second device
	p := e.Alloc(grain)
	if l, err := Locate(p, grain); err != nil || l.Device != 1 {
		t.Errorf("%+v, %v", l, err)
	}
	if _, err := Open(0, Options{}); !errors.Is(err, ErrInactive) {
		t.Error(err)
	}
	d, err := Open(1, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	e.Must("cuMemFree_v2", p)
	e.Bare("cuDevicePrimaryCtxRelease_v2", 1)
	if all, err := Devices(); err != nil || all[1].Active {
		t.Errorf("a handle that was closed keeps the context: %+v, %v", all, err)
	}
}
