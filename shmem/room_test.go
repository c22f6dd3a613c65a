package shmem

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// host is what a kernel says, as files.
func host(t *testing.T, files map[string]string) system {
	t.Helper()
	s := system{t.TempDir(), t.TempDir()}
	for name, text := range files {
		path := filepath.Join(s.cgroups, strings.TrimPrefix(name, "cgroup"))
		if !strings.HasPrefix(name, "cgroup") {
			path = filepath.Join(s.proc, name)
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// TestRoom: memory is no more than the least that the host and each group of the process have.
func TestRoom(t *testing.T) {
	const meminfo = "MemTotal:  90 kB\nMemAvailable:    1000 kB\n"
	for name, c := range map[string]struct {
		files map[string]string
		want  uint64
		whose string
	}{
		"no groups": {map[string]string{"meminfo": meminfo}, 1000 << 10, "the host"},
		"no bound":  {map[string]string{"meminfo": meminfo, "self/cgroup": "0::/a\n", "cgroup/a/memory.max": "max\n", "cgroup/a/memory.current": "5\n"}, 1000 << 10, "the host"},
		"its own":   {map[string]string{"meminfo": meminfo, "self/cgroup": "0::/a/b\n", "cgroup/a/b/memory.max": "9000\n", "cgroup/a/b/memory.current": "8000\n"}, 1000, "/a/b"},
		"one above": {map[string]string{"meminfo": meminfo, "self/cgroup": "0::/a/b\n", "cgroup/a/memory.max": "9000\n", "cgroup/a/memory.current": "7000\n",
			"cgroup/a/b/memory.max": "5000\n", "cgroup/a/b/memory.current": "0\n"}, 2000, "/a"},
		"pages of files": {map[string]string{"meminfo": meminfo, "self/cgroup": "0::/\n", "cgroup/memory.max": "9000\n", "cgroup/memory.current": "8000\n",
			"cgroup/memory.stat": "anon 4000\nshmem 500\ninactive_file 300\nactive_file 200\n"}, 1500, "cgroup"},
		"over its bound":   {map[string]string{"meminfo": meminfo, "self/cgroup": "0::/\n", "cgroup/memory.max": "9000\n", "cgroup/memory.current": "9001\n"}, 0, "cgroup"},
		"a bound of a lot": {map[string]string{"meminfo": meminfo, "self/cgroup": "0::/\n", "cgroup/memory.max": "90000000\n", "cgroup/memory.current": "1\n"}, 1000 << 10, "the host"},
		"version 1": {map[string]string{"meminfo": meminfo, "self/cgroup": "5:cpu:/x\n4:cpuset,memory:/c/d\n0::/\n", "cgroup/memory/c/memory.limit_in_bytes": "9000\n", "cgroup/memory/c/memory.usage_in_bytes": "8000\n",
			"cgroup/memory/c/memory.stat": "active_file 1\ntotal_active_file 100\ntotal_inactive_file 50\n", "cgroup/memory/c/d/memory.limit_in_bytes": "9223372036854771712\n", "cgroup/memory/c/d/memory.usage_in_bytes": "8\n"}, 1150, "/memory/c"},
		"of the host, in a container": {map[string]string{"meminfo": meminfo, "self/cgroup": "4:memory:/docker/1\n", "cgroup/memory/memory.limit_in_bytes": "700\n", "cgroup/memory/memory.usage_in_bytes": "8\n"}, 692, "/memory"},
		"nonsense":                    {map[string]string{"meminfo": meminfo, "self/cgroup": "4\nmemory:/\n0:::\n::\n0::../..\n", "cgroup/memory.max": "-1\n"}, 1000 << 10, "the host"},
	} {
		t.Run(name, func(t *testing.T) {
			n, whose, err := host(t, c.files).room()
			if err != nil || n != c.want || !strings.HasSuffix(whose, c.whose) && !(c.whose == "cgroup" && strings.Contains(whose, c.whose)) {
				t.Errorf("%d bytes of %s, %v; want %d of %s", n, whose, err, c.want, c.whose)
			}
		})
	}
	if _, _, err := host(t, map[string]string{"meminfo": "MemTotal: 90 kB\n"}).room(); err == nil || !strings.Contains(err.Error(), "MemAvailable") {
		t.Error(err)
	}
}

// TestGroupFull: what a group's bound leaves no room for is refused before the kernel would end a process.
func TestGroupFull(t *testing.T) {
	nothing(t)
	was := kernel
	defer func() { kernel = was }()
	kernel = host(t, map[string]string{"meminfo": "MemAvailable: 900000 kB\n", "self/cgroup": "0::/\n", "cgroup/memory.max": "9000\n", "cgroup/memory.current": "0\n"})
	free(t, alloc(t, 8192))
	if _, err := Alloc(8193); !errors.Is(err, syscall.ENOMEM) || !strings.Contains(err.Error(), "has 9000 bytes available") {
		t.Error(err)
	}
}

// TestFileLimit: the kernel would end the process by SIGXFSZ.
func TestFileLimit(t *testing.T) {
	nothing(t)
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &was); err != nil {
		t.Fatal(err)
	}
	limit := unix.Rlimit{Cur: min(was.Max, 1<<30), Max: was.Max}
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &limit); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &was); err != nil {
			t.Error(err)
		}
	}()
	free(t, alloc(t, 4096))
	if _, err := Alloc(limit.Cur + 1); !errors.Is(err, syscall.EFBIG) || !strings.Contains(err.Error(), "ulimit -f") {
		t.Error(err)
	}
}
