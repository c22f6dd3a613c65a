"""kv_transfer_params, as routers send them, and the connector's settings."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from .._engine import Rank, host_port
from ..errors import ConfigError
from ..types import Claim
from . import states
from .compat import PORT, like, understood
from .names import NIXL, OWN
from .served import cache_dtype, model_keys, must_match
from .shards import WHOLE, Shard

# Settings of the connector itself. Every other key of kv_connector_extra_config goes to the agent, which refuses unknown ones.
IDLE_WAIT_MS = "idle_wait_ms"
SEND_EARLY = "send_early"
RECOMPUTE_BELOW = "kv_recompute_threshold"  # as NIXL's connector calls it
_OWN_KEYS = (IDLE_WAIT_MS, SEND_EARLY, RECOMPUTE_BELOW)
_DEFAULT_IDLE_WAIT_MS = 2.0

_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
ERROR = "kvconn_error"  # in a prefill engine's answer: why there is nothing to load


class BadParams(ValueError):
    """kv_transfer_params that cannot be used; the message says what is wrong with them."""


class PrefillParams(NamedTuple):
    """A decode engine will ask for the request's cache by this transfer id."""

    transfer_id: str
    early: bool = False  # a decode engine has the id already, and may ask before the prompt is computed


# Where the request's cache is, and its transfer id: what the agent is told in a claim.
DecodeParams = Claim


@dataclass(frozen=True)
class Refused:
    """The request's kv_transfer_params cannot be used."""

    reason: str
    loads: bool  # the request counts on a cache from elsewhere; kv_load_failure_policy says what becomes of it


def _text(params: Mapping[str, Any], key: str) -> str:
    if key not in params or params[key] is None:
        raise BadParams(f"{key} is missing")
    value = params[key]
    if not isinstance(value, str):
        raise BadParams(f"{key} is {value!r}: a string was expected, not {type(value).__name__}")
    if not value:
        raise BadParams(f"{key} is empty")
    return value


def _flag(params: Mapping[str, Any], key: str) -> bool:
    value = params.get(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise BadParams(f"{key} is {value!r}: true or false was expected, not {type(value).__name__}")


def asks_for_load(params: Any) -> bool:
    """Whether the request counts on a cache from elsewhere, however little sense its parameters make."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_prefill"))


ALONE = "kvconn_alone"  # kvconn's router gives the request to this engine alone, on purpose


_RANDOM = re.compile(r"-[0-9a-f]{8}$", re.IGNORECASE)  # which vLLM puts behind each request's id


def base_of(request_id: str) -> str:
    """The part of a request's id that two engines' ids have in common if both requests came with one X-Request-Id."""
    return _RANDOM.sub("", request_id)


def parse(params: Any, base: str = "") -> PrefillParams | DecodeParams | None:
    """What a request's kv_transfer_params ask for; None when they ask for nothing; BadParams when they make no sense.

    A decode request comes with Mooncake's keys, which the router has made, or with those of the prefill engine's answer
    (see answer). The answer has Mooncake's keys and NIXL's; a router may have dropped either.

    base is base_of the request's own id, and names the transfer. base is given if routers ask both engines at once
    with one X-Request-Id, tell the decode engine this id as remote_request_id, and tell the prefill engine no id.
    """
    if params is None:
        return None
    if type(params) is not dict and not isinstance(params, Mapping):  # a check for Mapping is slow
        raise BadParams(f"kv_transfer_params is {params!r}: an object was expected, not {type(params).__name__}")
    prefill, decode = _flag(params, "do_remote_decode"), _flag(params, "do_remote_prefill")
    if prefill and decode:
        raise BadParams("do_remote_decode and do_remote_prefill are both true")
    if prefill:
        # A router that leaves the id to us hands our answer on, and the answer has the id.
        if params.get("transfer_id") is not None:
            return PrefillParams(_text(params, "transfer_id"), True)
        if base:
            return PrefillParams(base, True)
        return PrefillParams(f"kvconn-{uuid.uuid4().hex}")
    if decode:
        if params.get(ERROR) is not None:
            raise BadParams(f"the prefill engine says: {params[ERROR]}")
        return DecodeParams(_transfer_id(params, base), _bootstrap_addr(params), _text(params, "remote_engine_id"))
    return None


def _transfer_id(params: Mapping[str, Any], base: str) -> str:
    mooncake, nixl = params.get("transfer_id"), params.get("remote_request_id")
    if base and mooncake is None and isinstance(nixl, str) and nixl and nixl in base:
        return base  # another id is of a prefill engine's answer
    if nixl is None or nixl == mooncake:
        return _text(params, "transfer_id")
    if mooncake is not None:
        raise BadParams(f"transfer_id is {mooncake!r}, but remote_request_id is {nixl!r}: both name the transfer, so give one")
    return _text(params, "remote_request_id")


def _bootstrap_addr(params: Mapping[str, Any]) -> str:
    if params.get("remote_bootstrap_addr") is not None or params.get("remote_host") is None:
        return _text(params, "remote_bootstrap_addr")
    host, port = _text(params, "remote_host"), params.get("remote_port")
    if isinstance(port, str) and port.isdigit():
        port = int(port)
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise BadParams(f"remote_port is {port!r}: a port from 1 to 65535 was expected")
    return f"http://{host_port(host, port)}"


def answer(
    transfer_id: str, engine_id: str, bootstrap_addr: str, block_ids: list[list[int]], sizes: Mapping[str, int], num_tokens: int
) -> dict[str, Any]:
    """The prefill engine's answer, which the router hands to the decode engine as it is."""
    parts = urlsplit(bootstrap_addr)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_bootstrap_addr": bootstrap_addr,
        "remote_engine_id": engine_id,
        # NIXL's keys for the same, for routers that know and keep only those.
        "remote_request_id": transfer_id,
        "remote_host": parts.hostname,
        "remote_port": parts.port,
        "remote_block_ids": block_ids,
        "remote_num_tokens": num_tokens,
        **sizes,
    }


def refusal(reason: str) -> dict[str, Any]:
    """The prefill engine's answer if there is nothing to load. The decode engine then fails the request with this reason."""
    return {"do_remote_prefill": True, "do_remote_decode": False, ERROR: reason}


def sizes(parallel_config: Any) -> dict[str, int]:
    """The engine's sizes, by NIXL's keys."""
    names = {"tp_size": "tensor", "pp_size": "pipeline", "dcp_size": "decode_context"}
    return {key: getattr(parallel_config, f"{name}_parallel_size", 1) or 1 for key, name in names.items()}


def check_parallel(parallel_config: Any) -> None:
    """Refuses an engine whose ranks compute parts of a prompt each."""
    if (size := getattr(parallel_config, "prefill_context_parallel_size", 1) or 1) != 1:
        raise ValueError(f"PCP = {size} is not supported: tensor, pipeline, data and decode context parallel engines are")


# The most that a bootstrap port has numbers for.
_ANY_DP_SIZE = 65536


def rank_of(parallel_config: Any, engine_id: str) -> Rank:
    """This worker's rank, once vLLM has set its groups up."""
    from vllm.distributed import parallel_state

    tp, pp = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    return Rank(tp.rank_in_group, tp.world_size, pp.rank_in_group, pp.world_size, *dp_of(parallel_config, engine_id))


def dp_of(parallel_config: Any, engine_id: str) -> tuple[int, int]:
    """The data parallel rank, and the number of data parallel ranks."""
    rank = getattr(parallel_config, "data_parallel_index", 0) or 0
    size = getattr(parallel_config, "data_parallel_size", 1) or 1
    if size == 1 and engine_id.endswith(f"_dp{rank}"):
        # The ranks of a dense model are independent of each other: vLLM tells each its number, but not how many there are.
        return rank, _ANY_DP_SIZE
    return rank, max(size, rank + 1)


_ANY_HOST = ("", "0.0.0.0", "::")
_DEFAULT_PORT = 8998  # the agent's own default, which the other ranks must know; a test holds it against the library


def _join(parallel_config: Any, rank: Rank, config: Mapping[str, Any]) -> str | None:
    """The address at which the engine's first rank serves its port; None on the first rank itself."""
    first = rank.tp_rank == rank.pp_rank == 0
    local_only = getattr(parallel_config, "local_engines_only", False)
    # If each host has its own front end, each host has its own port, at the first of its engines.
    if first and (getattr(parallel_config, "data_parallel_rank_local", 0) if local_only else rank.dp_rank) in (0, None):
        return None
    if local_only:
        host = "127.0.0.1"
    elif getattr(parallel_config, "nnodes_within_dp", 1) > 1:
        host = parallel_config.master_addr
    else:
        host = getattr(parallel_config, "data_parallel_master_ip", "127.0.0.1")
    if host in ("127.0.0.1", "localhost") and config.get("bootstrap_host", "") not in _ANY_HOST:
        host = config["bootstrap_host"]
    port = config.get("bootstrap_port", _DEFAULT_PORT)
    if not port:
        raise ValueError(
            "kv_connector_extra_config: bootstrap_port is 0: the engine's other ranks must know the port of the first one, so set it"
        )
    return f"{'https' if config.get('tls_cert_file') else 'http'}://{host_port(host, port)}"


def advertised(address: str | None, config: Mapping[str, Any]) -> str | None:
    """The bootstrap address that other engines are told; a rank on the first rank's host may know it by a local name only.

    A rank on another host knows the address by which that host is reached. Its own advertise_host is another one.
    """
    host = config.get("advertise_host")
    if not address or not host:
        return address
    parts = urlsplit(address)
    if "bootstrap_join" in config and parts.hostname not in ("127.0.0.1", "localhost", "::1", config.get("bootstrap_host")):
        return address
    return f"{parts.scheme}://{host_port(host, parts.port)}"


def idle_wait_s(extra: Mapping[str, Any], parallel_config: Any) -> float:
    """How long a step without tokens waits for a completion."""
    value = extra.get(IDLE_WAIT_MS, _DEFAULT_IDLE_WAIT_MS)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 100:
        raise ValueError(f"kv_connector_extra_config: {IDLE_WAIT_MS} is {value!r}: a number from 0 to 100 was expected")
    if getattr(parallel_config, "data_parallel_size", 1) > 1 and getattr(parallel_config, "is_moe_model", None) is not False:
        return 0.0  # such ranks compute together: the ranks that decode would wait for this one
    return float(value) / 1000


def recompute_below(extra: Mapping[str, Any]) -> int:
    """Decode computes what it lacks of a prompt itself if that is fewer tokens than this; 0: it loads any number."""
    value = extra.get(RECOMPUTE_BELOW, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ValueError(f"kv_connector_extra_config: {RECOMPUTE_BELOW} is {value!r}: a number of tokens was expected, or 0 for none")
    return value


LAYERS, CHUNKS, OFF = "layers", "chunks", "off"


def send_early(extra: Mapping[str, Any], parallel_config: Any) -> str:
    """How a prompt is sent while it is computed: layer by layer, step by step of a chunked prefill, or not at all."""
    value = extra.get(SEND_EARLY, LAYERS)
    if value not in (LAYERS, CHUNKS, OFF):
        raise ValueError(f'kv_connector_extra_config: {SEND_EARLY} is {value!r}: "layers", "chunks" or "off" was expected')
    if value == LAYERS and getattr(parallel_config, "use_ubatching", False):
        return CHUNKS  # vLLM says "layer written" for each part of the batch, before the other parts are there
    return str(value)


def role_of(transfer: Any) -> str:
    """The agent's role."""
    return _ROLES[transfer.kv_role]


def agent_config(vllm_config: Any, kv_cache_config: Any, rank: Rank, name: str = OWN, shard: Shard = WHOLE) -> dict[str, Any]:
    """The agent's configuration: first what vLLM knows, over it what the user says in kv_connector_extra_config.

    name: the name under which vLLM knows the connector.
    """
    transfer = vllm_config.kv_transfer_config
    cache = vllm_config.cache_config
    groups = kv_cache_config.kv_cache_groups
    # The number of tokens of a state's block says nothing of its bytes.
    group_blocks = {group.kv_cache_spec.block_size for group in groups if not states.of(group.kv_cache_spec)}
    config: dict[str, Any] = {
        "engine_id": transfer.engine_id,
        "role": role_of(transfer),
        "dtype": cache_dtype(vllm_config),
        "block_tokens": min(group_blocks) if group_blocks else 0 if groups else cache.block_size,
    }
    extra = understood(name, transfer.kv_connector_extra_config or {}, config["role"]).settings
    config.update(model_keys(vllm_config, extra))
    config.update(asdict(shard.arranged(rank)))
    facts = {**must_match(vllm_config, extra), **states.facts(vllm_config, kv_cache_config, rank.tp_size), **shard.facts()}
    config.update({key: value for key, value in extra.items() if key not in _OWN_KEYS})
    # What vLLM knows of the caches cannot be said otherwise: two engines would take each other's for their own.
    told = config.get("must_match", {})
    if facts and isinstance(told, Mapping):  # else the agent refuses it
        config["must_match"] = {**told, **facts}
    ours = "bootstrap_port" in (transfer.kv_connector_extra_config or {}) or os.environ.get(PORT)
    apart = getattr(vllm_config.parallel_config, "data_parallel_external_lb", False)
    if name in NIXL and apart and not ours and "bootstrap_port" in config:
        # Each such rank is a server of its own, with others on its host. NIXL's configurations name one port for all of them.
        config["bootstrap_port"] += getattr(vllm_config.parallel_config, "data_parallel_index", 0) or 0
    if config["role"] != "decode" and not config.get("nats_url") and "bootstrap_join" not in config:
        join = _join(vllm_config.parallel_config, rank, config)
        if join:
            config["bootstrap_join"] = join
    return config


def open_agent(config: Mapping[str, Any]) -> Any:
    """Opens the agent. The agent refuses a key that it does not know, and names one of its own keys that is like it. If none
    is, this function names one of the connector's keys that is like it."""
    from .. import Agent

    try:
        return Agent(config)
    except ConfigError as error:
        for key in config:
            says = f'unknown config key "{key}"'
            if f"{says};" in error.reason and (meant := like(key, _OWN_KEYS)):
                raise ConfigError(error.reason.replace(says, f"{says}, the nearest is {meant}", 1), code=error.code) from error
        raise
