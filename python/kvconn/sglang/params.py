"""From SGLang's settings to the agent's."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._engine import Rank, host_port

# Keys of the agent's configuration, as a JSON object, or the path of a file that holds one.
CONFIG_VARIABLE = "KVCONN_SGLANG_CONFIG"

# The path of a file with the API key of the prefill servers. Decode asks them by it to compute a retracted request again.
KEY_VARIABLE = "KVCONN_SGLANG_PREFILL_API_KEY_FILE"

# The agent knows all requests that SGLang queues.
MAX_TRANSFERS = 1 << 15

# Keys that both sides derive from SGLang's options. With other values the sides would not find each other.
_OURS: tuple[str, ...] = ("engine_id", "role", "report_demands", "report_claims", "bootstrap_join", "bootstrap_host", "bootstrap_port")
_OURS += ("must_match", "block_tokens", "tp_rank", "tp_size", "pp_rank", "pp_size", "dp_rank", "dp_size")

_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def engine_name(dp_rank: int) -> str:
    """The engine id of a data parallel rank at its prefill engine's bootstrap port. Requests name only the number."""
    return f"sglang-dp{dp_rank}"


def setting(name: str, default: float) -> float:
    """One of SGLang's environment variables, as SGLang reads it."""
    try:
        from sglang.srt.environ import envs

        return float(getattr(envs, name).get())
    except (ImportError, AttributeError):
        return float(os.environ.get(name, default))


# Variables of SGLang's own transfer backends, and of the libraries below them.
_THEIRS = ("SGLANG_MOONCAKE_", "SGLANG_DISAGGREGATION_", "SGLANG_FAILED_SESSION_", "SGLANG_ENABLE_FAILED_SESSION_PROBE", "MC_")
# Those of them that count with kvconn too: kvconn reads them, or SGLang's code around the backends does.
_COUNT = tuple(f"SGLANG_DISAGGREGATION_{name}" for name in ("BOOTSTRAP_TIMEOUT", "WAITING_TIMEOUT", "FORCE_QUERY_PREFILL_DP_RANK"))
_COUNT += ("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT")
_COUNT += ("SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS", "SGLANG_MOONCAKE_CUSTOM_MEM_POOL")


def unused(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The variables that are set for another backend and mean nothing with kvconn."""
    return sorted(name for name, value in environ.items() if value and name.startswith(_THEIRS) and name not in _COUNT)


def from_environment(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    text = environ.get(CONFIG_VARIABLE, "").strip()
    if not text:
        return {}
    where = CONFIG_VARIABLE
    if not text.startswith("{"):
        where = f"{CONFIG_VARIABLE}, file {text}"
        with open(text, encoding="utf-8") as file:
            text = file.read()
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{where} is {config!r}: an object was expected")
    return config


def for_gpu(extra: Mapping[str, Any], ib_device: str | None, gpu: int) -> dict[str, Any]:
    """The user's keys, with the RDMA devices that --disaggregation-ib-device has for this rank's GPU.

    The option's value is a list for all GPUs, a mapping, or the path of a file with a mapping, as SGLang itself reads it.
    """
    if not ib_device:
        return dict(extra)
    try:
        from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import get_ib_devices_for_gpu
    except ImportError as error:
        raise ValueError(
            f"--disaggregation-ib-device is {ib_device}, and kvconn cannot read it with this SGLang ({error}): "
            f"name the devices in rdma_devices of {CONFIG_VARIABLE}"
        ) from error
    try:
        found = [name.strip() for name in (get_ib_devices_for_gpu(ib_device, gpu) or "").split(",")]
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"--disaggregation-ib-device is {ib_device}: {error}") from error
    devices = list(dict.fromkeys(name for name in found if name))
    if not devices:
        raise ValueError(f"--disaggregation-ib-device is {ib_device}: it names no device for GPU {gpu}")
    given = extra.get("rdma_devices", devices)
    if given != devices:
        raise ValueError(
            f"--disaggregation-ib-device has {devices} for GPU {gpu}, {CONFIG_VARIABLE} has rdma_devices {given}: give one of the two"
        )
    return {**extra, "rdma_devices": devices}


def prefill_api_key(extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> str:
    """The API key that the operator has given for the prefill servers; empty if he has given none."""
    path = environ.get(KEY_VARIABLE, "").strip()
    if not path:
        return ""
    if not extra.get("bootstrap_allow"):
        raise ValueError(
            f"{KEY_VARIABLE} is set, and {CONFIG_VARIABLE} has no bootstrap_allow: a client's request names the prefill host, "
            "so any host could be sent the key; name the prefill hosts there"
        )
    with open(path, encoding="utf-8") as file:
        key = file.read().strip()
    if not key or not key.isprintable():
        raise ValueError(f"{KEY_VARIABLE}, file {path}: a key of one line was expected")
    return key


def of_rank(extra: Mapping[str, Any], ib_device: str | None, gpu: int, prefill: bool, turns: bool) -> dict[str, Any]:
    """The user's keys for one rank. turns: the server may have the other role next."""
    return for_gpu(for_both_roles(extra, prefill) if turns else extra, ib_device, gpu)


def for_both_roles(extra: Mapping[str, Any], prefill: bool) -> dict[str, Any]:
    """The user's keys as they are for this role, on a server that may have the other one next.

    SGLang ends a server whose other role does not start. So this function refuses keys with which the other role would not start.
    """
    if extra.get("tls_ca_file") and not extra.get("tls_cert_file"):
        raise ValueError(
            f"{CONFIG_VARIABLE} has tls_ca_file without tls_cert_file: with --enable-pd-role-switch this server has a bootstrap port, "
            "which its ranks would ask over TLS; give it a certificate"
        )
    prefill_api_key(extra)
    return dict(extra) if prefill else {key: value for key, value in extra.items() if not key.startswith("join_token")}


def bootstrap_address(host: str, port: int, first_node: str | None) -> str:
    """The address at which the engine's ranks find its own bootstrap server."""
    host = first_node or host
    return host_port(_ANY_HOST.get(host, host), port)


def server_config(host: str, port: int, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the agent that serves the engine's bootstrap port.

    That agent has no caches and is no rank. Of the user's keys it takes those about the port and about admission.
    """
    config: dict[str, Any] = {"role": "bootstrap", "bootstrap_host": host, "bootstrap_port": port}
    config.update(
        {key: value for key, value in extra.items() if key.startswith(("nats_", "tls_")) or key in ("advertise_host", "log_level")}
    )
    return config


@dataclass(frozen=True)
class Prefill:
    """Further settings of a prefill rank's agent."""

    bootstrap: str  # the address of its engine's bootstrap port
    route_info: Mapping[str, Any]
    patience_s: float  # how long a decode engine may wait for a request that SGLang does not know yet


def agent_config(
    rank: Rank, common: Mapping[str, Any], dtype: str, page_size: int, extra: Mapping[str, Any], prefill: Prefill | None = None
) -> dict[str, Any]:
    """The agent's configuration: what SGLang knows, then what the user says. prefill is None for decode."""
    ours = sorted(key for key in extra if key in _OURS)
    if ours:
        raise ValueError(f"{CONFIG_VARIABLE} sets {', '.join(ours)}: SGLang's own options set these keys, so take them away")
    config: dict[str, Any] = {
        "engine_id": engine_name(rank.dp_rank),
        "role": "prefill" if prefill else "decode",
        **common,
        "dtype": dtype,
        "block_tokens": page_size,
        # SGLang's client hears within three seconds that a prefill engine is gone, the scheduler's part included.
        "peer_timeout_s": 2.5,
        "max_transfers": MAX_TRANSFERS,
        **vars(rank),
    }
    if prefill:
        config["report_demands"] = True
        config["early_load_s"] = min(max(prefill.patience_s, 1.0), 3600.0)  # the range that the agent takes
        config["route_info"] = dict(prefill.route_info)
        config["bootstrap_join"] = f"{'https' if extra.get('tls_cert_file') else 'http'}://{prefill.bootstrap}"
    else:
        config["report_claims"] = True
    config.update(extra)
    if "model" in extra and "model_fingerprint" not in extra:  # a user who names the model vouches for it
        config.pop("model_fingerprint", None)
    return config
