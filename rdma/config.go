package rdma

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
)

// Config of a Transport. Start from DefaultConfig: 0 is a value of its own in
// several fields. The keys named here are those of the agent's configuration,
// which errors name too.
type Config struct {
	// Devices are those that may be used, Deny those that may not. If both name a
	// device, Deny counts. An entry is "mlx5_0", one of its ports "mlx5_0:1", or a
	// pattern "mlx5_*" as of path.Match. No Devices means all.
	Devices []string // rdma_devices
	Deny    []string // rdma_deny

	GIDIndex     int // rdma_gid_index: of each RoCE port; -1 takes the best by rank
	QueuePairs   int // rdma_qps: for each pair of ports that reach each other
	SendDepth    int // rdma_send_depth: requests posted and not completed, of a queue pair
	MTU          int // rdma_mtu: bytes; 0 takes the largest that both ports have
	Timeout      int // rdma_timeout: an acknowledgement is waited for 4.096 µs · 2^Timeout
	Retry        int // rdma_retry: times that a request is sent again when no acknowledgement comes; 7 is without end on some devices
	RNRRetry     int // rdma_rnr_retry: times that a receiver may be not ready; 7 is without end
	MinRNRTimer  int // rdma_min_rnr_timer: the pause that a receiver which is not ready asks for, as encoded by InfiniBand
	TrafficClass int // rdma_traffic_class: of RoCE packets; DSCP · 4 + ECN
	ServiceLevel int // rdma_service_level: the priority, of InfiniBand and of RoCE's VLAN
	PKeyIndex    int // rdma_pkey_index: of each port

	Idle            time.Duration // rdma_idle_s: queue pairs without a transfer for so long are closed
	RelaxedOrdering string        // rdma_relaxed_ordering: auto (where the device has it), on (else an error), off

	// Fallback says that another transport takes the transfers that this one cannot. So New leaves
	// out the devices that cannot register the memory, and if no port is active, it waits for one.
	Fallback bool

	// Guard, if set, can refuse the address of a peer's RoCE port. InfiniBand's addresses are not of IP.
	Guard func(netip.Addr) error

	GPUs      GPUs // nil: all regions lie in the host's memory
	SendsOnly bool // the agent is no decode agent: nobody writes its memory

	MaxTransfers   int           // max_transfers: the most that are expected at a time
	ConnectTimeout time.Duration // connect_timeout_s: the handshake with a peer, its probes included
	StallTimeout   time.Duration // stall_timeout_s: a transfer without progress ends
	Logger         *zap.Logger   // nil logs nothing
}

// The values of RelaxedOrdering.
const (
	OrderAuto    = "auto"
	OrderRelaxed = "on"
	OrderStrict  = "off"
)

// DefaultConfig is a Config with the defaults of all fields that have one. With Timeout 14
// and Retry 6 the device gives up a path that swallows all packets after 0.5 s, or after 2 s
// at most if it stretches the timeout as the standard lets it.
func DefaultConfig() Config {
	return Config{
		GIDIndex: -1, QueuePairs: 2, SendDepth: 512, Timeout: 14, Retry: 6, RNRRetry: 7, MinRNRTimer: 12,
		Idle: 5 * time.Minute, RelaxedOrdering: OrderAuto,
		MaxTransfers: core.Defaults.MaxTransfers, ConnectTimeout: core.DefaultConnectTimeout, StallTimeout: core.DefaultStallTimeout,
	}
}

// maxListed bounds the entries of Devices and of Deny.
const maxListed = 256

// Check says which value is out of range, by its key, and what is wanted.
func (c *Config) Check() error {
	for _, v := range []struct {
		key       string
		value     int
		low, high int
		what      string
	}{
		{"rdma_gid_index", c.GIDIndex, -1, 255, "; -1 takes the best one, kvconn doctor lists them"},
		{"rdma_qps", c.QueuePairs, 1, 16, " queue pairs for each pair of ports"},
		{"rdma_send_depth", c.SendDepth, 16, 16384, " requests, cut to the device's limit"},
		{"rdma_timeout", c.Timeout, 1, 21, ": 4.096 µs · 2^n, 14 is 67 ms, 21 is 8.6 s"},
		{"rdma_retry", c.Retry, 0, 7, "; 7 is without end on some devices, Soft-RoCE among them"},
		{"rdma_rnr_retry", c.RNRRetry, 0, 7, "; 7 is without end"},
		{"rdma_min_rnr_timer", c.MinRNRTimer, 0, 31, ", as InfiniBand encodes it: 1 is 0.01 ms, 12 is 0.64 ms, 31 is 491 ms, 0 is 655 ms"},
		{"rdma_traffic_class", c.TrafficClass, 0, 255, ": DSCP · 4 + ECN"},
		{"rdma_service_level", c.ServiceLevel, 0, 15, ""},
		{"rdma_pkey_index", c.PKeyIndex, 0, 65535, ""},
	} {
		if v.value < v.low || v.value > v.high {
			return fmt.Errorf("config key %q is %d, want %d to %d%s", v.key, v.value, v.low, v.high, v.what)
		}
	}
	if c.MTU != 0 && !slices.Contains([]int{256, 512, 1024, 2048, 4096}, c.MTU) {
		return fmt.Errorf("config key \"rdma_mtu\" is %d, want 256, 512, 1024, 2048, 4096, or 0 for the largest that both ports have", c.MTU)
	}
	if !slices.Contains([]string{OrderAuto, OrderRelaxed, OrderStrict}, c.RelaxedOrdering) {
		return fmt.Errorf("config key \"rdma_relaxed_ordering\" is %q, want auto, on or off", c.RelaxedOrdering)
	}
	if c.Idle < time.Second || c.Idle > time.Hour {
		return fmt.Errorf("config key \"rdma_idle_s\" is %v, want 1 to 3600 seconds", c.Idle.Seconds())
	}
	for key, list := range map[string][]string{"rdma_devices": c.Devices, "rdma_deny": c.Deny} {
		if len(list) > maxListed {
			return fmt.Errorf("config key %q has %d entries, at most %d are read", key, len(list), maxListed)
		}
		for _, entry := range list {
			if _, _, err := splitPort(entry); err != nil {
				return fmt.Errorf("config key %q has %.80q, which %w", key, entry, err)
			}
		}
	}
	return nil
}

// guard says whether packets may go to a peer's RoCE port.
func (c *Config) guard(g *gid) error {
	if c.Guard == nil {
		return nil
	}
	return c.Guard(g.addr())
}

// splitPort takes an entry of a list apart: port 0 means every port.
func splitPort(entry string) (device string, port int, err error) {
	device, number, one := strings.Cut(entry, ":")
	if one {
		if port, err = strconv.Atoi(number); err != nil || port < 1 || port > 255 {
			return "", 0, fmt.Errorf("names port %.20q: want 1 to 255, or the device alone for all its ports", number)
		}
	}
	if device == "" || len(device) > 63 {
		return "", 0, fmt.Errorf("is not a device's name of 1 to 63 bytes: kvconn doctor lists them")
	}
	for _, r := range device {
		if r <= ' ' || r >= 0x7f || r == '/' {
			return "", 0, fmt.Errorf("is not a device's name: kvconn doctor lists them")
		}
	}
	if _, err := filepath.Match(device, ""); err != nil {
		return "", 0, fmt.Errorf("is a malformed pattern: %w", err)
	}
	return device, port, nil
}

// Selects says whether a port may be used.
func (c *Config) Selects(device string, port int) bool {
	return (len(c.Devices) == 0 || lists(c.Devices, device, port)) && !lists(c.Deny, device, port)
}

func lists(entries []string, device string, port int) bool {
	for _, entry := range entries {
		d, p, err := splitPort(entry)
		if err != nil || p != 0 && p != port {
			continue
		}
		if ok, _ := filepath.Match(d, device); ok {
			return true
		}
	}
	return false
}

// Missing returns the entries of Devices that no device of this machine fits: a
// misspelt name must not go unseen.
func (c *Config) Missing(devices []string) (entries []string) {
	for _, entry := range c.Devices {
		_, port, _ := splitPort(entry)
		if !slices.ContainsFunc(devices, func(device string) bool { return lists([]string{entry}, device, port) }) {
			entries = append(entries, entry)
		}
	}
	return entries
}
