"""The keys of kv_connector_extra_config, and the environment variables, of deployments that were made for NIXL's or
Mooncake's connector.

kvconn uses what means something to it, and logs the name of everything else once. A key that none of the three connectors
knows goes to the agent, which refuses it. A test compares both tables with the installed vLLM.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .names import MOONCAKE, NIXL, OWN

PORT = "KVCONN_BOOTSTRAP_PORT"
_ANY_HOST = ("", "0.0.0.0", "::")
_LEASE_MOST = 3600  # seconds: the agent's bound
_NO_STORE = "kvconn has no store"
_NO_SECONDS = "its value is no number of seconds above 0"
_NO_BYTE = "its value is no number from 0 to 255, so none is forced"
_NIXL_PORT = 5600  # where vLLM's NIXL connector listens by default, and what firewalls of its deployments let through


class Understood(NamedTuple):
    """Settings of an agent, and what the log is to say about those that come from another connector's keys and variables."""

    settings: dict[str, Any]
    remarks: list[str]


class _Word(NamedTuple):
    of: str  # whose word it is
    ours: Callable[[Any], dict[str, Any]] | None  # the settings that it stands for
    why: str  # if there are none


class _Variable(NamedTuple):
    names: tuple[str, ...]  # of connectors: it counts under these
    ours: Callable[[str], dict[str, Any]] | None
    why: str
    empty: bool = False  # whether it counts if it is set to nothing


def _lease(value: Any) -> dict[str, Any]:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError("a number of seconds was expected")
    return {"lease_s": min(value, _LEASE_MOST)}


def _protocol(value: Any) -> dict[str, Any]:
    if value not in ("tcp", "rdma"):
        raise ValueError('"tcp" or "rdma" was expected')
    return {"transport": "tcp"} if value == "tcp" else {}


def _devices(value: Any) -> dict[str, Any]:
    if not isinstance(value, str):
        raise ValueError("names of RDMA devices with commas between were expected")
    names = [part.strip() for part in value.split(",") if part.strip()]
    return {"rdma_devices": names} if names else {}


def _server(value: Any) -> dict[str, Any]:
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host or bare or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError("host:port was expected, and an IPv6 address in brackets")
    return {"bootstrap_join": f"http://{value}"}


def _port(text: str) -> dict[str, Any]:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise ValueError("a port from 1 to 65535 was expected")
    return {"bootstrap_port": int(text)}


def _host(text: str) -> dict[str, Any]:
    return {} if text in _ANY_HOST else {"advertise_host": text}


def _whole(text: str) -> int | None:
    """A whole number, as vLLM reads one: with a sign, and blanks around it. None: it is none."""
    try:
        return int(text)
    except ValueError:
        return None


def _seconds(text: str) -> dict[str, Any]:
    if (seconds := _whole(text)) is None:
        raise ValueError("a number of seconds was expected")
    return _lease(seconds) if seconds > 0 else {}


def _forgotten_seconds(text: str) -> dict[str, Any]:
    """Of a variable that newer vLLMs do not read, so that a value that is no number ends no start."""
    return {} if _whole(text) is None else _seconds(text)


def _byte(key: str) -> Callable[[str], dict[str, Any]]:
    """A number from 0 to 255. Mooncake starts with any other value, and does not use it."""

    def ours(text: str) -> dict[str, Any]:
        number = _whole(text)
        return {key: number} if number is not None and 0 <= number <= 255 else {}

    return ours


_WORDS = {
    "kv_lease_duration": _Word("NIXL", _lease, ""),
    "backends": _Word("NIXL", None, "kvconn has transports of its own, see transport"),
    "num_threads": _Word("NIXL", None, "kvconn finds the number of its threads"),
    "enforce_handshake_compat": _Word("NIXL", None, "two engines always compare what they serve"),
    "bidirectional_kv_xfer": _Word("NIXL", None, "kvconn carries caches from prefill to decode only"),
    "decoder_kv_blocks_ttl": _Word("NIXL", None, "kvconn carries caches from prefill to decode only"),
    "engine_ttl": _Word("NIXL", None, "an engine is forgotten when it ends"),
    "push_registration_timeout": _Word("NIXL", None, "a load ends by peer_timeout_s"),
    # Of vLLMs before the layout had names, and in the documentation of newer ones.
    "enable_cross_layers_blocks": _Word("NIXL", None, "pieces that lie side by side are moved as one, whatever the layout"),
    "mooncake_protocol": _Word("Mooncake", _protocol, "the best transport that both engines have is taken"),
    "device_name": _Word("Mooncake", _devices, "all RDMA devices are taken"),
    "num_workers": _Word("Mooncake", None, "kvconn finds the number of its threads"),
    "bootstrap_server_address": _Word("Mooncake", _server, ""),
    "preferred_segment": _Word("Mooncake", None, _NO_STORE),
    "prefill_side_swa_replay": _Word("Mooncake", None, "kvconn carries the window itself, and no checkpoint of it"),
}

_VARIABLES = {
    "VLLM_NIXL_SIDE_CHANNEL_PORT": _Variable(NIXL, _port, ""),
    "VLLM_NIXL_SIDE_CHANNEL_HOST": _Variable(NIXL, _host, "its value is no address to tell peers, and kvconn finds one"),
    "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": _Variable(NIXL, _forgotten_seconds, _NO_SECONDS),  # of vLLMs before kv_lease_duration
    "VLLM_MOONCAKE_BOOTSTRAP_PORT": _Variable((*MOONCAKE, OWN), _port, ""),
    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": _Variable(MOONCAKE, _seconds, _NO_SECONDS),
    "VLLM_MOONCAKE_CONNECTOR_TIMEOUT": _Variable(MOONCAKE, None, "see connect_timeout_s and peer_timeout_s"),
    "VLLM_MOONCAKE_STORE_TIER_LOG": _Variable(MOONCAKE, None, _NO_STORE),
    "VLLM_MOONCAKE_LOAD_RECV_THREADS": _Variable(MOONCAKE, None, _NO_STORE),
    "VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO": _Variable(MOONCAKE, None, _NO_STORE),
    "MOONCAKE_PREFERRED_SEGMENT": _Variable(MOONCAKE, None, _NO_STORE),
    "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": _Variable(MOONCAKE, None, _NO_STORE),
    # Mooncake's own library reads these.
    "MC_TCP_BIND_ADDRESS": _Variable(MOONCAKE, None, "vLLM's connector for Mooncake does not use it: see advertise_host"),
    "MC_FORCE_TCP": _Variable(MOONCAKE, lambda text: {"transport": "tcp"}, "", empty=True),  # whatever its value
    "MC_GID_INDEX": _Variable(MOONCAKE, _byte("rdma_gid_index"), _NO_BYTE),
    "MC_IB_TC": _Variable(MOONCAKE, _byte("rdma_traffic_class"), _NO_BYTE),
}
# Further ones: their libraries have many.
_PREFIXES = {
    **dict.fromkeys(NIXL, ("VLLM_NIXL_", "NIXL_", "UCX_")),
    **dict.fromkeys(MOONCAKE, ("VLLM_MOONCAKE_", "MOONCAKE_", "MC_", "WITH_NVIDIA_PEERMEM")),
}
_OF_PORTS = (_port, _server)  # which prefill engines have


def like(key: str, more: Iterable[str]) -> str:
    """The key of another connector, or of some more, that somebody meant who wrote another one; nothing if none is like it."""
    for found in difflib.get_close_matches(key, [*more, *_WORDS], 1, 0.75):
        return f'"{found}" (of {_WORDS[found].of}\'s connector)' if found in _WORDS else f'"{found}"'
    return ""


def understood(name: str, extra: Mapping[str, Any], role: str) -> Understood:
    """kv_connector_extra_config as kvconn reads it, over the environment of the connector whose name it serves under.

    name: what kv_connector says. role: the agent's.
    """
    remarks = [] if name == OWN else [f"kvconn serves as {name}"]
    found = {key: value for key, value in extra.items() if key not in _WORDS}  # what is there already goes before what comes
    if "engine_id" in found:
        del found["engine_id"]  # the agent has vLLM's own, which routers are told
        remarks.append("kv_connector_extra_config: engine_id is not used: engine_id beside kv_connector counts")

    def take(what: str, word: _Word | _Variable, value: Any) -> None:
        if role == "decode" and word.ours in _OF_PORTS:  # whatever the value is
            remarks.append(f"{what} is not used: a decode engine has no such port")
            return
        try:
            settings = word.ours(value) if word.ours else {}
        except ValueError as error:
            raise ValueError(f"{what} is {value!r}: {error}") from None
        used = {ours: said for ours, said in settings.items() if ours not in found}
        found.update(used)
        if used:
            remarks.append(f"{what} is taken as {', '.join(f'{ours} = {said!r}' for ours, said in used.items())}")
        else:
            remarks.append(f"{what} is not used: {', '.join(settings) + ' is given' if settings else word.why}")

    for key, value in extra.items():
        if word := _WORDS.get(key):
            take(f"kv_connector_extra_config: {key} (of {word.of}'s connector)", word, value)
    if role != "decode" and "bootstrap_port" not in found and (text := os.environ.get(PORT)):
        try:
            found.update(_port(text))
        except ValueError as error:
            raise ValueError(f"{PORT} is {text!r}: {error}") from None
    for variable, word in _VARIABLES.items():
        text = os.environ.get(variable)
        if name in word.names and (text or (word.empty and text is not None)):
            take(variable, word, text)
    if more := sorted(each for each in os.environ if each.startswith(_PREFIXES.get(name, ())) and each not in _VARIABLES):
        remarks.append(f"{', '.join(more)}: not used, since kvconn has transports of its own")
    if name in NIXL and role != "decode":
        found.setdefault("bootstrap_port", _NIXL_PORT)
    return Understood(found, remarks)
