// A port's state, speed and addresses.

package verbs

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"unsafe"
)

// PortState is enum ibv_port_state.
type PortState int

// The states that decisions depend on.
const (
	PortDown   PortState = 1
	PortInit   PortState = 2 // waits for a subnet manager
	PortArmed  PortState = 3
	PortActive PortState = 4
)

func (s PortState) String() string {
	names := [...]string{"no state", "down", "initializing", "armed", "active", "active, deferred"}
	if s < 0 || int(s) >= len(names) {
		return "state " + strconv.Itoa(int(s))
	}
	return names[s]
}

// LinkLayer of a port.
type LinkLayer int

// The link layers.
const (
	LinkUnspecified LinkLayer = 0 // of old devices: InfiniBand
	LinkInfiniBand  LinkLayer = 1
	LinkEthernet    LinkLayer = 2
)

func (l LinkLayer) String() string {
	switch l {
	case LinkEthernet:
		return "Ethernet"
	case LinkInfiniBand, LinkUnspecified:
		return "InfiniBand"
	}
	return "link layer " + strconv.Itoa(int(l))
}

// Port is what a port is at the moment.
type Port struct {
	Number    int
	State     PortState
	LinkLayer LinkLayer
	LID       uint16 // of InfiniBand; 0 before a subnet manager gave one
	ActiveMTU int    // bytes: 256 to 4096
	Speed     uint64 // bits per second of data; 0: unknown
	GIDs      int    // places in its table, empty ones included
}

// Port asks for a port, numbered from 1.
func (d *Device) Port(n int) (Port, error) {
	var p C.struct_vb_port
	err := d.use(func() error {
		if n < 1 || n > d.attr.Ports {
			return fmt.Errorf("RDMA device %s has no port %d, it has 1 to %d", d.info.Name, n, d.attr.Ports)
		}
		if err := errno(C.vb_query_port(d.ctx, C.int(n), &p)); err != nil {
			return fmt.Errorf("query port %d of RDMA device %s: %w", n, d.info.Name, err)
		}
		return nil
	})
	if err != nil {
		return Port{}, err
	}
	port := Port{
		Number: n, State: PortState(p.state), LinkLayer: LinkLayer(p.link_layer), LID: uint16(p.lid),
		ActiveMTU: mtuBytes(int(p.active_mtu)),
		Speed:     speed(uint32(p.width), uint32(p.speed)), GIDs: int(p.gids),
	}
	if port.Speed == 0 { // a rate that libibverbs has no code for
		port.Speed = parseRate(d.sysfs(n, "rate"))
	}
	return port, nil
}

// mtuBytes is enum ibv_mtu in bytes; 0 for an unknown code.
func mtuBytes(code int) int {
	if code < 1 || code > 5 {
		return 0
	}
	return 128 << code
}

// mtuCode is the largest enum ibv_mtu that fits into bytes; 0 for less than 256.
func mtuCode(bytes int) uint8 {
	for code := 5; code >= 1; code-- {
		if mtuBytes(code) <= bytes {
			return uint8(code)
		}
	}
	return 0
}

// speed is the rate of a link of so many lanes, in bits of data per second.
func speed(width, code uint32) uint64 {
	lanes := map[uint32]uint64{1: 1, 2: 4, 4: 8, 8: 12, 16: 2}[width]
	mega := map[uint32]uint64{1: 2_500, 2: 5_000, 4: 10_000, 8: 10_000, 16: 14_000, 32: 25_000, 64: 50_000, 128: 100_000}[code]
	return lanes * mega * 1e6
}

// parseRate reads sysfs: "200 Gb/sec (2X NDR)".
func parseRate(s string) uint64 {
	word, rest, _ := strings.Cut(strings.TrimSpace(s), " ")
	gbit, err := strconv.ParseFloat(word, 64)
	if err != nil || !(gbit >= 0 && gbit <= 1e6) || // NaN too
		!strings.HasPrefix(rest, "Gb/sec") {
		return 0
	}
	return uint64(gbit * 1e9)
}

// sysfs reads a file of a port; "" when it cannot be read.
func (d *Device) sysfs(port int, file string) string {
	b, _ := os.ReadFile(fmt.Sprintf("%s/ports/%d/%s", d.info.SysPath, port, file))
	return strings.TrimSpace(string(b))
}

// GIDType of an entry of a port's table.
type GIDType int

// The types.
const (
	GIDInfiniBand GIDType = 0
	GIDRoCEv1     GIDType = 1
	GIDRoCEv2     GIDType = 2
)

func (t GIDType) String() string {
	switch t {
	case GIDInfiniBand:
		return "IB"
	case GIDRoCEv1:
		return "RoCE v1"
	case GIDRoCEv2:
		return "RoCE v2"
	}
	return "GID type " + strconv.Itoa(int(t))
}

// GID is an entry of a port's table.
type GID struct {
	Index  int
	GID    [16]byte
	Type   GIDType
	NetDev string // the network interface of RoCE; empty in InfiniBand
}

// GIDs lists the entries of a port's table that are not empty, by index.
func (d *Device) GIDs(port int) ([]GID, error) {
	p, err := d.Port(port)
	if err != nil {
		return nil, err
	}
	if C.vb_has_gid_table() == 0 {
		return d.gidsBySysfs(p)
	}
	total := 0
	for n := 1; n <= d.attr.Ports; n++ { // the table has all ports at once
		q, err := d.Port(n)
		if err != nil {
			return nil, err
		}
		total += q.GIDs
	}
	if total == 0 {
		return nil, nil
	}
	table := make([]C.struct_vb_gid, total)
	var found C.int
	err = d.use(func() error {
		return errno(C.vb_gid_table(d.ctx, &table[0], C.int(total), &found))
	})
	if err != nil {
		return nil, fmt.Errorf("query the GIDs of RDMA device %s: %w", d.info.Name, err)
	}
	var gids []GID
	for _, e := range table[:found] {
		if int(e.port) != port {
			continue
		}
		g := GID{Index: int(e.index), GID: *(*[16]byte)(unsafe.Pointer(&e.gid[0])), Type: GIDType(e._type)}
		if e.ifindex != 0 {
			g.NetDev = d.sysfs(port, "gid_attrs/ndevs/"+strconv.Itoa(g.Index))
		}
		gids = append(gids, g)
	}
	return gids, nil
}

// gidsBySysfs is for libraries before rdma-core 32.
func (d *Device) gidsBySysfs(p Port) ([]GID, error) {
	var gids []GID
	for i := range p.GIDs {
		g := GID{Index: i}
		err := d.use(func() error {
			return errno(C.vb_query_gid(d.ctx, C.int(p.Number), C.int(i), (*C.uint8_t)(&g.GID[0])))
		})
		if err != nil {
			return nil, fmt.Errorf("query GID %d of port %d of RDMA device %s: %w", i, p.Number, d.info.Name, err)
		}
		if g.GID == ([16]byte{}) {
			continue
		}
		switch kind := d.sysfs(p.Number, "gid_attrs/types/"+strconv.Itoa(i)); {
		case kind == "RoCE v2":
			g.Type = GIDRoCEv2
		case p.LinkLayer == LinkEthernet: // "IB/RoCE v1"
			g.Type = GIDRoCEv1
		}
		g.NetDev = d.sysfs(p.Number, "gid_attrs/ndevs/"+strconv.Itoa(i))
		gids = append(gids, g)
	}
	return gids, nil
}
