// What a configuration can say, and what the agent's parts read from it.

package node

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma"
)

// The transports, as configuration, registry and statistics name them.
const (
	viaAuto  = "auto" // the first of local, rdma and tcp that both sides have and that works
	viaLocal = "local"
	viaRDMA  = "rdma"
	viaTCP   = "tcp"
)

// The roles of an agent.
const (
	RolePrefill = "prefill"
	RoleDecode  = "decode"
	RoleBoth    = "both"
	// RoleBootstrap has a bootstrap port and no KV caches: all ranks of a prefill
	// engine, and of its dp ranks, are other processes and join it.
	RoleBootstrap = "bootstrap"
)

// Config says what an agent is and how it behaves. The json names are the keys
// of kvconn_open and of vLLM's kv_connector_extra_config; Keys has their defaults and
// meanings. Durations are seconds.
type Config struct {
	EngineID string `json:"engine_id"`
	Role     string `json:"role"`
	DPRank   int    `json:"dp_rank"`
	TPRank   int    `json:"tp_rank"`
	PPRank   int    `json:"pp_rank"`
	DPSize   int    `json:"dp_size"`
	TPSize   int    `json:"tp_size"`
	PPSize   int    `json:"pp_size"`

	Model       string            `json:"model"`
	Fingerprint string            `json:"model_fingerprint"`
	DType       string            `json:"dtype"`
	BlockTokens int               `json:"block_tokens"`
	MustMatch   map[string]string `json:"must_match"`

	BootstrapHost string          `json:"bootstrap_host"`
	BootstrapPort int             `json:"bootstrap_port"`
	BootstrapJoin string          `json:"bootstrap_join"`
	AdvertiseHost string          `json:"advertise_host"`
	RouteInfo     json.RawMessage `json:"route_info"`
	NATSURL       string          `json:"nats_url"`
	NATSReplicas  int             `json:"nats_replicas"`
	NATSJSPrefix  string          `json:"nats_js_prefix"`

	// Open reads the files, once.
	NATSToken        string   `json:"nats_token"`
	NATSTokenFile    string   `json:"nats_token_file"`
	JoinToken        string   `json:"join_token"`
	JoinTokenFile    string   `json:"join_token_file"`
	NATSNKeySeedFile string   `json:"nats_nkey_seed_file"`
	NATSNKeys        []string `json:"nats_nkeys"`
	TLSCertFile      string   `json:"tls_cert_file"`
	TLSKeyFile       string   `json:"tls_key_file"`
	TLSCAFile        string   `json:"tls_ca_file"`
	BootstrapAllow   []string `json:"bootstrap_allow"`

	Transport     string `json:"transport"`
	TCPListenHost string `json:"tcp_listen_host"`
	TCPPort       int    `json:"tcp_port"`
	TCPStreams    int    `json:"tcp_streams"`
	TCPEncrypt    string `json:"tcp_encrypt"`
	Encryption    bool   `json:"require_encryption"`

	// See cuda.Options.
	DeviceRing int  `json:"device_ring_bytes"`
	DeviceSlot int  `json:"device_slot_bytes"`
	CopyKernel bool `json:"device_copy_kernel"`

	// See rdma.Config.
	RDMADevices         []string `json:"rdma_devices"`
	RDMADeny            []string `json:"rdma_deny"`
	RDMAGIDIndex        int      `json:"rdma_gid_index"`
	RDMAQPs             int      `json:"rdma_qps"`
	RDMASendDepth       int      `json:"rdma_send_depth"`
	RDMAMTU             int      `json:"rdma_mtu"`
	RDMATimeout         int      `json:"rdma_timeout"`
	RDMARetry           int      `json:"rdma_retry"`
	RDMARNRRetry        int      `json:"rdma_rnr_retry"`
	RDMAMinRNRTimer     int      `json:"rdma_min_rnr_timer"`
	RDMATrafficClass    int      `json:"rdma_traffic_class"`
	RDMAServiceLevel    int      `json:"rdma_service_level"`
	RDMAPKeyIndex       int      `json:"rdma_pkey_index"`
	RDMAIdle            Seconds  `json:"rdma_idle_s"`
	RDMARelaxedOrdering string   `json:"rdma_relaxed_ordering"`

	Lease          Seconds `json:"lease_s"`
	PeerTimeout    Seconds `json:"peer_timeout_s"`
	EarlyLoad      Seconds `json:"early_load_s"`
	Claim          Seconds `json:"claim_s"`
	Load           Seconds `json:"load_timeout_s"`
	Offer          Seconds `json:"offer_timeout_s"`
	ConnectTimeout Seconds `json:"connect_timeout_s"`
	StallTimeout   Seconds `json:"stall_timeout_s"`
	MomentTimeout  Seconds `json:"moment_timeout_s"`
	CloseTimeout   Seconds `json:"close_timeout_s"`
	JoinTimeout    Seconds `json:"join_timeout_s"`
	MaxTransfers   int     `json:"max_transfers"`
	ReportDemands  bool    `json:"report_demands"`
	ReportClaims   bool    `json:"report_claims"`

	LogLevel string `json:"log_level"`
}

// Seconds is a duration that JSON writes as a number of seconds.
type Seconds time.Duration

// UnmarshalJSON implements json.Unmarshaler.
func (s *Seconds) UnmarshalJSON(b []byte) error {
	var f float64
	if err := json.Unmarshal(b, &f); err != nil {
		return err
	}
	*s = Seconds(f * float64(time.Second))
	return nil
}

// MarshalJSON implements json.Marshaler.
func (s Seconds) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(s).Seconds()) }

func (c *Config) prefills() bool { return c.Role == RolePrefill || c.Role == RoleBoth }

func (c *Config) decodes() bool { return c.Role == RoleDecode || c.Role == RoleBoth }

// helloBound is how long one hello may take. It is a part of the bound of a look-up,
// since the server that carried the hello may have died.
func (c *Config) helloBound() time.Duration { return time.Duration(c.ConnectTimeout) / 3 }

// servesPort: this agent has a bootstrap port.
func (c *Config) servesPort() bool {
	return c.Role == RoleBootstrap || c.prefills() && c.BootstrapJoin == "" && c.rank() == kv.Rank{}
}

func (c *Config) servesNATS() bool { return c.servesPort() && c.NATSURL == "" }

func (c *Config) ranks() kv.Ranks { return kv.Ranks{TP: c.TPSize, PP: c.PPSize} }

func (c *Config) rank() kv.Rank { return kv.Rank{TP: c.TPRank, PP: c.PPRank} }

// transports are the names of the transports that may be used, the preferred one first.
func (c *Config) transports() []string {
	names, _ := Transports(c.Transport) // Check has looked at it
	return names
}

// fallsBack: if one transport is not there, another may be.
func (c *Config) fallsBack() bool { return len(c.transports()) > 1 }

const transportWords = "auto, local, rdma or tcp, or several of the last three with commas, each once"

// Transports reads a value of the key transport: the names that it stands for, the preferred one
// first.
func Transports(value string) (names []string, err error) {
	if value == viaAuto {
		return []string{viaLocal, viaRDMA, viaTCP}, nil
	}
	for name := range strings.SplitSeq(value, ",") {
		if !slices.Contains([]string{viaLocal, viaRDMA, viaTCP}, name) || slices.Contains(names, name) {
			return nil, fmt.Errorf("transport %.100q: want %s", value, transportWords)
		}
		names = append(names, name)
	}
	return names, nil
}

// RDMA is read from the keys that begin with rdma_.
func (c *Config) RDMA() rdma.Config { return c.rdmaConfig(nil) }

// deviceCloseTime is the part of close_timeout_s that is kept for devices that do not answer.
func (c *Config) deviceCloseTime() time.Duration {
	return min(2*time.Second, time.Duration(c.CloseTimeout)/4)
}

func (c *Config) deviceOptions() cuda.Options {
	return cuda.Options{RingBytes: c.DeviceRing, SlotBytes: c.DeviceSlot, NoKernel: !c.CopyKernel, StallTimeout: time.Duration(c.StallTimeout), CloseTimeout: c.deviceCloseTime()}
}

func (c *Config) rdmaConfig(log *zap.Logger) rdma.Config {
	return rdma.Config{
		Devices: c.RDMADevices, Deny: c.RDMADeny, GIDIndex: c.RDMAGIDIndex, QueuePairs: c.RDMAQPs, SendDepth: c.RDMASendDepth,
		MTU: c.RDMAMTU, Timeout: c.RDMATimeout, Retry: c.RDMARetry, RNRRetry: c.RDMARNRRetry, MinRNRTimer: c.RDMAMinRNRTimer,
		TrafficClass: c.RDMATrafficClass, ServiceLevel: c.RDMAServiceLevel, PKeyIndex: c.RDMAPKeyIndex,
		Idle: time.Duration(c.RDMAIdle), RelaxedOrdering: c.RDMARelaxedOrdering, Fallback: c.fallsBack(),
		MaxTransfers: c.MaxTransfers, ConnectTimeout: time.Duration(c.ConnectTimeout), StallTimeout: time.Duration(c.StallTimeout), Logger: log,
	}
}
