"""kv_transfer_params, as routers send them, and the connector's settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Settings of the connector itself; every other key of kv_connector_extra_config goes to the agent, which knows its own.
IDLE_WAIT_MS = "idle_wait_ms"
_OWN_KEYS = (IDLE_WAIT_MS,)
_DEFAULT_IDLE_WAIT_MS = 2.0

_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
_PORT_VARIABLES = ("KVCONN_BOOTSTRAP_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT")


class BadParams(ValueError):
    """kv_transfer_params that cannot be used; the message says what is wrong with them."""


@dataclass(frozen=True)
class PrefillParams:
    """The request's cache will be asked for under this name."""

    transfer_id: str


@dataclass(frozen=True)
class DecodeParams:
    """The request's cache is to be had there, under this name."""

    transfer_id: str
    bootstrap_addr: str
    engine_id: str


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


def parse(params: Any) -> PrefillParams | DecodeParams | None:
    """What a request's kv_transfer_params ask for; None when they ask for nothing; BadParams when they make no sense."""
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise BadParams(f"kv_transfer_params is {params!r}: an object was expected, not {type(params).__name__}")
    prefill, decode = _flag(params, "do_remote_decode"), _flag(params, "do_remote_prefill")
    if prefill and decode:
        raise BadParams("do_remote_decode and do_remote_prefill are both true")
    if prefill:
        return PrefillParams(_text(params, "transfer_id"))
    if decode:
        return DecodeParams(_text(params, "transfer_id"), _text(params, "remote_bootstrap_addr"), _text(params, "remote_engine_id"))
    return None


def check_parallel(parallel_config: Any) -> None:
    """One rank an engine, for now."""
    names = {
        "tensor_parallel_size": "TP",
        "pipeline_parallel_size": "PP",
        "data_parallel_size": "DP",
        "prefill_context_parallel_size": "PCP",
        "decode_context_parallel_size": "DCP",
    }
    sizes = {short: getattr(parallel_config, name, 1) or 1 for name, short in names.items()}
    if getattr(parallel_config, "data_parallel_index", 0):
        # vLLM hides the size from the independent ranks of a dense model, but not their number.
        sizes["DP"] = max(sizes["DP"], parallel_config.data_parallel_index + 1)
    if any(size != 1 for size in sizes.values()):
        found = ", ".join(f"{short} = {size}" for short, size in sizes.items() if size != 1)
        raise ValueError(f"KVConnConnector: {found} is not supported yet: an engine must have one rank (TP = PP = DP = 1)")


# A window's blocks outside of it are gone, and a state is no block: loading those blindly would be wrong bytes.
_REFUSED_SPECS = ("SlidingWindow", "ChunkedLocal", "Mamba")


def check_caches(kv_cache_config: Any) -> None:
    """Only caches that keep every block of the prompt, for now."""
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        for one in getattr(spec, "kv_cache_specs", {"": spec}).values():
            name = type(one).__name__
            if name.startswith(_REFUSED_SPECS):
                raise ValueError(f"KVConnConnector: a KV cache of {name} is not supported yet: full attention and MLA are")


def idle_wait_s(extra: Mapping[str, Any]) -> float:
    value = extra.get(IDLE_WAIT_MS, _DEFAULT_IDLE_WAIT_MS)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 100:
        raise ValueError(f"kv_connector_extra_config: {IDLE_WAIT_MS} is {value!r}: a number from 0 to 100 was expected")
    return float(value) / 1000


def _port_from_environment() -> int | None:
    for name in _PORT_VARIABLES:
        text = os.environ.get(name, "")
        if not text:
            continue
        if not text.isdigit() or not 0 < int(text) < 65536:
            raise ValueError(f"{name} is {text!r}: a port from 1 to 65535 was expected")
        return int(text)
    return None


def agent_config(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """The agent's configuration: what vLLM knows, then what the user says in kv_connector_extra_config."""
    transfer = vllm_config.kv_transfer_config
    model, cache = vllm_config.model_config, vllm_config.cache_config
    dtype = str(getattr(cache, "cache_dtype", "auto"))
    if dtype == "auto":
        dtype = str(model.dtype)
    group_blocks = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
    config: dict[str, Any] = {
        "engine_id": transfer.engine_id,
        "role": _ROLES[transfer.kv_role],
        # The name and not the path: both engines have the same model, but not the same disk.
        "model": os.path.basename(str(model.model).rstrip("/")),
        "dtype": dtype.replace("torch.", ""),
        "block_tokens": min(group_blocks) if group_blocks else cache.block_size,
    }
    port = _port_from_environment()
    if port is not None and config["role"] != "decode":
        config["bootstrap_port"] = port
    extra = transfer.kv_connector_extra_config or {}
    config.update({key: value for key, value in extra.items() if key not in _OWN_KEYS})
    return config
