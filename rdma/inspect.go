package rdma

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strings"

	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// Report is what this process sees of RDMA, for people and for their tools.
type Report struct {
	Available bool           `json:"available"`         // a port can be used
	Later     bool           `json:"later,omitempty"`   // no port can be used now, but one that is not active could; with transport auto it is used once it is active
	Problem   string         `json:"problem,omitempty"` // why no port can be used, and the remedy
	Memlock   Memlock        `json:"memlock"`
	Devices   []DeviceReport `json:"devices"`
}

// Memlock is how much memory this process may register.
type Memlock struct {
	Unlimited bool   `json:"unlimited"`
	Bytes     uint64 `json:"bytes,omitempty"`
	Why       string `json:"why"` // "RLIMIT_MEMLOCK", "CAP_IPC_LOCK"
	Remedy    string `json:"remedy,omitempty"`
}

// DeviceReport is one device.
type DeviceReport struct {
	Name            string       `json:"name"`
	File            string       `json:"file,omitempty"`
	Problem         string       `json:"problem,omitempty"` // why it cannot be used, and the remedy
	Selected        bool         `json:"selected"`          // by rdma_devices and rdma_deny, a port of it at least
	Transport       string       `json:"transport"`         // IB (RoCE too), iWARP
	NUMANode        int          `json:"numa_node"`         // -1: none, or not known
	Firmware        string       `json:"firmware,omitempty"`
	MaxMRSize       uint64       `json:"max_mr_size,omitempty"` // bytes
	RelaxedOrdering bool         `json:"relaxed_ordering"`
	DMABuf          bool         `json:"dma_buf"`              // the card and the kernel register GPU memory that is exported as a dma-buf
	NoDMABuf        string       `json:"no_dma_buf,omitempty"` // why not
	Ports           []PortReport `json:"ports,omitempty"`
}

// PortReport is one port.
type PortReport struct {
	Number    int         `json:"number"`
	Usable    bool        `json:"usable"`
	Problem   string      `json:"problem,omitempty"` // why not, and the remedy
	State     string      `json:"state"`
	LinkLayer string      `json:"link_layer"`
	Speed     uint64      `json:"bits_per_second"` // 0: unknown
	MTU       int         `json:"mtu"`             // bytes, the active one
	LID       uint16      `json:"lid,omitempty"`
	Address   string      `json:"address,omitempty"` // the preferred address, and why
	GIDs      []GIDReport `json:"gids,omitempty"`    // those that can be used, the best first; then the others
	waits     bool        // it is not active
}

// GIDReport is an entry of a port's table.
type GIDReport struct {
	Index   int    `json:"index"`
	Address string `json:"address"`
	Type    string `json:"type"`
	Scope   string `json:"scope"`
	NetDev  string `json:"netdev,omitempty"`
	Usable  bool   `json:"usable"`
	Chosen  bool   `json:"chosen"` // preferred; the peer's GIDs count too
}

// Inspect looks at the library, the devices and the limits, as an agent of this
// configuration does. It opens each device for a moment and changes nothing.
func Inspect(cfg Config) Report {
	r := Report{Memlock: inspectMemlock()}
	lib, err := verbs.Load()
	if err != nil {
		r.Problem = err.Error()
		return r
	}
	infos, err := lib.Devices()
	switch {
	case err != nil:
		r.Problem = err.Error()
		return r
	case len(infos) == 0:
		r.Problem = "this machine has no RDMA device: install a NIC and its driver, in a container pass /dev/infiniband on"
		return r
	}
	var names, problems []string
	for _, i := range infos {
		names = append(names, i.Name)
	}
	for _, i := range infos {
		d := inspectDevice(&cfg, lib, i)
		r.Devices = append(r.Devices, d)
		if d.Problem != "" {
			problems = append(problems, d.Name+": "+d.Problem)
		}
		for _, p := range d.Ports {
			r.Available = r.Available || p.Usable
			r.Later = r.Later || p.waits && d.Problem == ""
			if p.Problem != "" {
				problems = append(problems, fmt.Sprintf("%s:%d: %s", d.Name, p.Number, p.Problem))
			}
		}
	}
	if missing := cfg.Missing(names); len(missing) > 0 {
		r.Available, r.Later = false, false // an agent with this configuration does not start
		r.Problem = fmt.Sprintf("rdma_devices has %q, but no device matches: this machine has %s", missing, strings.Join(names, ", "))
	} else if !r.Available {
		r.Problem = "no port can be used: " + strings.Join(problems, "; ")
	}
	r.Later = r.Later && !r.Available
	return r
}

func inspectDevice(cfg *Config, lib *verbs.Library, info verbs.DeviceInfo) DeviceReport {
	r := DeviceReport{Name: info.Name, File: info.File, Transport: info.Transport.String(), NUMANode: noNode}
	if at, err := devicePlace(os.DirFS("/sys"), info.Name); err == nil {
		r.NUMANode = at.Node
	}
	if info.Problem != nil {
		r.Problem = info.Problem.Error()
		return r
	}
	dev, err := lib.Open(info.Name)
	if err != nil {
		r.Problem = err.Error()
		return r
	}
	defer dev.Close()
	a := dev.Attr()
	r.Firmware, r.MaxMRSize, r.RelaxedOrdering = a.Firmware, a.MaxMRSize, a.RelaxedOrdering
	if err := takesDMABufs(dev); err != nil {
		r.NoDMABuf = err.Error()
	} else {
		r.DMABuf = true
	}
	if info.Transport != verbs.TransportIB {
		r.Problem = fmt.Sprintf("%v devices are not supported: use one of InfiniBand or RoCE", info.Transport)
	}
	for n := 1; n <= a.Ports; n++ {
		p := PortReport{Number: n}
		if port, err := dev.Port(n); err != nil {
			p.Problem = err.Error()
		} else {
			table, err := dev.GIDs(n)
			p = inspectPort(cfg, info.Name, port, table, err)
		}
		if selected := cfg.Selects(info.Name, n); !selected {
			p.Usable, p.waits, p.Problem = false, false, "rdma_devices and rdma_deny leave it out"
		} else {
			r.Selected = true
		}
		p.Usable = p.Usable && r.Problem == ""
		r.Ports = append(r.Ports, p)
	}
	return r
}

func takesDMABufs(dev *verbs.Device) (err error) {
	pd, err := dev.NewPD()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pd.Close()) }()
	return pd.TakesDMABufs()
}

// inspectPort judges a port by what the device says of it.
func inspectPort(cfg *Config, device string, port verbs.Port, entries []verbs.GID, gidErr error) PortReport {
	r := PortReport{Number: port.Number, State: port.State.String(), LinkLayer: port.LinkLayer.String(), Speed: port.Speed, MTU: port.ActiveMTU, LID: port.LID}
	name := fmt.Sprintf("%s:%d", device, port.Number)
	table := gidTable(entries)
	chosen, why, err := -1, "", gidErr
	ranked := rankGIDs(table)
	if err == nil && port.LinkLayer == verbs.LinkEthernet {
		switch {
		case cfg.GIDIndex >= 0:
			var g gid
			if g, err = forceGID(table, cfg.GIDIndex, name); err == nil {
				chosen, why = g.Index, fmt.Sprintf("GID %v, which rdma_gid_index demands", g)
			}
		case len(ranked) == 0:
			err = fmt.Errorf("it has no RoCE address: give the port's network interface an IP address and set it up (ip link set … up); its table has %s", listGIDs(table))
		default:
			chosen = ranked[0].Index
			why = fmt.Sprintf("GID %v, the best of %d by type, then scope, then index", ranked[0], len(ranked))
		}
	}
	if err == nil && port.LinkLayer != verbs.LinkEthernet {
		if port.LID == 0 {
			err = errors.New("it has no LID: is a subnet manager (opensm) running?")
		}
		why = fmt.Sprintf("LID %d", port.LID)
	}
	r.waits = port.State != verbs.PortActive
	switch {
	case port.State == verbs.PortDown:
		r.Problem = "the port is down, and is used once it is active: check the cable, and for RoCE that its network interface is up (ip link set … up)"
	case port.State == verbs.PortInit || port.State == verbs.PortArmed:
		r.Problem = fmt.Sprintf("the port is %v: is a subnet manager (opensm) running?", port.State)
	case port.State != verbs.PortActive:
		r.Problem = fmt.Sprintf("the port is in %v, want active", port.State)
	case err != nil:
		r.Problem = err.Error()
	default:
		r.Usable, r.Address = true, why
	}
	add := func(g gid, usable bool) {
		r.GIDs = append(r.GIDs, GIDReport{Index: g.Index, Address: g.addr().String(), Type: g.Type.String(), Scope: g.scope().String(),
			NetDev: g.NetDev, Usable: usable, Chosen: g.Index == chosen})
	}
	for _, g := range ranked {
		add(g, true)
	}
	for _, g := range table {
		if !g.usable() {
			add(g, g.Type == verbs.GIDInfiniBand && port.LinkLayer != verbs.LinkEthernet)
		}
	}
	return r
}

func inspectMemlock() Memlock {
	m, err := readMemlock()
	switch {
	case err != nil:
		return Memlock{Why: fmt.Sprintf("it cannot be read: %v", err), Remedy: "see whether registering the KV caches works"}
	case m.Capable:
		return Memlock{Unlimited: true, Why: "CAP_IPC_LOCK"}
	case m.Soft == math.MaxUint64:
		return Memlock{Unlimited: true, Why: "RLIMIT_MEMLOCK"}
	}
	return Memlock{Bytes: m.Soft, Why: "RLIMIT_MEMLOCK",
		Remedy: "the KV caches must fit: ulimit -l unlimited, LimitMEMLOCK=infinity in a systemd unit, --ulimit memlock=-1 for docker"}
}
