"""The keys of kv_connector_extra_config, and the environment variables, of deployments that were made for NIXL's or
Mooncake's connector.

kvconn uses what means something to it, and logs the name of everything else once. A key that none of the three connectors
knows goes to the agent, which refuses it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .names import MOONCAKE, NIXL, OWN, called

_ANY_HOST = ("", "0.0.0.0", "::")
_LEASE_MOST = 3600  # seconds: the agent's bound
_NIXL_PORT = 5600  # where vLLM's NIXL connector listens by default, and what firewalls of its deployments let through


class Understood(NamedTuple):
    """Settings of an agent, and what the log is to say about those that come from another connector's keys and variables."""

    settings: dict[str, Any]
    remarks: list[str]


class _Word(NamedTuple):
    of: str  # whose word it is
    ours: Callable[[Any], dict[str, Any]] | None  # the settings that it stands for
    why: str  # if there are none


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


_WORDS = {
    "kv_lease_duration": _Word("NIXL", _lease, ""),
    "backends": _Word("NIXL", None, "kvconn has transports of its own, see transport"),
    "num_threads": _Word("NIXL", None, "kvconn finds the number of its threads"),
    "enforce_handshake_compat": _Word("NIXL", None, "two engines always compare what they serve"),
    "bidirectional_kv_xfer": _Word("NIXL", None, "kvconn carries caches from prefill to decode only"),
    "decoder_kv_blocks_ttl": _Word("NIXL", None, "kvconn carries caches from prefill to decode only"),
    "engine_ttl": _Word("NIXL", None, "an engine is forgotten when it ends"),
    "push_registration_timeout": _Word("NIXL", None, "a load ends by peer_timeout_s"),
    "mooncake_protocol": _Word("Mooncake", _protocol, "the best transport that both engines have is taken"),
    "device_name": _Word("Mooncake", _devices, "all RDMA devices are taken"),
    "num_workers": _Word("Mooncake", None, "kvconn finds the number of its threads"),
    "bootstrap_server_address": _Word("Mooncake", _server, ""),
    "preferred_segment": _Word("Mooncake", None, "kvconn has no store"),
}


def understood(name: str, extra: Mapping[str, Any], role: str) -> Understood:
    """kv_connector_extra_config as kvconn reads it, over the environment of the connector whose name it serves under.

    name: what kv_connector says. role: the agent's.
    """
    theirs: dict[str, Any] = {}
    remarks = [] if name == OWN else [f"kvconn serves as {name}"]
    for key, value in extra.items():
        if (word := _WORDS.get(key)) is None:
            continue
        what = f"kv_connector_extra_config: {key} (of {word.of}'s connector)"
        try:
            settings = word.ours(value) if word.ours else {}
        except ValueError as error:
            raise ValueError(f"{called(name)}: {what} is {value!r}: {error}") from None
        if role == "decode":
            settings.pop("bootstrap_join", None)  # it is the prefill engine's port
        if used := {ours: said for ours, said in settings.items() if ours not in extra}:
            theirs.update(used)
            remarks.append(f"{what} is taken as {', '.join(f'{ours} = {said!r}' for ours, said in used.items())}")
        elif settings:
            remarks.append(f"{what} is not used: {', '.join(settings)} is given")
        else:
            remarks.append(f"{what} is not used: {word.why or 'a decode engine has no such port'}")
    theirs = {**_environment(name, role, remarks), **theirs}
    own = {key: value for key, value in extra.items() if key not in _WORDS}
    return Understood({**theirs, **own}, remarks)


def _environment(name: str, role: str, remarks: list[str]) -> dict[str, Any]:
    """The variables for ports, hosts and times. Those of another connector count under its name; Mooncake's port also under our own."""
    found: dict[str, Any] = {}

    def take(variable: str, key: str, value: Any) -> None:
        found[key] = value
        if not variable.startswith("KVCONN_"):
            remarks.append(f"{variable} is taken as {key} = {value!r}")

    nixl, mooncake = name in NIXL, name in MOONCAKE
    if role != "decode":
        if nixl:
            found["bootstrap_port"] = _NIXL_PORT
        for variable in ("VLLM_NIXL_SIDE_CHANNEL_PORT" if nixl else "VLLM_MOONCAKE_BOOTSTRAP_PORT", "KVCONN_BOOTSTRAP_PORT"):
            if port := _port(variable):
                take(variable, "bootstrap_port", port)
    if nixl and (host := os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST")) is not None:
        if host in _ANY_HOST:
            remarks.append(f"VLLM_NIXL_SIDE_CHANNEL_HOST is {host!r}, which is no address to tell peers: kvconn finds one")
        else:
            take("VLLM_NIXL_SIDE_CHANNEL_HOST", "advertise_host", host)
    if mooncake and (wait := os.environ.get("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT")):
        if not wait.isdigit() or not int(wait):
            raise ValueError(f"{called(name)}: VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT is {wait!r}: a number of seconds was expected")
        take("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "lease_s", min(int(wait), _LEASE_MOST))
    if mooncake and os.environ.get("VLLM_MOONCAKE_CONNECTOR_TIMEOUT"):
        remarks.append("VLLM_MOONCAKE_CONNECTOR_TIMEOUT is not used: see connect_timeout_s and peer_timeout_s")
    return found


def _port(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    if not text:
        return None
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise ValueError(f"{variable} is {text!r}: a port from 1 to 65535 was expected")
    return int(text)
