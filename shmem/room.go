// How much memory this process may take before the kernel would end a process for it.

package shmem

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// system is where the kernel says what there is.
type system struct{ proc, cgroups string }

var kernel = system{"/proc", "/sys/fs/cgroup"}

// room is how many bytes may be taken without an emergency, and whose bound that is. In a group of processes
// (a container) that is at its bound the kernel ends one of them; on the host too.
func (s system) room() (bytes uint64, whose string, err error) {
	bytes, err = s.available()
	whose = "the host"
	for _, dir := range s.groups() {
		if n, bound := left(dir); bound && n < bytes {
			bytes, whose = n, "the memory cgroup "+dir
		}
	}
	return bytes, whose, err
}

// available is what the host could give, as the kernel says.
func (s system) available() (n uint64, err error) {
	b, err := os.ReadFile(s.proc + "/meminfo")
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(b), "MemAvailable:")
	if _, err := fmt.Sscanf(rest, "%d kB", &n); err != nil {
		return 0, fmt.Errorf("/proc/meminfo has no MemAvailable: %w", err)
	}
	return n << 10, nil
}

// groups are the folders of the groups that bound this process's memory, of either version. In a container a path
// may be that of the host, of which the container sees the root alone: what is not there bounds nothing.
func (s system) groups() (dirs []string) {
	b, _ := os.ReadFile(s.proc + "/self/cgroup")
	for line := range strings.Lines(string(b)) {
		_, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		controllers, path, ok := strings.Cut(rest, ":")
		root := s.cgroups
		switch {
		case !ok || !strings.HasPrefix(path, "/"):
			continue
		case strings.Contains(","+controllers+",", ",memory,"):
			root += "/memory"
		case controllers != "":
			continue
		}
		for path = filepath.Clean(path); ; path = filepath.Dir(path) {
			dirs = append(dirs, filepath.Join(root, path))
			if path == "/" {
				break
			}
		}
	}
	return dirs
}

// left is what a group may still take; false: it has no bound. Pages of files count as room, since the kernel takes
// them back.
func left(dir string) (bytes uint64, bound bool) {
	most, ok := number(dir, "memory.max", "memory.limit_in_bytes")
	has, known := number(dir, "memory.current", "memory.usage_in_bytes")
	if !ok || !known || most >= math.MaxInt64&^0xFFFF { // version 1 says so of no bound
		return 0, false
	}
	b, _ := os.ReadFile(dir + "/memory.stat")
	by := map[string]uint64{}
	for line := range strings.Lines(string(b)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		by[name], _ = strconv.ParseUint(value, 10, 64)
	}
	files := by["active_file"] + by["inactive_file"]
	if _, first := by["total_active_file"]; first { // version 1, whose other figures leave out the groups below
		files = by["total_active_file"] + by["total_inactive_file"]
	}
	has -= min(has, files)
	return most - min(most, has), true
}

// number reads the first of these files that is there; false for "max".
func number(dir string, names ...string) (n uint64, ok bool) {
	for _, name := range names {
		if b, err := os.ReadFile(dir + "/" + name); err == nil {
			n, err = strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

// enough says why so many bytes cannot be a memory here. The kernel would end the process that makes a file longer than
// its limit by a signal.
func enough(n uint64) error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &limit); err == nil && n > limit.Cur {
		return fmt.Errorf("a file of this process may have %d bytes at most (ulimit -f, RLIMIT_FSIZE): %w", limit.Cur, unix.EFBIG)
	}
	has, whose, err := kernel.room()
	if err != nil {
		return fmt.Errorf("what the host has available is not known: %w", err)
	}
	if has < n {
		return fmt.Errorf("%s has %d bytes available: %w", whose, has, unix.ENOMEM)
	}
	return nil
}
