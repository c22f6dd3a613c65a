// A configuration is read and refused before anything is opened.

package node

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvconn/kvconn/bootstrap"
	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/natsbus"
)

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
		known, meant := configKeys(), ""
		if name, err := strconv.Unquote(key); err == nil {
			if like := nearest(name, known); like != "" {
				meant = fmt.Sprintf(", the nearest is %q", like)
			}
		}
		return fmt.Errorf("%w: unknown config key %s%s; known keys are %s", core.ErrInvalid, key, meant, strings.Join(known, ", "))
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
	case len(c.Fingerprint) > 64:
		return bad("model_fingerprint", fmt.Sprintf("%.40q…", c.Fingerprint), "at most 64 bytes")
	case len(c.DType) > 64:
		return bad("dtype", fmt.Sprintf("%.40q…", c.DType), "at most 64 bytes")
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
	if _, err := Transports(c.Transport); err != nil {
		return bad("transport", fmt.Sprintf("%.100q", c.Transport), transportWords)
	}
	if err := c.ranks().Check(c.rank()); err != nil {
		return fmt.Errorf("%w: config keys \"tp_rank\", \"tp_size\", \"pp_rank\", \"pp_size\": %w", core.ErrInvalid, err)
	}
	if err := c.checkJoin(); err != nil {
		return err
	}
	if err := c.checkFacts(); err != nil {
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
	for key, s := range map[string]Seconds{"lease_s": c.Lease, "peer_timeout_s": c.PeerTimeout, "early_load_s": c.EarlyLoad, "claim_s": c.Claim, "load_timeout_s": c.Load, "offer_timeout_s": c.Offer,
		"join_timeout_s": c.JoinTimeout, "connect_timeout_s": c.ConnectTimeout, "stall_timeout_s": c.StallTimeout, "close_timeout_s": c.CloseTimeout, "moment_timeout_s": c.MomentTimeout} {
		// A shorter bound would have no room for its three renewals.
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
	if err := c.checkEncryption(); err != nil {
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

// maxDPSize is how many dp ranks GET /query can show.
const maxDPSize = bootstrap.MaxRank + 1

// checkJoin says why this rank cannot join the first one.
func (c *Config) checkJoin() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: config key \"bootstrap_join\" %s", core.ErrInvalid, fmt.Sprintf(format, args...))
	}
	first := c.rank() == kv.Rank{}
	switch {
	case c.Role == RoleBootstrap && (c.ranks() != kv.One || c.DPSize != 1):
		return fmt.Errorf("%w: config keys \"tp_size\", \"pp_size\", \"dp_size\" are set, but an agent of role %q has no rank: remove the keys, the ranks that join bring their own", core.ErrInvalid, c.Role)
	case c.Role == RoleBootstrap && c.NATSURL != "":
		return fmt.Errorf("%w: config key \"nats_url\" is set, but the role is %q: in a cluster the ranks register themselves, so run no agent of this role there", core.ErrInvalid, c.Role)
	case c.BootstrapJoin == "" && c.prefills() && !first && c.NATSURL == "":
		return bad("is missing: rank %v of a prefill engine has no bootstrap port of its own; set it to the port of the engine's first rank, like http://host:%d, or set nats_url", c.rank(), DefaultConfig().BootstrapPort)
	case c.BootstrapJoin == "":
		return nil
	case !c.prefills():
		return bad("is %q, but the role is %q, and only ranks of a prefill engine join: remove the key", c.BootstrapJoin, c.Role)
	case c.NATSURL != "":
		return bad("is %q, but nats_url is set too: in a cluster each rank registers itself; remove one of the two keys", c.BootstrapJoin)
	}
	if _, err := natsbus.ParseAddress(c.BootstrapJoin); err != nil {
		return bad("is wrong: %v", err)
	}
	return nil
}

// checkSecurity says which key is wrong, without reading the files.
func (c *Config) checkSecurity() error {
	bad := func(key, format string, args ...any) error {
		return fmt.Errorf("%w: config key %q %s", core.ErrInvalid, key, fmt.Sprintf(format, args...))
	}
	switch {
	case c.NATSReplicas < 0 || c.NATSReplicas > 5:
		return bad("nats_replicas", "is %d, want 0 to 5", c.NATSReplicas)
	case c.NATSReplicas > 1 && c.NATSURL == "":
		return bad("nats_replicas", "is %d, but nats_url is not set, so there is no cluster: set nats_url, or remove this key", c.NATSReplicas)
	case c.NATSJSPrefix != DefaultConfig().NATSJSPrefix && c.NATSURL == "":
		return bad("nats_js_prefix", "is %q, but nats_url is not set, so there is no cluster: set nats_url, or remove this key", c.NATSJSPrefix)
	case natsbus.CheckJSPrefix(c.NATSJSPrefix) != nil:
		return bad("nats_js_prefix", "%v", natsbus.CheckJSPrefix(c.NATSJSPrefix))
	case c.NATSToken != "" && c.NATSTokenFile != "":
		return bad("nats_token_file", "and nats_token are both set: give one")
	case c.JoinToken != "" && c.JoinTokenFile != "":
		return bad("join_token_file", "and join_token are both set: give one")
	case c.Role == RoleDecode && (c.JoinToken != "" || c.JoinTokenFile != ""):
		return bad("join_token", "is set, but the role is decode, and only ranks of a prefill engine may have that secret: remove the key")
	case c.NATSNKeySeedFile != "" && (c.NATSToken != "" || c.NATSTokenFile != "") && !c.servesNATS():
		return bad("nats_nkey_seed_file", "and a token are both set, but an agent proves itself with one of them: remove the other")
	case c.NATSNKeySeedFile != "" && c.decodes() && c.NATSURL == "" && c.TLSCAFile == "" && len(c.BootstrapAllow) == 0:
		return bad("nats_nkey_seed_file", "proves this agent to a prefill engine, and no prefill engine to this agent: set tls_ca_file, or bootstrap_allow to the prefill engines' hosts")
	case len(c.NATSNKeys) > 0 && !c.servesNATS():
		return bad("nats_nkeys", "is set, but only the embedded server of a prefill engine reads it: remove the key; a cluster's servers have a list of their own")
	case (c.TLSCertFile == "") != (c.TLSKeyFile == ""):
		return bad("tls_cert_file", "is %q, and tls_key_file is %q: set both or neither", c.TLSCertFile, c.TLSKeyFile)
	case len(c.NATSNKeys) > maxListed || len(c.BootstrapAllow) > maxListed:
		return bad("nats_nkeys, bootstrap_allow", "have %d and %d entries, at most %d are read", len(c.NATSNKeys), len(c.BootstrapAllow), maxListed)
	}
	if err := c.checkNATSToken(c.NATSToken); err != nil {
		return bad("nats_token", "%v", err)
	}
	if err := checkSecret(c.JoinToken); err != nil {
		return bad("join_token", "%v", err)
	}
	for _, key := range c.NATSNKeys {
		if err := natsbus.CheckNKey(key); err != nil {
			return bad("nats_nkeys", "has %q: %v", key, err)
		}
	}
	if _, err := parseAllow(c.BootstrapAllow); err != nil {
		return bad("bootstrap_allow", "has %v", err)
	}
	return nil
}

func (c *Config) checkRouteInfo() error {
	if string(c.RouteInfo) == "null" {
		c.RouteInfo = nil
	}
	if c.RouteInfo == nil {
		return nil
	}
	var b bytes.Buffer
	err := json.Compact(&b, c.RouteInfo)
	if err == nil {
		c.RouteInfo = b.Bytes()
		_, err = checkRouteInfo(c.RouteInfo)
	}
	if err != nil {
		return fmt.Errorf("%w: config key \"route_info\": %w", core.ErrInvalid, err)
	}
	return nil
}
