package rdma

import (
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/fstest"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	nic0 = "devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:04.0/0000:3d:00.0"
	nic1 = "devices/pci0000:3a/0000:3a:02.0/0000:41:00.0"
	gpu0 = "devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:08.0/0000:3e:00.0"
	gpu1 = "devices/pci0000:16/0000:16:00.0/0000:17:00.0"
	gpu2 = "devices/pci0000:c9/0000:c9:00.0/0000:ca:00.0"
)

// sysTree is a machine with two NUMA nodes, two NICs, three GPUs and Soft-RoCE.
func sysTree() fstest.MapFS {
	text := func(s string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(s), Mode: 0o444} }
	link := func(s string) *fstest.MapFile {
		return &fstest.MapFile{Data: []byte(s), Mode: fs.ModeSymlink | 0o777}
	}
	m := fstest.MapFS{
		"devices/virtual/infiniband/rxe0/node_type": text("1: CA\n"),
		"class/infiniband/rxe0":                     link("../../devices/virtual/infiniband/rxe0"),
		nic0 + "/infiniband/mlx5_0/device":          link("../../../0000:3d:00.0"),
		nic1 + "/infiniband/mlx5_1/device":          link("../../../0000:41:00.0"),
		"class/infiniband/mlx5_0":                   link("../../" + nic0 + "/infiniband/mlx5_0"),
		"class/infiniband/mlx5_1":                   link("../../" + nic1 + "/infiniband/mlx5_1"),
		"class/infiniband/loop":                     link("../infiniband/loop"),
		"class/infiniband/away":                     link("../../../etc"),
		"class/infiniband/root":                     link("/etc"),
		"class/infiniband/gone":                     link("../../devices/gone"),
		// A platform device, and a directory that is no link: both as the kernel had them once.
		"class/infiniband/old/device/numa_node":             text("1\n"),
		"devices/platform/ARMH0:00/infiniband/hns_0/device": link("../../../ARMH0:00"),
		"devices/platform/ARMH0:00/numa_node":               text("3\n"),
		"class/infiniband/hns_0":                            link("../../devices/platform/ARMH0:00/infiniband/hns_0"),
	}
	for dir, node := range map[string]string{nic0: "0\n", nic1: "0\n", gpu0: "0\n", gpu1: "0\n", gpu1[:len(gpu1)-1] + "1": "0\n", gpu2: "1\n", "devices/pci0000:16/0000:16:01.0": "-1\n", "devices/pci0000:17/0000:17:01.0": "what\n"} {
		m[dir+"/numa_node"] = text(node)
		m["bus/pci/devices/"+filepath.Base(dir)] = link("../../../" + dir)
	}
	return m
}

func TestDevicePlace(t *testing.T) {
	sys := sysTree()
	for device, want := range map[string]place{
		"mlx5_0": {0, []string{"pci0000:3a", "0000:3a:00.0", "0000:3b:00.0", "0000:3c:04.0", "0000:3d:00.0"}},
		"mlx5_1": {0, []string{"pci0000:3a", "0000:3a:02.0", "0000:41:00.0"}},
		"rxe0":   {noNode, nil},
		"old":    {1, nil},
		"hns_0":  {3, nil},
	} {
		if got, err := devicePlace(sys, device); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v, %v, want %v", device, got, err, want)
		}
	}
	for device, want := range map[string]string{
		"none": "/sys/class/infiniband/none: ", "gone": "/sys/class/infiniband/gone: ",
		"loop": "too many symbolic links", "away": "a link leaves /sys", "root": "a link leaves /sys, to /etc",
		"../../../x": "a link leaves /sys",
	} {
		if got, err := devicePlace(sys, device); err == nil || !strings.Contains(err.Error(), want) || got.Node != noNode {
			t.Errorf("%s: %v, %v, want %q", device, got, err, want)
		}
	}
}

// TestPlaceOf: a PCI device has the node that the kernel tells, or none.
func TestPlaceOf(t *testing.T) {
	sys := sysTree()
	for address, node := range map[string]int{"0000:3e:00.0": 0, "0000:ca:00.0": 1, "0000:16:01.0": noNode, "0000:17:01.0": noNode} {
		if got, err := placeOf(sys, "bus/pci/devices/"+address); err != nil || got.Node != node || len(got.PCI) < 2 || got.PCI[len(got.PCI)-1] != address {
			t.Errorf("%s: %v, %v, want node %d", address, got, err, node)
		}
	}
}

// The same by a real file system, whose links are real ones.
func TestDevicePlaceOnDisk(t *testing.T) {
	root := t.TempDir()
	for name, f := range sysTree() {
		at := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o777); err != nil {
			t.Fatal(err)
		}
		var err error
		if f.Mode&fs.ModeSymlink != 0 {
			err = os.Symlink(string(f.Data), at)
		} else {
			err = os.WriteFile(at, f.Data, 0o666)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, device := range []string{"mlx5_0", "mlx5_1", "rxe0", "hns_0", "gone", "loop", "away"} {
		want, wantErr := devicePlace(sysTree(), device)
		got, err := devicePlace(os.DirFS(root), device)
		if !reflect.DeepEqual(got, want) || (err == nil) != (wantErr == nil) {
			t.Errorf("%s: %v, %v; in memory %v, %v", device, got, err, want, wantErr)
		}
	}
}

func TestDistance(t *testing.T) {
	sys := sysTree()
	pci := func(address string) place {
		p, err := placeOf(sys, "bus/pci/devices/"+address)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	dev := func(name string) place {
		p, err := devicePlace(sys, name)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	host := func(node int) place { return place{Node: node} }
	for _, c := range []struct {
		a, b place
		want distance
	}{
		{dev("mlx5_0"), pci("0000:3e:00.0"), sameSwitch},
		{dev("mlx5_0"), dev("mlx5_0"), sameSwitch},
		{pci("0000:17:00.0"), pci("0000:17:00.1"), sameSwitch},
		{dev("mlx5_1"), pci("0000:3e:00.0"), sameRoot},
		{dev("mlx5_1"), pci("0000:17:00.0"), sameNode},
		{dev("mlx5_1"), pci("0000:ca:00.0"), otherNode},
		{dev("mlx5_1"), pci("0000:16:01.0"), farUnknown},
		{dev("mlx5_0"), host(0), sameNode},
		{dev("mlx5_0"), host(1), otherNode},
		{dev("mlx5_0"), host(noNode), farUnknown},
		{dev("rxe0"), host(0), farUnknown},
		{dev("rxe0"), dev("rxe0"), farUnknown},
	} {
		if got, back := c.a.distanceTo(c.b), c.b.distanceTo(c.a); got != c.want || back != c.want {
			t.Errorf("from %v to %v: %v, and back %v; want %v", c.a, c.b, got, back, c.want)
		}
	}
	if !(sameSwitch < sameRoot && sameRoot < sameNode && sameNode < otherNode && otherNode < farUnknown) {
		t.Error("the nearer is not the less")
	}
}

func TestSamplePages(t *testing.T) {
	for _, c := range []struct {
		r    memRange
		want []uintptr
	}{
		{memRange{0x1000, 1}, []uintptr{0x1000}},
		{memRange{0x1fff, 2}, []uintptr{0x1000, 0x2000}},
		{memRange{0x1000, 0x3000}, []uintptr{0x1000, 0x2000, 0x3000}},
		{memRange{0x1000, 0}, nil},
		{memRange{1 << 63, 1 << 63}, nil},
	} {
		if got := samplePages(c.r, 0x1000); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%v: %#x, want %#x", c.r, got, c.want)
		}
	}
	many := samplePages(memRange{0x10000, 1 << 30}, 0x1000)
	if len(many) != memoryNodes || many[0] != 0x10000 || many[memoryNodes-1] < 0x10000+1<<30-memoryNodes<<12 || many[memoryNodes-1] >= 0x10000+1<<30 {
		t.Errorf("%#x", many)
	}
}

func TestMajority(t *testing.T) {
	for _, c := range []struct {
		status []int32
		want   int
	}{
		{nil, noNode}, {[]int32{-2, -14}, noNode}, {[]int32{0}, 0}, {[]int32{1, 0, 1, -2}, 1}, {[]int32{1, 0, 2, 0, 1}, 0}, {[]int32{-2, -2, -2, 3}, 3},
	} {
		if got := majority(c.status); got != c.want {
			t.Errorf("%v: %d, want %d", c.status, got, c.want)
		}
	}
}

// TestMemoryPlace: touched memory is at a node that exists, where the kernel tells at all.
// An address without memory is at none.
func TestMemoryPlace(t *testing.T) {
	const size = 1 << 20
	mem, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	base := uint64(uintptr(unsafe.Pointer(&mem[0])))
	for i := 0; i < size; i += 4096 {
		mem[i] = 1
	}
	got := memoryPlace(memRange{base, size})
	told := queryNodes([]uintptr{uintptr(base)}, make([]int32, 1)) == nil
	if _, err := os.Stat("/sys/devices/system/node/node0"); err == nil && told && got.Node == noNode {
		t.Error("the kernel tells nodes, but not of touched memory")
	}
	if !told && got.Node != noNode {
		t.Errorf("%v, though the kernel does not tell", got)
	}
	if err := unix.Munmap(mem); err != nil {
		t.Fatal(err)
	}
	for _, r := range []memRange{{}, {base, 0}, {1 << 62, 4096}} {
		if got := memoryPlace(r); got.Node != noNode || got.PCI != nil {
			t.Errorf("%v: %v", r, got)
		}
	}
}
