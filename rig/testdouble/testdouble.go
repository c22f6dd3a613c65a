// Package testdouble builds the tests' own CUDA driver and says where it lies. Its sources are in src/; what a test may ask of it
// beside the driver's functions is in src/kvgpu.h. It is named by KVCONN_LIBCUDA and never libcuda.so.1, which others would load by chance.
package testdouble

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
)

// Test is what the double needs of a test: a testing.TB, or a Program.
type Test interface {
	Helper()
	Fatalf(format string, args ...any)
	Skipf(format string, args ...any)
	Cleanup(func())
}

// Program is the Test of a process that a test has started. It keeps all that it has until it ends.
type Program struct{}

// Helper does nothing.
func (Program) Helper() {}

// Cleanup does nothing.
func (Program) Cleanup(func()) {}

// Fatalf panics.
func (Program) Fatalf(format string, args ...any) { panic(fmt.Errorf(format, args...)) }

// Skipf panics: the program was started for the double.
func (p Program) Skipf(format string, args ...any) { p.Fatalf(format, args...) }

// Kind is one build of the double.
type Kind string

// The builds: of CUDA 13, of CUDA 12.9, and a driver of CUDA 12.2 that lacks the calls of later ones.
const (
	Newest Kind = "libkvgpu-double.so"
	CUDA12 Kind = "libkvgpu-double-12.so"
	Old    Kind = "libkvgpu-double-old.so"
)

var build = sync.OnceValues(func() (string, error) {
	_, here, _, ok := runtime.Caller(0)
	if !ok {
		return "", errors.New("the place of testdouble's sources is unknown")
	}
	root := filepath.Dir(filepath.Dir(filepath.Dir(here)))
	out, err := exec.Command(filepath.Join(root, "scripts", "gpu-double.sh")).CombinedOutput()
	if err != nil {
		return string(out), err
	}
	return filepath.Join(root, "build", "gpu-double"), nil
})

// Library is the path of a build, which is made first if a source is newer. Where cuda.h cannot be had, the test is not run, and says so:
// `make gpu-double` tells loudly why.
func Library(tb Test, kind Kind) string {
	tb.Helper()
	if dir := os.Getenv("KVGPU_DOUBLES"); dir != "" {
		return filepath.Join(dir, string(kind))
	}
	dir, err := build()
	var ended *exec.ExitError
	if errors.As(err, &ended) && ended.ExitCode() == 75 {
		tb.Skipf("NOT RUN: the driver double needs cuda.h:\n%s", dir)
	}
	if err != nil {
		tb.Fatalf("scripts/gpu-double.sh: %v\n%s", err, dir)
	}
	return filepath.Join(dir, string(kind))
}
