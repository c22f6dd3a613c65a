// Registering memory locks it, and this process may lock only so much.

package rdma

import (
	"bufio"
	"bytes"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// capIPCLock is CAP_IPC_LOCK. A process that has it is not bound by RLIMIT_MEMLOCK.
const capIPCLock = 14

// memlock is how much memory this process may lock, which registering it does.
type memlock struct {
	Soft, Hard uint64 // bytes; math.MaxUint64: no limit
	Locked     uint64 // bytes that count already
	Capable    bool   // CAP_IPC_LOCK is in effect
}

// readMemlock asks the kernel. Without /proc nothing counts as locked and the
// capability as missing.
func readMemlock() (memlock, error) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit); err != nil {
		return memlock{}, fmt.Errorf("RLIMIT_MEMLOCK: %w", err)
	}
	status, _ := os.ReadFile("/proc/self/status")
	m := parseStatus(status)
	m.Soft, m.Hard = limit.Cur, limit.Max
	return m, nil
}

// parseStatus reads what /proc/self/status says: pinned pages, which the limit is
// compared with, and the effective capabilities.
func parseStatus(status []byte) (m memlock) {
	for s := bufio.NewScanner(bytes.NewReader(status)); s.Scan(); {
		name, value, _ := strings.Cut(s.Text(), ":")
		switch value = strings.TrimSpace(value); name {
		case "VmPin":
			if n, err := strconv.ParseUint(strings.TrimSuffix(value, " kB"), 10, 54); err == nil {
				m.Locked = n << 10
			}
		case "CapEff":
			if n, err := strconv.ParseUint(value, 16, 64); err == nil {
				m.Capable = n>>capIPCLock&1 != 0
			}
		}
	}
	return m
}

// check says why so many bytes more (need), of all devices together, cannot be registered. So the
// agent knows before it spends the time. The kernel may refuse all the same, since a
// capability counts only outside of user namespaces.
func (m memlock) check(need uint64) error {
	if m.Capable || m.Soft == math.MaxUint64 || (m.Locked <= m.Soft && need <= m.Soft-m.Locked) {
		return nil
	}
	locked := ""
	if m.Locked > 0 {
		locked = fmt.Sprintf(" and %s are locked already", sizeText(m.Locked))
	}
	root := ""
	if m.Hard != math.MaxUint64 {
		root = " (as root: the hard limit is " + sizeText(m.Hard) + ")"
	}
	return fmt.Errorf("RLIMIT_MEMLOCK allows %s of locked memory%s, but registering the KV cache needs %s: run `ulimit -l unlimited`%s before the engine, give docker `--ulimit memlock=-1`, set LimitMEMLOCK=infinity in a systemd unit, or grant CAP_IPC_LOCK",
		sizeText(m.Soft), locked, sizeText(need), root)
}

// sizeText is a size for people, with the exact number unless it is round.
func sizeText(n uint64) string {
	if n == math.MaxUint64 {
		return "unlimited"
	}
	for i, unit := range []string{"TiB", "GiB", "MiB", "KiB"} {
		if shift := 40 - 10*i; n>>shift > 0 {
			if n&(1<<shift-1) == 0 {
				return fmt.Sprintf("%d %s", n>>shift, unit)
			}
			return fmt.Sprintf("%.1f %s (%d bytes)", float64(n)/float64(uint64(1)<<shift), unit, n)
		}
	}
	return fmt.Sprintf("%d bytes", n)
}
