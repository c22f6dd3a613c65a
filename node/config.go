package node

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/kvconn/kvconn/bootstrap"
	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/natsbus"
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

// ParseConfig reads a JSON object over the defaults. An unknown key, a wrong
// type or a value out of range is an error that names it.
func ParseConfig(b []byte) (Config, error) {
	c := DefaultConfig()
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&c); err != nil {
		return c, configError(err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return c, fmt.Errorf("%w: config: text after the JSON object", core.ErrInvalid)
	}
	return c, c.Check()
}

func configError(err error) error {
	var te *json.UnmarshalTypeError
	if errors.As(err, &te) {
		return fmt.Errorf("%w: config key %q is a JSON %s, want %s", core.ErrInvalid, te.Field, te.Value, te.Type)
	}
	if key, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		return fmt.Errorf("%w: unknown config key %s; known keys are %s", core.ErrInvalid, key, strings.Join(configKeys(), ", "))
	}
	return fmt.Errorf("%w: config is not a JSON object: %w", core.ErrInvalid, err)
}

func configKeys() []string {
	var m map[string]any
	b, _ := json.Marshal(DefaultConfig())
	_ = json.Unmarshal(b, &m)
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// minBound is the least of the configurable durations: some ticks of the machine.
const minBound = 5 * core.TickInterval

// Check says which value is out of range.
func (c *Config) Check() error {
	bad := func(key string, value any, want string) error {
		return fmt.Errorf("%w: config key %q is %v, want %s", core.ErrInvalid, key, value, want)
	}
	switch {
	case c.EngineID == "" && c.Role != RoleBootstrap || len(c.EngineID) > 256:
		return bad("engine_id", fmt.Sprintf("%q", c.EngineID), "1 to 256 bytes")
	case !slices.Contains([]string{RolePrefill, RoleDecode, RoleBoth, RoleBootstrap}, c.Role):
		return bad("role", fmt.Sprintf("%q", c.Role), "prefill, decode, both or bootstrap")
	case len(c.Model) > 512:
		return bad("model", fmt.Sprintf("%.40q…", c.Model), "at most 512 bytes")
	case len(c.DType) > 64:
		return bad("dtype", fmt.Sprintf("%.40q…", c.DType), "at most 64 bytes")
	case !slices.Contains([]string{viaAuto, viaRDMA, viaTCP}, c.Transport):
		return bad("transport", fmt.Sprintf("%q", c.Transport), "auto, rdma or tcp")
	case c.TCPStreams < 1 || c.TCPStreams > 64:
		return bad("tcp_streams", c.TCPStreams, "1 to 64")
	case c.MaxTransfers < 1 || c.MaxTransfers > 1<<16:
		return bad("max_transfers", c.MaxTransfers, "1 to 65536")
	case c.BlockTokens < 0:
		return bad("block_tokens", c.BlockTokens, "0 or more")
	case c.DPSize < 1 || c.DPSize > maxDPSize:
		return bad("dp_size", c.DPSize, fmt.Sprintf("1 to %d", maxDPSize))
	case c.DPRank < 0 || c.DPRank >= c.DPSize:
		return bad("dp_rank", c.DPRank, fmt.Sprintf("0 to %d, which is below dp_size", c.DPSize-1))
	}
	if err := c.ranks().Check(c.rank()); err != nil {
		return fmt.Errorf("%w: config keys \"tp_rank\", \"tp_size\", \"pp_rank\", \"pp_size\": %w", core.ErrInvalid, err)
	}
	if err := c.checkJoin(); err != nil {
		return err
	}
	if err := c.checkRouteInfo(); err != nil {
		return err
	}
	for key, port := range map[string]int{"bootstrap_port": c.BootstrapPort, "tcp_port": c.TCPPort} {
		if port < 0 || port > 65535 {
			return bad(key, port, "0 to 65535")
		}
	}
	for key, s := range map[string]Seconds{"lease_s": c.Lease, "peer_timeout_s": c.PeerTimeout, "early_load_s": c.EarlyLoad, "claim_s": c.Claim,
		"join_timeout_s": c.JoinTimeout, "connect_timeout_s": c.ConnectTimeout, "stall_timeout_s": c.StallTimeout, "close_timeout_s": c.CloseTimeout} {
		// Less would leave no room for the three renewals that a bound is made of.
		if d := time.Duration(s); d < minBound || d > time.Hour {
			return bad(key, d.Seconds(), fmt.Sprintf("%v to 3600 seconds", minBound.Seconds()))
		}
	}
	if c.NATSURL != "" {
		if _, err := natsbus.CheckCluster(c.NATSURL); err != nil {
			return fmt.Errorf("%w: config key \"nats_url\": %w, several separated by commas", core.ErrInvalid, err)
		}
	}
	if err := c.checkSecurity(); err != nil {
		return err
	}
	forRDMA := c.RDMA()
	if err := forRDMA.Check(); err != nil {
		return fmt.Errorf("%w: %w", core.ErrInvalid, err)
	}
	if h := c.AdvertiseHost; h != "" && strings.Contains(h, ":") && net.ParseIP(h) == nil {
		return bad("advertise_host", fmt.Sprintf("%q", h), "a host name or an IP address, without a port")
	}
	if !slices.Contains([]string{"debug", "info", "warn", "error"}, c.LogLevel) {
		return bad("log_level", fmt.Sprintf("%q", c.LogLevel), "debug, info, warn or error")
	}
	return nil
}

// maxDPSize is as many dp ranks as GET /query has numbers for.
const maxDPSize = bootstrap.MaxRank + 1

// checkJoin says what is wrong with the way to the first rank.
func (c *Config) checkJoin() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: config key \"bootstrap_join\" %s", core.ErrInvalid, fmt.Sprintf(format, args...))
	}
	first := c.rank() == core.Rank{}
	switch {
	case c.Role == RoleBootstrap && (c.ranks() != core.One || c.DPSize != 1):
		return fmt.Errorf("%w: config keys \"tp_size\", \"pp_size\", \"dp_size\" are set with role %q, which has no rank: the ranks that join say them, take them away", core.ErrInvalid, c.Role)
	case c.Role == RoleBootstrap && c.NATSURL != "":
		return fmt.Errorf("%w: config key \"nats_url\" is set with role %q: in a cluster the ranks register themselves, and need none to join", core.ErrInvalid, c.Role)
	case c.BootstrapJoin == "" && c.prefills() && !first && c.NATSURL == "":
		return bad("is missing: rank %v of a prefill engine has no bootstrap port of its own; set it to the port of the engine's first rank, like http://host:%d, or set nats_url", c.rank(), DefaultConfig().BootstrapPort)
	case c.BootstrapJoin == "":
		return nil
	case !c.prefills():
		return bad("is %q, but only ranks of a prefill engine join: take it away", c.BootstrapJoin)
	case c.NATSURL != "":
		return bad("is %q, but nats_url is set too: in a cluster each rank registers itself; take one away", c.BootstrapJoin)
	}
	if _, err := natsbus.ParseAddress(c.BootstrapJoin); err != nil {
		return bad("is wrong: %v", err)
	}
	return nil
}

func (c *Config) prefills() bool { return c.Role == RolePrefill || c.Role == RoleBoth }

func (c *Config) decodes() bool { return c.Role == RoleDecode || c.Role == RoleBoth }

// servesPort: this agent has a bootstrap port.
func (c *Config) servesPort() bool {
	return c.Role == RoleBootstrap || c.prefills() && c.BootstrapJoin == "" && c.rank() == core.Rank{}
}

func (c *Config) ranks() core.Ranks { return core.Ranks{TP: c.TPSize, PP: c.PPSize} }

func (c *Config) rank() core.Rank { return core.Rank{TP: c.TPRank, PP: c.PPRank} }
