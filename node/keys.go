package node

import (
	"encoding/json"
	"sync"

	"github.com/kvconn/kvconn/bootstrap"
	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/tcp"
)

// Key is one key of the configuration: its default, or the name of the package that has it, and its line in
// docs/configuration.md.
type Key struct {
	Name    string
	Default any    // nil: the key has no default
	Without string // shown in its place: the effect of leaving the key out
	Unit    string
	Meaning string
}

// KeyGroup is a part of the table of keys.
type KeyGroup struct {
	Title string
	Keys  []Key
}

// Keys returns all keys of a Config.
func Keys() []KeyGroup {
	r := rdma.DefaultConfig()
	return []KeyGroup{
		{"The engine and this rank", []Key{
			{Name: "engine_id", Without: "required", Meaning: "Names the engine: the same for all its tp and pp ranks, another one for each dp rank. vLLM sets it. Role `bootstrap` needs none. In a NATS cluster begin it with the engine's nkey, see [security](security.md#names-of-engines-in-a-cluster)."},
			{Name: "role", Without: "required", Meaning: "`prefill`, `decode` or `both`; vLLM sets it from `kv_role`. `bootstrap` is a process that has the bootstrap port and no KV caches, see [ranks](ranks.md)."},
			{Name: "tp_size", Default: 1, Unit: "ranks", Meaning: "How many tensor-parallel ranks the engine has."},
			{Name: "pp_size", Default: 1, Unit: "ranks", Meaning: "How many pipeline-parallel ranks the engine has."},
			{Name: "dp_size", Default: 1, Unit: "engines", Meaning: "How many data-parallel ranks there are. Each is an engine with an `engine_id` of its own."},
			{Name: "tp_rank", Default: 0, Meaning: "Which tensor-parallel rank this agent is, below `tp_size`."},
			{Name: "pp_rank", Default: 0, Meaning: "Which pipeline-parallel rank this agent is, below `pp_size`."},
			{Name: "dp_rank", Default: 0, Meaning: "Which data-parallel rank this agent's engine is, below `dp_size`."},
			{Name: "model", Without: "not compared", Meaning: "The model's name. Both engines must have the same one, unless they set `model_fingerprint`: then kvconn uses the name in messages only."},
			{Name: "model_fingerprint", Without: "not compared", Meaning: "Says in at most 64 bytes which weights the engine serves. Both engines must have the same one, or neither may have one. The connectors make it, unless their configuration sets `model`."},
			{Name: "dtype", Without: "not compared", Meaning: "The KV cache's data type. Both engines must have the same one."},
			{Name: "must_match", Without: "nothing", Meaning: "What else both engines must have in common: an object of at most 16 names, each with a text as its value. If one engine lacks a name, its value counts as `none`. The connectors set this key."},
			{Name: "block_tokens", Default: 0, Unit: "tokens", Meaning: "How many tokens a block has, for regions that do not say it themselves. If neither engine has 0 here, both must have the same number."},
			{Name: "max_transfers", Default: core.Defaults.MaxTransfers, Unit: "transfers", Meaning: "How many claims may be under way at a time; as many loads, as many offers, and as many early claims and loads together (1 to 65536). More are refused."},
			{Name: "log_level", Default: "info", Meaning: "`debug`, `info`, `warn` or `error`."},
		}},
		{"The bootstrap port", []Key{
			{Name: "bootstrap_host", Default: "0.0.0.0", Meaning: "Prefill and bootstrap: the address at which the bootstrap port is opened."},
			{Name: "bootstrap_port", Default: bootstrap.DefaultPort, Meaning: "Prefill and bootstrap: the one port for HTTP and the control plane. 0 is any free one."},
			{Name: "bootstrap_join", Without: "this agent has a port", Meaning: "Prefill, for a rank that has no port of its own: the `http://host:port` of the engine's first rank, or of an agent of role `bootstrap`."},
			{Name: "join_timeout_s", Default: 120, Unit: "s", Meaning: "How long a rank waits for the port that it joins, which may open later."},
			{Name: "advertise_host", Without: "the host at which peers found the bootstrap port; if the rank has joined from another host, its own address towards that port", Meaning: "Prefill: the host that this agent names to its peers as its own."},
			{Name: "route_info", Without: "none", Meaning: "Prefill: a JSON object of at most 4 KiB. Its members replace those of the answer to `GET /route`, or add to them; the engine's sizes stay. Of several ranks' objects the lowest rank's counts."},
		}},
		{"A NATS cluster", []Key{
			{Name: "nats_url", Without: "the embedded server", Meaning: "A NATS cluster (2.11 or newer, with JetStream) in place of the embedded server, on both sides. Several URLs are separated by commas."},
			{Name: "nats_replicas", Default: 0, Unit: "servers", Meaning: "How many servers of the cluster hold the registry (at most 5); 0 means 3, or 1 in a smaller cluster. If the registry exists already, the agent uses it as it is."},
			{Name: "nats_js_prefix", Default: "$JS.API", Meaning: "The prefix of JetStream's API. Set another one if the account of this agent's user imports the registry, see [security](security.md#an-external-cluster)."},
		}},
		{"Who gets in", []Key{
			{Name: "nats_token", Without: "none", Meaning: "The secret of a deployment, the same for all of its agents. It has 16 characters or more, unless it is a cluster's (`nats_url`)."},
			{Name: "nats_token_file", Without: "none", Meaning: "A file with the secret of `nats_token`. Set one of the two keys."},
			{Name: "join_token", Without: "if there is a token or `nats_nkeys`, ranks join from the same host and user only", Meaning: "Prefill: the secret by which the ranks of one engine join its first rank. No decode engine has it. At least 16 characters."},
			{Name: "join_token_file", Without: "none", Meaning: "Prefill: a file with the secret of `join_token`. Set one of the two keys."},
			{Name: "nats_nkey_seed_file", Without: "none", Meaning: "A file with this agent's own nkey seed (`SU…`). The agent proves itself with this key, and needs no token."},
			{Name: "nats_nkeys", Without: "none", Meaning: "Prefill: public nkeys (`U…`) that the embedded server admits beside the token."},
			{Name: "tls_cert_file", Without: "none", Meaning: "Prefill: the bootstrap port speaks https with this certificate. The agent also shows it to a cluster."},
			{Name: "tls_key_file", Without: "none", Meaning: "The certificate's key."},
			{Name: "tls_ca_file", Without: "the system's authorities", Meaning: "The authority to trust. With it, an `http://` bootstrap address means https."},
			{Name: "bootstrap_allow", Without: "all but those that kvconn refuses by default", Meaning: "Hosts, `*.domains` and CIDR ranges that this agent may contact, see [security](security.md)."},
		}},
		{"Transports", []Key{
			{Name: "transport", Default: viaAuto, Meaning: "`auto`: the first of local (both engines on one host), rdma and tcp that both sides have and that goes between them. `local`, `rdma` or `tcp`: that transport, or an error with the reason. Several with commas, as `rdma,tcp`: the first of them that works."},
			{Name: "tcp_listen_host", Without: "all addresses", Meaning: "Prefill: the address at which decode engines open their streams."},
			{Name: "tcp_port", Default: 0, Meaning: "Prefill: the port of those streams; 0 is any free one. A fixed port serves only one rank on a host, see [ports](sizing-and-network.md#ports)."},
			{Name: "tcp_streams", Default: tcp.DefaultStreams, Unit: "connections", Meaning: "The most connections to a peer (1 to 64). The smaller value of the two sides counts. Decode opens two at first. The prefill agent measures how many make transfers faster between the two hosts, and uses that many."},
			{Name: "tcp_encrypt", Default: encryptAuto, Meaning: "Whether tcp encrypts its streams, see [security](security.md#encryption): `always`, `never` or `auto`. With `auto` it does so if there is a token, nkeys, `tls_cert_file`, `tls_ca_file` or a `tls://` cluster, or if the peer must encrypt. If one side must encrypt and the other has `never`, the pair cannot use tcp."},
			{Name: "require_encryption", Default: false, Meaning: "No KV data leaves the host in the clear. tcp always encrypts, and kvconn does not use rdma, which cannot encrypt. It still uses local, whose bytes stay in the host's memory."},
			{Name: "device_ring_bytes", Default: cuda.DefaultRingBytes, Unit: "bytes", Meaning: "Pinned host memory for each GPU that holds regions; tcp moves their bytes through it. An agent without device memory has none."},
			{Name: "device_slot_bytes", Default: cuda.DefaultSlotBytes, Unit: "bytes", Meaning: "The size of a slot of that memory, which is the most that one copy moves to or from a GPU. The ring must have eight slots at least."},
			{Name: "device_copy_kernel", Default: true, Meaning: "A kernel on the GPU copies many small pieces of its memory at once, see [GPU memory](gpu.md#how-it-works). If this is false, the driver's own copies do all."},
			{Name: "rdma_devices", Without: "all", Meaning: "RDMA devices that kvconn may use: `mlx5_0` is one device, `mlx5_0:1` one port of it, `mlx5_*` all that begin so."},
			{Name: "rdma_deny", Without: "none", Meaning: "RDMA devices that kvconn may not use, named in the same way."},
			{Name: "rdma_gid_index", Default: r.GIDIndex, Meaning: "The GID of each RoCE port. -1 takes the best: RoCE v2 before v1, then a routable address before a private one, and that before a link-local one."},
			{Name: "rdma_qps", Default: r.QueuePairs, Unit: "queue pairs", Meaning: "Queue pairs for each pair of ports that reach each other (1 to 16)."},
			{Name: "rdma_send_depth", Default: r.SendDepth, Unit: "requests", Meaning: "Requests under way on a queue pair (16 to 16384), cut to the device's limit."},
			{Name: "rdma_mtu", Default: r.MTU, Unit: "bytes", Meaning: "256, 512, 1024, 2048 or 4096; 0 is the largest that both ports have."},
			{Name: "rdma_timeout", Default: r.Timeout, Unit: "4.096 µs · 2^n", Meaning: "How long a card waits for an acknowledgement (1 to 21)."},
			{Name: "rdma_retry", Default: r.Retry, Unit: "times", Meaning: "How often a card sends again when no acknowledgement has come (0 to 7; on some devices 7 means without end)."},
			{Name: "rdma_rnr_retry", Default: r.RNRRetry, Unit: "times", Meaning: "How often a card tries again when the receiver is not ready (0 to 7; 7 means without end)."},
			{Name: "rdma_min_rnr_timer", Default: r.MinRNRTimer, Unit: "InfiniBand's code", Meaning: "The pause that a card asks its sender for when it is not ready to receive (0 to 31; 12 is 0.64 ms)."},
			{Name: "rdma_traffic_class", Default: r.TrafficClass, Unit: "DSCP · 4 + ECN", Meaning: "The traffic class of RoCE packets (0 to 255)."},
			{Name: "rdma_service_level", Default: r.ServiceLevel, Meaning: "The priority of packets (0 to 15)."},
			{Name: "rdma_pkey_index", Default: r.PKeyIndex, Meaning: "The partition key of each port, by its index."},
			{Name: "rdma_idle_s", Default: Seconds(r.Idle), Unit: "s", Meaning: "If a peer's queue pairs have had no transfer for so long, kvconn closes them (1 to 3600)."},
			{Name: "rdma_relaxed_ordering", Default: r.RelaxedOrdering, Meaning: "`auto`: if the device has it. `on`: an error if the device lacks it. `off`: never."},
		}},
		{"Time limits", []Key{
			{Name: "lease_s", Default: Seconds(core.Defaults.Lease), Unit: "s", Meaning: "How long prefill keeps an offer that no decode engine claims, loads or renews."},
			{Name: "peer_timeout_s", Default: Seconds(core.Defaults.PeerTimeout), Unit: "s", Meaning: "A peer that is silent for so long counts as gone."},
			{Name: "early_load_s", Default: Seconds(core.Defaults.EarlyLoad), Unit: "s", Meaning: "How long prefill keeps a claim or load whose request its engine has not named."},
			{Name: "claim_s", Default: Seconds(core.Defaults.Claim), Unit: "s", Meaning: "How long decode keeps a claim that no load follows."},
			{Name: "load_timeout_s", Default: Seconds(core.Defaults.Load), Unit: "s", Meaning: "How long a load may hold decode's blocks, the time of the prefill included. After that it fails, whatever prefill says and however it sends."},
			{Name: "offer_timeout_s", Default: Seconds(core.Defaults.Offer), Unit: "s", Meaning: "How long an offer may hold prefill's blocks. After that it ends as `expired`, whatever decode says and however it loads."},
			{Name: "connect_timeout_s", Default: Seconds(core.DefaultConnectTimeout), Unit: "s", Meaning: "How long an agent may take to find and meet a peer, and how long one of several streams that broke may take to come back."},
			{Name: "stall_timeout_s", Default: Seconds(core.DefaultStallTimeout), Unit: "s", Meaning: "If a stream makes no progress for so long, it ends."},
			{Name: "moment_timeout_s", Default: Seconds(core.Defaults.MomentTimeout), Unit: "s", Meaning: "If a moment of a GPU's stream has not passed after so long, the transfers that wait for it end. A load ends too if decode's own driver holds it up for so long."},
			{Name: "close_timeout_s", Default: 5, Unit: "s", Meaning: "Bounds `kvconn_close`."},
		}},
		{"Further completions", []Key{
			{Name: "report_demands", Default: false, Meaning: "Prefill gets one completion of the side \"demand\" for each announced transfer: when decode asks for it, or when the engine offers it or a part of it, or when it ends, whichever comes first."},
			{Name: "report_claims", Default: false, Meaning: "Decode gets a completion of the side \"claim\" when a load of a claimed transfer could only fail: the prefill engine is gone, or has ended the transfer."},
		}},
	}
}

var defaults = sync.OnceValue(func() []byte {
	values := map[string]any{}
	for _, g := range Keys() {
		for _, k := range g.Keys {
			if k.Default != nil {
				values[k.Name] = k.Default
			}
		}
	}
	b, err := json.Marshal(values)
	if err != nil {
		panic(err) // a default of no JSON type
	}
	return b
})

// DefaultConfig is a Config with everything that has a default.
func DefaultConfig() (c Config) {
	if err := json.Unmarshal(defaults(), &c); err != nil {
		panic(err) // a default of another type than its field
	}
	return c
}
