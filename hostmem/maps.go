// Package hostmem says what may be done with this process's memory, without touching it:
// the memory is the engine's, and a fault of ours would end the host.
package hostmem

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strconv"
)

// mapping is memory that the kernel knows, with its permissions.
type mapping struct {
	from, to    uint64 // to is the first byte beyond
	read, write bool
}

// mappings reads /proc/self/maps, ascending.
func mappings() ([]mapping, error) {
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return nil, err
	}
	return parse(b)
}

// parse reads lines such as "7f1c00000000-7f1c00021000 rw-p 00000000 00:00 0".
func parse(b []byte) (list []mapping, err error) {
	for line := range bytes.Lines(b) {
		span, rest, _ := bytes.Cut(line, []byte(" "))
		from, to, _ := bytes.Cut(span, []byte("-"))
		var m mapping
		if m.from, err = strconv.ParseUint(string(from), 16, 64); err == nil {
			m.to, err = strconv.ParseUint(string(to), 16, 64)
		}
		if err != nil || len(rest) < 2 {
			return nil, fmt.Errorf("/proc/self/maps has the line %.80q", line)
		}
		m.read, m.write = rest[0] == 'r', rest[1] == 'w'
		list = append(list, m)
	}
	return list, nil
}

// gap is the first bytes from one address up to before another that may not be used, and
// why.
type gap struct {
	from, to uint64
	why      string
}

// find looks for bytes in [from, to) that are not mapped, or not with the permissions.
// write demands that they can be written, and in any case they must be readable.
func find(list []mapping, from, to uint64, write bool) *gap {
	i, _ := slices.BinarySearchFunc(list, from, func(m mapping, at uint64) int {
		if m.to <= at {
			return -1
		}
		return 1
	})
	for ; from < to; i++ {
		switch {
		case i == len(list):
			return &gap{from, to, "not mapped"}
		case list[i].from > from:
			return &gap{from, min(to, list[i].from), "not mapped"}
		case !list[i].read:
			return &gap{from, min(to, list[i].to), "not readable"}
		case write && !list[i].write:
			return &gap{from, min(to, list[i].to), "not writable"}
		}
		from = list[i].to
	}
	return nil
}
