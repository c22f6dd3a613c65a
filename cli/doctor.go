// kvconn doctor says which transports work on this machine, and what is missing for the others.

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/kvconn/kvconn/cli/gpuhost"
	"github.com/kvconn/kvconn/local"
	"github.com/kvconn/kvconn/node"
	"github.com/kvconn/kvconn/rdma"
)

// diagnosis is the result of doctor.
type diagnosis struct {
	OK   bool        `json:"ok"` // a transport works
	TCP  tcpReport   `json:"tcp"`
	RDMA rdma.Report `json:"rdma"`
	// Local is for two engines on this host.
	Local local.Report   `json:"local"`
	GPU   gpuhost.Report `json:"gpu"`
	// Auto is the transport that auto chooses here.
	Auto string `json:"auto"`
}

type tcpReport struct {
	Available bool     `json:"available"`
	Problem   string   `json:"problem,omitempty"`
	Listen    string   `json:"listen"`    // host and port of the configuration
	Addresses []string `json:"addresses"` // at which this host is reached: "10.0.0.5 (eth0)"
}

var errNoTransport = errors.New("no transport works on this machine, see above")

type doctorOptions struct {
	json bool
	gpu  bool
	file string // with a configuration
}

func (o *doctorOptions) flags() *flag.FlagSet {
	fs := newFlags("doctor")
	fs.BoolVar(&o.json, "json", false, "print JSON")
	fs.BoolVar(&o.gpu, "gpu", false, "ask the CUDA driver even if the kernel has none of its modules; if root runs this, it makes /dev/nvidiactl")
	fs.StringVar(&o.file, "config", "", "a file with an agent's configuration, a JSON object; without one the defaults count")
	return fs
}

// runDoctor says which transports work here, and what there is for GPU memory. It fails when no
// transport works.
func runDoctor(ctx context.Context, args []string, out io.Writer) error {
	var o doctorOptions
	if err := parseOnlyFlags(o.flags(), args); err != nil {
		return err
	}
	cfg := node.DefaultConfig()
	if o.file != "" {
		text, err := os.ReadFile(filepath.Clean(o.file))
		if err == nil {
			cfg, err = node.ParseConfig(text)
		}
		if err != nil {
			return fmt.Errorf("%w: --config %s: %w", errUsage, o.file, err)
		}
	}
	d := examine(cfg, rdma.Inspect, func() local.Report { return examineLocal(ctx, tryLocal) })
	d.GPU = examineGPUs(o.gpu, d.RDMA)
	if o.json {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		if err := enc.Encode(d); err != nil {
			return err
		}
	} else {
		d.print(out)
	}
	if !d.OK {
		return errNoTransport
	}
	return nil
}

func examine(cfg node.Config, inspect func(rdma.Config) rdma.Report, near func() local.Report) diagnosis {
	d := diagnosis{TCP: examineTCP(cfg), RDMA: inspect(cfg.RDMA()), Local: near()}
	d.OK = d.TCP.Available || d.RDMA.Available || cfg.Transport == "local" && d.Local.Available
	switch {
	case d.RDMA.Available && d.TCP.Available:
		d.Auto = "rdma with peers that have it and are reached by it, else tcp"
	case d.RDMA.Available:
		d.Auto = "fails: a prefill agent needs its tcp port; transport rdma works"
	case d.TCP.Available && d.RDMA.Later:
		d.Auto = "tcp, and rdma once a port is active"
	case d.TCP.Available:
		d.Auto = "tcp"
	default:
		d.Auto = "fails"
	}
	switch {
	case !d.TCP.Available:
	case d.Local.Available:
		d.Auto = "local with engines of this host, " + d.Auto + " with others"
	default:
		d.Auto += "; not local, with engines of this host either: " + d.Local.Problem
		if d.Local.Mapped {
			d.Auto += "; local where all of a prefill engine's caches are shared memory (kvconn_alloc)"
		}
	}
	return d
}

// examineTCP listens for a moment, as a prefill agent does.
func examineTCP(cfg node.Config) tcpReport {
	r := tcpReport{Listen: net.JoinHostPort(cfg.TCPListenHost, strconv.Itoa(cfg.TCPPort))}
	ln, err := net.Listen("tcp", r.Listen)
	if errors.Is(err, syscall.EADDRINUSE) {
		r.Problem = fmt.Sprintf("the port of %s is in use: stop the process that holds it, or set tcp_port to a free one, or to 0 for any", r.Listen)
		return r
	}
	if err != nil {
		r.Problem = fmt.Sprintf("cannot listen on %s: %v (tcp_listen_host, tcp_port)", r.Listen, err)
		return r
	}
	ln.Close()
	r.Available = true
	interfaces, _ := net.Interfaces() // only to be shown
	for _, i := range interfaces {
		if i.Flags&net.FlagUp == 0 || i.Flags&net.FlagLoopback != 0 {
			continue
		}
		list, _ := i.Addrs()
		for _, a := range list {
			if ip, ok := a.(*net.IPNet); ok && !ip.IP.IsLinkLocalUnicast() {
				r.Addresses = append(r.Addresses, fmt.Sprintf("%s (%s)", ip.IP, i.Name))
			}
		}
	}
	return r
}

func (d *diagnosis) print(out io.Writer) {
	line := func(indent int, format string, args ...any) {
		fmt.Fprintf(out, strings.Repeat("  ", indent)+format+"\n", args...)
	}
	if d.TCP.Available {
		line(0, "tcp   available: listens on %s", d.TCP.Listen)
		addresses := strings.Join(d.TCP.Addresses, ", ")
		if addresses == "" {
			addresses = "loopback only"
		}
		line(1, "addresses: %s", addresses)
	} else {
		line(0, "tcp   NOT available: %s", d.TCP.Problem)
	}
	if l := d.Local; l.Available {
		line(0, "local available, for two engines on this host (boot id %s, network namespace %s, process namespace %s, user %d)", l.BootID, l.Network, l.Processes, l.User)
		if l.Tried {
			line(1, "two processes have exchanged a block by process_vm_readv")
		}
		line(1, "a prefill engine's memory may be read by %s", l.Who)
	} else {
		line(0, "local NOT available: %s", l.Problem)
	}
	if d.Local.Untried != "" {
		line(1, "%s", d.Local.Untried)
	}
	if d.Local.Mapped {
		line(1, "two processes have exchanged a block of shared memory (kvconn_alloc) by a mapping")
	} else if d.Local.MappingProblem != "" {
		line(1, "shared memory (kvconn_alloc) is NOT mapped: %s", d.Local.MappingProblem)
	}
	r := d.RDMA
	if r.Available {
		line(0, "rdma  available")
	} else {
		line(0, "rdma  NOT available: %s", r.Problem)
	}
	switch m := r.Memlock; {
	case m.Unlimited:
		line(1, "memory that may be locked: unlimited (%s)", m.Why)
	default:
		line(1, "memory that may be locked: %s (%s); %s", formatSize(int(m.Bytes)), m.Why, m.Remedy)
	}
	for _, dev := range r.Devices {
		line(1, "device %s: %s", dev.Name, describeDevice(dev))
		for _, p := range dev.Ports {
			line(2, "port %d: %s", p.Number, describePort(p))
			for _, g := range p.GIDs {
				note := ""
				switch {
				case g.Chosen:
					note = "  <- preferred"
				case !g.Usable:
					note = "  cannot be used"
				}
				line(3, "GID %d: %s, %s, %s, %s%s", g.Index, g.Address, g.Type, g.Scope, orDash(g.NetDev), note)
			}
		}
	}
	line(0, "transport auto: %s", d.Auto)
	printGPUs(&d.GPU, line)
}

func describeDevice(d rdma.DeviceReport) string {
	if d.Problem != "" && len(d.Ports) == 0 {
		return "cannot be used: " + d.Problem
	}
	node := "no NUMA node"
	if d.NUMANode >= 0 {
		node = fmt.Sprintf("NUMA node %d", d.NUMANode)
	}
	ordering := "no relaxed ordering"
	if d.RelaxedOrdering {
		ordering = "relaxed ordering"
	}
	size := "regions of any size"
	if d.MaxMRSize < math.MaxInt64 {
		size = "regions of at most " + formatSize(int(d.MaxMRSize))
	}
	buffers := "registers no dma-buf"
	if d.DMABuf {
		buffers = "registers dma-bufs"
	}
	text := fmt.Sprintf("%s, %s, firmware %s, %s, %s, %s", d.File, node, orDash(d.Firmware), size, ordering, buffers)
	if d.Problem != "" {
		text += "; cannot be used: " + d.Problem
	}
	return text
}

func describePort(p rdma.PortReport) string {
	speed := "unknown speed"
	if p.Speed > 0 {
		speed = fmt.Sprintf("%g Gb/s", float64(p.Speed)/1e9)
	}
	text := fmt.Sprintf("%s, %s, %s, MTU %d", p.State, p.LinkLayer, speed, p.MTU)
	if p.Usable {
		return text + ": " + p.Address
	}
	return text + ": cannot be used: " + orDash(p.Problem)
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
