package driver

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestABI holds abi.h and the sticky errors against cuda.h of two CUDA majors, which
// scripts/gpu-headers.sh gets.
func TestABI(t *testing.T) {
	root, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(filepath.Join(root, "scripts", "gpu-headers.sh")).CombinedOutput()
	var ended *exec.ExitError
	if errors.As(err, &ended) && ended.ExitCode() == 75 {
		t.Skipf("NOT RUN: abi.h was compared with nothing, since there is no cuda.h:\n%s", out)
	}
	if err != nil {
		t.Fatalf("scripts/gpu-headers.sh: %v\n%s", err, out)
	}
	check, err := os.ReadFile("testdata/abi.c")
	if err != nil {
		t.Fatal(err)
	}
	text := string(check)
	for code, name := range sticky {
		text += fmt.Sprintf("SAME(%d, CUDA_ERROR_%s)\n", code, name)
	}
	abi, err := os.ReadFile("abi.h")
	if err != nil {
		t.Fatal(err)
	}
	for _, major := range []string{"12", "13"} {
		compile := func(abi string) (string, error) {
			dir := t.TempDir()
			file := filepath.Join(dir, "abi.c")
			for name, content := range map[string]string{file: strings.Replace(text, `"../abi.h"`, `"abi.h"`, 1), filepath.Join(dir, "abi.h"): abi} {
				if err := os.WriteFile(name, []byte(content), 0o666); err != nil {
					t.Fatal(err)
				}
			}
			cc := os.Getenv("CC")
			if cc == "" {
				cc = "cc"
			}
			out, err := exec.Command(cc, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
				"-isystem", filepath.Join(root, "build", "cuda-headers", major), file).CombinedOutput()
			return string(out), err
		}
		if out, err := compile(string(abi)); err != nil {
			t.Errorf("abi.h is not as cuda.h of CUDA %s: %v\n%s", major, err, out)
		}
		for _, change := range [][3]string{
			{"(kv_event, kv_stream))", "(kv_event, kv_stream, unsigned))", "X(event_record,"},
			{"(void **, size_t, unsigned)", "(void **, unsigned, unsigned)", "X(host_alloc,"},
			{"(struct kv_uuid *, kv_device)", "(char *, kv_device)", "X(device_uuid,"},
			{"struct kv_location source, destination;", "struct kv_location source;", "CUmemcpyAttributes: size"},
			{"unsigned char rdma;", "unsigned char gap3, rdma;", "gpuDirectRDMACapable"},
			{"KV_POINTER_BUFFER_ID = 7", "KV_POINTER_BUFFER_ID = 6", "CU_POINTER_ATTRIBUTE_BUFFER_ID"},
			{"  char bytes[64];", "  char bytes[63];", "CUipcMemHandle: size"},
			{"(kv_ptr *, struct kv_ipc_handle, unsigned)", "(kv_ptr *, struct kv_ipc_handle *, unsigned)", "X(ipc_open,"},
			{"size_t, size_t *, kv_stream))", "size_t, kv_stream))", "X(copy_batch,"},
		} {
			wrong := strings.Replace(string(abi), change[0], change[1], 1)
			if out, err := compile(wrong); wrong == string(abi) || err == nil || !strings.Contains(out, change[2]) {
				t.Errorf("%q for %q is not noticed with CUDA %s as %q: %v\n%s", change[1], change[0], major, change[2], err, out)
			}
		}
	}
}
