package node

import (
	"encoding/json"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rdma"
)

// The transports, as configuration, registry and statistics name them.
const (
	viaAuto = "auto" // the first of those below that both sides have and that works
	viaRDMA = "rdma"
	viaTCP  = "tcp"
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
// of kvconn_open and of vLLM's kv_connector_extra_config. Durations are seconds.
type Config struct {
	EngineID string `json:"engine_id"` // same for all tp and pp ranks of an engine, another one for each dp rank; required but for role bootstrap
	Role     string `json:"role"`      // prefill, decode, both or bootstrap; required
	DPRank   int    `json:"dp_rank"`
	TPRank   int    `json:"tp_rank"`
	PPRank   int    `json:"pp_rank"`
	DPSize   int    `json:"dp_size"`
	TPSize   int    `json:"tp_size"`
	PPSize   int    `json:"pp_size"`

	// What P and D must have in common; empty or 0 is not compared.
	Model       string `json:"model"`
	DType       string `json:"dtype"`
	BlockTokens int    `json:"block_tokens"`

	// RouteInfo is a JSON object that is laid over what GET /route of the bootstrap
	// port answers of this rank's engine, beside its sizes: for SGLang.
	RouteInfo json.RawMessage `json:"route_info"`

	// The bootstrap port of a prefill engine's first rank: HTTP and NATS. Its other
	// ranks, and other dp ranks that have no port of their own, join that.
	BootstrapHost string `json:"bootstrap_host"`
	BootstrapPort int    `json:"bootstrap_port"` // 0 = any free one
	BootstrapJoin string `json:"bootstrap_join"` // "http://host:port" of the first rank; empty: this one has a port
	AdvertiseHost string `json:"advertise_host"` // empty = where peers found the bootstrap port
	NATSURL       string `json:"nats_url"`       // a cluster in place of the embedded server
	NATSReplicas  int    `json:"nats_replicas"`  // of the registry in that cluster; 0 = 3 where it can

	// Who gets in. Files are read once, by Open.
	NATSToken        string   `json:"nats_token"`
	NATSTokenFile    string   `json:"nats_token_file"`
	NATSNKeySeedFile string   `json:"nats_nkey_seed_file"` // this agent's own, in the token's place
	NATSNKeys        []string `json:"nats_nkeys"`          // public keys that the embedded server admits
	TLSCertFile      string   `json:"tls_cert_file"`       // of the bootstrap port, and towards a cluster
	TLSKeyFile       string   `json:"tls_key_file"`
	TLSCAFile        string   `json:"tls_ca_file"`     // whom to trust; bootstrap ports must speak TLS then
	BootstrapAllow   []string `json:"bootstrap_allow"` // hosts, *.domains, CIDRs that may be contacted

	Transport     string `json:"transport"` // auto: rdma, else tcp; rdma or tcp: that one or none
	TCPListenHost string `json:"tcp_listen_host"`
	TCPPort       int    `json:"tcp_port"` // 0 = any free one
	TCPStreams    int    `json:"tcp_streams"`

	// See rdma.Config.
	RDMADevices         []string `json:"rdma_devices"` // "mlx5_0", "mlx5_1:1"; none = all
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
	ConnectTimeout Seconds `json:"connect_timeout_s"`
	StallTimeout   Seconds `json:"stall_timeout_s"`
	CloseTimeout   Seconds `json:"close_timeout_s"`
	JoinTimeout    Seconds `json:"join_timeout_s"`
	MaxTransfers   int     `json:"max_transfers"`
	ReportWants    bool    `json:"report_wants"`  // prefill: report when an announced transfer is wanted
	ReportClaims   bool    `json:"report_claims"` // decode: report when a claim can come to nothing any more

	LogLevel string `json:"log_level"` // debug, info, warn or error
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

// DefaultConfig is a Config with everything that has a default.
func DefaultConfig() Config {
	c := Config{
		DPSize: 1, TPSize: 1, PPSize: 1,
		BootstrapHost: "0.0.0.0", BootstrapPort: 8998,
		Transport: viaAuto, TCPListenHost: "", TCPStreams: 2,
		Lease: Seconds(30 * time.Second), PeerTimeout: Seconds(3 * time.Second), EarlyLoad: Seconds(30 * time.Second), Claim: Seconds(time.Hour),
		ConnectTimeout: Seconds(3 * time.Second), StallTimeout: Seconds(10 * time.Second), CloseTimeout: Seconds(5 * time.Second),
		JoinTimeout:  Seconds(2 * time.Minute),
		MaxTransfers: 4096, LogLevel: "info",
	}
	c.rdmaDefaults()
	return c
}

func (c *Config) prefills() bool { return c.Role == RolePrefill || c.Role == RoleBoth }

func (c *Config) decodes() bool { return c.Role == RoleDecode || c.Role == RoleBoth }

// helloBound is how long one hello may take. It is a part of the bound of a look-up,
// since the server that carried the hello may have died.
func (c *Config) helloBound() time.Duration { return time.Duration(c.ConnectTimeout) / 3 }

// servesPort: this agent has a bootstrap port.
func (c *Config) servesPort() bool {
	return c.Role == RoleBootstrap || c.prefills() && c.BootstrapJoin == "" && c.rank() == core.Rank{}
}

func (c *Config) servesNATS() bool { return c.servesPort() && c.NATSURL == "" }

func (c *Config) ranks() core.Ranks { return core.Ranks{TP: c.TPSize, PP: c.PPSize} }

func (c *Config) rank() core.Rank { return core.Rank{TP: c.TPRank, PP: c.PPRank} }

// transports are those that may be used, the preferred one first.
func (c *Config) transports() []string {
	if c.Transport == viaAuto {
		return []string{viaRDMA, viaTCP}
	}
	return []string{c.Transport}
}

func (c *Config) rdmaDefaults() {
	r := rdma.DefaultConfig()
	c.RDMAGIDIndex, c.RDMAQPs, c.RDMASendDepth, c.RDMAMTU = r.GIDIndex, r.QueuePairs, r.SendDepth, r.MTU
	c.RDMATimeout, c.RDMARetry, c.RDMARNRRetry, c.RDMAMinRNRTimer = r.Timeout, r.Retry, r.RNRRetry, r.MinRNRTimer
	c.RDMATrafficClass, c.RDMAServiceLevel, c.RDMAPKeyIndex = r.TrafficClass, r.ServiceLevel, r.PKeyIndex
	c.RDMAIdle, c.RDMARelaxedOrdering = Seconds(r.Idle), r.RelaxedOrdering
}
