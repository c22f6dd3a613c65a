// How near the devices and the memory of this host are to each other.

package rdma

import (
	"errors"
	"fmt"
	"io/fs"
	slashpath "path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// distance from a device to memory, or to another device; less is nearer.
type distance uint8

const (
	sameSwitch distance = iota // below one PCIe root port
	sameRoot                   // below one PCIe root complex
	sameNode                   // at one NUMA node
	otherNode                  // across the processors' link
	farUnknown                 // the system does not say
)

func (d distance) String() string {
	return [...]string{"same switch", "same root complex", "same NUMA node", "other NUMA node", "unknown"}[min(d, farUnknown)]
}

// noNode stands for no NUMA node, or one that is not known.
const noNode = -1

// place is where a device or host memory is.
type place struct {
	Node int      // NUMA node, or noNode
	PCI  []string // from the root complex down: "pci0000:3a", "0000:3a:00.0", …; nil: not on PCI
}

func (p place) String() string {
	s := "no NUMA node"
	if p.Node >= 0 {
		s = fmt.Sprintf("NUMA node %d", p.Node)
	}
	if n := len(p.PCI); n > 0 {
		s += ", PCI " + p.PCI[n-1]
	}
	return s
}

// distanceTo compares two devices, or a device and host memory, which is on no bus.
func (p place) distanceTo(q place) distance {
	common := 0
	for common < min(len(p.PCI), len(q.PCI)) && p.PCI[common] == q.PCI[common] {
		common++
	}
	switch {
	case common >= 2:
		return sameSwitch
	case common == 1:
		return sameRoot
	case p.Node < 0 || q.Node < 0:
		return farUnknown
	case p.Node == q.Node:
		return sameNode
	}
	return otherNode
}

var (
	pciRoot    = regexp.MustCompile(`^pci[0-9a-f]{4,}:[0-9a-f]{2}$`)
	pciAddress = regexp.MustCompile(`^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)
)

// devicePlace is where an RDMA device is, as /sys says. sys is the root of /sys
// (os.DirFS("/sys"), read links included). A device that is on no bus, such as
// Soft-RoCE, has no place. Only if there is no such device, the result is an error.
func devicePlace(sys fs.FS, device string) (place, error) {
	return placeOf(sys, "class/infiniband/"+device)
}

func placeOf(sys fs.FS, name string) (place, error) {
	p := place{Node: noNode}
	real, err := resolve(sys, name)
	if err != nil {
		return p, fmt.Errorf("/sys/%s: %w", name, err)
	}
	// The innermost directory that is a PCI function tells the node.
	dir := ""
	elems := strings.Split(real, "/")
	for i, e := range elems {
		switch {
		case pciRoot.MatchString(e):
			p.PCI = []string{e}
		case len(p.PCI) > 0 && pciAddress.MatchString(e):
			p.PCI = append(p.PCI, e)
			dir = strings.Join(elems[:i+1], "/")
		}
	}
	for _, file := range []string{slashpath.Join(dir, "numa_node"), slashpath.Join(real, "device/numa_node")} {
		if b, err := fs.ReadFile(sys, file); err == nil {
			if n, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
				p.Node = max(n, noNode)
			}
			break
		}
	}
	return p, nil
}

// maxLinks is how many symbolic links one name may go through, as in the kernel.
const maxLinks = 40

// resolve follows the symbolic links of a name. A link that leaves the root of sys is
// an error.
func resolve(sys fs.FS, name string) (string, error) {
	links, todo, done := 0, strings.Split(name, "/"), []string(nil)
	for len(todo) > 0 {
		e := todo[0]
		todo = todo[1:]
		switch e {
		case "", ".":
			continue
		case "..":
			if len(done) == 0 {
				return "", fmt.Errorf("a link leaves /sys: %w", fs.ErrInvalid)
			}
			done = done[:len(done)-1]
			continue
		}
		done = append(done, e)
		at := strings.Join(done, "/")
		info, err := fs.Lstat(sys, at)
		if err != nil {
			return "", err
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			continue
		}
		if links++; links > maxLinks {
			return "", errors.New("too many symbolic links")
		}
		target, err := fs.ReadLink(sys, at)
		if err != nil {
			return "", err
		}
		if strings.HasPrefix(target, "/") {
			return "", fmt.Errorf("a link leaves /sys, to %s: %w", target, fs.ErrInvalid)
		}
		done = done[:len(done)-1]
		todo = append(strings.Split(target, "/"), todo...)
	}
	return strings.Join(done, "/"), nil
}

// memoryNodes is how many pages of a range are asked for their node.
const memoryNodes = 16

// memoryPlace is the NUMA node of host memory, judged by a few pages. Call it when the
// memory is in use, since a page that nobody has touched has no node. If the kernel does
// not tell, there is no node.
func memoryPlace(r memRange) place {
	pages := samplePages(r, uint64(unix.Getpagesize()))
	status := make([]int32, len(pages))
	if len(pages) == 0 || queryNodes(pages, status) != nil {
		return place{Node: noNode}
	}
	return place{Node: majority(status)}
}

// samplePages are the addresses of a few pages, spread over the range.
func samplePages(r memRange, page uint64) []uintptr {
	if !r.ends() {
		return nil
	}
	first, last := r.Base/page, (r.Base+r.Length-1)/page
	n := min(last-first, memoryNodes-1) + 1
	out := make([]uintptr, n)
	for i := range out {
		at := first
		if n > 1 {
			at += (last - first) / (n - 1) * uint64(i)
		}
		out[i] = uintptr(at * page)
	}
	return out
}

// queryNodes is move_pages(2) that moves nothing: a node, or a negative errno,
// for each page.
func queryNodes(pages []uintptr, status []int32) error {
	_, _, errno := unix.Syscall6(unix.SYS_MOVE_PAGES, 0, uintptr(len(pages)), uintptr(unsafe.Pointer(&pages[0])), 0, uintptr(unsafe.Pointer(&status[0])), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// majority is the most frequent node. Of equally frequent nodes it is the lowest; if
// none is known, noNode.
func majority(status []int32) int {
	nodes := slices.DeleteFunc(slices.Clone(status), func(s int32) bool { return s < 0 })
	slices.Sort(nodes)
	best, most, run := noNode, 0, 0
	for i, n := range nodes {
		if i > 0 && n == nodes[i-1] {
			run++
		} else {
			run = 1
		}
		if run > most {
			best, most = int(n), run
		}
	}
	return best
}
