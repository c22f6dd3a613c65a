"""The keys and variables of NIXL's and Mooncake's connectors. Needs no vLLM; test_vllm_names holds the list against vLLM's own code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import kvconn
from kvconn.vllm.compat import _VARIABLES, _WORDS, understood

OWN = "KVConnConnector"
VARIABLES = (
    *("KVCONN_BOOTSTRAP_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "VLLM_MOONCAKE_CONNECTOR_TIMEOUT"),
    *("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"),
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name in VARIABLES or name.startswith(("VLLM_NIXL_", "NIXL_", "UCX_", "VLLM_MOONCAKE_", "MOONCAKE_", "MC_")):
            monkeypatch.delenv(name)


def test_our_pages_have_each_key() -> None:
    """And each variable, on the page of the connector that has it."""
    pages = {name: Path(__file__).parents[2] / "docs" / f"from-{name.lower()}.md" for name in ("NIXL", "Mooncake")}
    if not pages["NIXL"].is_file():
        pytest.skip("the pages are not here: these tests were copied without them")
    text = {name: page.read_text(encoding="utf-8") for name, page in pages.items()}
    for key, word in _WORDS.items():
        assert f"`{key}`" in text[word.of], key
    for variable in _VARIABLES:
        on = text["NIXL" if "NIXL" in variable else "Mooncake"]
        assert f"`{variable}`" in on or (variable == "VLLM_NIXL_SIDE_CHANNEL_PORT" and "`VLLM_NIXL_SIDE_CHANNEL_HOST`, `…_PORT`" in on), (
            variable
        )


@pytest.mark.parametrize(
    ("extra", "settings"),
    [
        ({"kv_lease_duration": 30}, {"lease_s": 30}),
        ({"kv_lease_duration": 30, "lease_s": 5}, {"lease_s": 5}),
        ({"kv_lease_duration": 86400}, {"lease_s": 3600}),
        ({"mooncake_protocol": "tcp"}, {"transport": "tcp"}),
        ({"mooncake_protocol": "rdma"}, {}),
        ({"device_name": "mlx5_0, mlx5_1"}, {"rdma_devices": ["mlx5_0", "mlx5_1"]}),
        ({"device_name": ""}, {}),
        ({"bootstrap_server_address": "10.0.0.1:8998"}, {"bootstrap_join": "http://10.0.0.1:8998"}),
        ({"bootstrap_server_address": "[fd00::1]:8998"}, {"bootstrap_join": "http://[fd00::1]:8998"}),
        ({"backends": ["UCX"], "num_threads": 8, "num_workers": 3, "preferred_segment": "x"}, {}),
        ({"enable_cross_layers_blocks": "True", "prefill_side_swa_replay": True}, {}),
        ({"peer_timeout_s": 7, "nobodys": 1}, {"peer_timeout_s": 7, "nobodys": 1}),
    ],
)
def test_keys(extra: dict[str, Any], settings: dict[str, Any]) -> None:
    found = understood(OWN, extra, "prefill")
    assert found.settings == settings
    theirs = [key for key in extra if key not in ("lease_s", "peer_timeout_s", "nobodys")]
    assert len(found.remarks) == len(theirs)
    for key, remark in zip(theirs, found.remarks):
        assert key in remark and ("is taken as" in remark or "is not used: " in remark), remark
    if "nobodys" not in extra and "bootstrap_join" not in settings:  # it would look for that address
        kvconn.Agent({"engine_id": "e", "role": "prefill", "bootstrap_port": 0, **settings}).close()  # it takes each, of its type


def test_decode_has_no_port() -> None:
    for address in ("10.0.0.1:8998", 8998):
        found = understood(OWN, {"bootstrap_server_address": address}, "decode")
        assert found.settings == {} and "is not used: a decode engine has no such port" in found.remarks[0]


@pytest.mark.parametrize(
    ("name", "variable", "value"),
    [
        ("MooncakeConnector", "VLLM_MOONCAKE_BOOTSTRAP_PORT", "tcp://10.0.0.9:8998"),  # of a Kubernetes Service
        (OWN, "VLLM_MOONCAKE_BOOTSTRAP_PORT", "tcp://10.0.0.9:8998"),
        ("NixlConnector", "VLLM_NIXL_SIDE_CHANNEL_PORT", "0"),
    ],
)
def test_decode_reads_no_port(name: str, variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    found = understood(name, {}, "decode")
    assert found.settings == {} and found.remarks[-1] == f"{variable} is not used: a decode engine has no such port"
    with pytest.raises(ValueError, match="a port from 1 to 65535 was expected"):
        understood(name, {}, "prefill")


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"kv_lease_duration": "30"}, "a number of seconds"),
        ({"kv_lease_duration": 0}, "a number of seconds"),
        ({"mooncake_protocol": "pigeon"}, '"tcp" or "rdma"'),
        ({"device_name": ["mlx5_0"]}, "names of RDMA devices"),
        ({"bootstrap_server_address": "10.0.0.1"}, "host:port"),
        ({"bootstrap_server_address": 8998}, "host:port"),
        ({"bootstrap_server_address": "fd00::1:8998"}, "in brackets"),
    ],
)
def test_wrong_values_are_named(extra: dict[str, Any], says: str) -> None:
    ((key, value),) = extra.items()
    with pytest.raises(ValueError) as raised:
        understood("NixlConnector", extra, "prefill")
    for part in (key, repr(value), says):
        assert part in str(raised.value)


def test_engine_id_that_no_router_is_told() -> None:
    """The agent has vLLM's own."""
    said = ["kv_connector_extra_config: engine_id is not used: engine_id beside kv_connector counts"]
    for role in ("prefill", "both", "decode"):
        assert understood(OWN, {"engine_id": "p1"}, role) == ({}, said)


def test_variables_follow_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings(name: str, role: str = "prefill", **extra: Any) -> dict[str, Any]:
        return understood(name, extra, role).settings

    assert settings(OWN) == settings("MooncakeConnector") == {}
    assert settings("NixlConnector") == {"bootstrap_port": 5600}  # where that one listens
    assert settings("NixlPullConnector", "both") == {"bootstrap_port": 5600} and settings("NixlConnector", "decode") == {}

    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5601")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.7")
    monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", "9001")
    monkeypatch.setenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "99")
    assert settings("NixlPullConnector") == {"bootstrap_port": 5601, "advertise_host": "10.0.0.7"}
    assert understood("NixlConnector", {}, "prefill").remarks == [
        "kvconn serves as NixlConnector",
        "VLLM_NIXL_SIDE_CHANNEL_PORT is taken as bootstrap_port = 5601",
        "VLLM_NIXL_SIDE_CHANNEL_HOST is taken as advertise_host = '10.0.0.7'",
    ]
    assert settings("NixlPullConnector", "decode") == {"advertise_host": "10.0.0.7"}
    with monkeypatch.context() as older:
        older.setenv("VLLM_NIXL_ABORT_REQUEST_TIMEOUT", "480")
        assert settings("NixlConnector")["lease_s"] == 480 and settings("NixlConnector", kv_lease_duration=20)["lease_s"] == 20
        assert settings("MooncakeConnector")["lease_s"] == 99 and "lease_s" not in settings(OWN)
    assert settings("MooncakeConnector") == {"bootstrap_port": 9001, "lease_s": 99}
    assert settings("MooncakeConnector", "decode", lease_s=3) == {"lease_s": 3}
    assert settings(OWN) == {"bootstrap_port": 9001}
    assert understood("NixlConnector", {}, "decode").remarks[1:] == [
        "VLLM_NIXL_SIDE_CHANNEL_PORT is not used: a decode engine has no such port",
        "VLLM_NIXL_SIDE_CHANNEL_HOST is taken as advertise_host = '10.0.0.7'",
    ]
    monkeypatch.setenv("KVCONN_BOOTSTRAP_PORT", "9002")
    said = "VLLM_NIXL_SIDE_CHANNEL_PORT is not used: bootstrap_port is given"
    assert said in understood("NixlConnector", {}, "prefill").remarks
    assert settings("NixlConnector")["bootstrap_port"] == settings("MooncakeConnector")["bootstrap_port"] == 9002
    assert settings("NixlConnector", bootstrap_port=9003)["bootstrap_port"] == 9003


def test_wrong_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "0.0.0.0")
    found = understood("NixlConnector", {}, "prefill")
    assert "advertise_host" not in found.settings
    assert found.remarks == [
        "kvconn serves as NixlConnector",
        "VLLM_NIXL_SIDE_CHANNEL_HOST is not used: its value is no address to tell peers, and kvconn finds one",
    ]
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "70000")
    with pytest.raises(ValueError, match="VLLM_NIXL_SIDE_CHANNEL_PORT is '70000'"):
        understood("NixlConnector", {}, "prefill")
    monkeypatch.setenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT is 'soon': a number of seconds"):
        understood("MooncakeConnector", {}, "prefill")


@pytest.mark.parametrize(
    ("value", "lease"), [(" 480 ", 480), ("+480", 480), ("86400", 3600), ("0", None), ("-1", None), ("soon", None), ("4.5", None)]
)
def test_time_of_older_vllms_ends_no_start(value: str, lease: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake's is of vLLMs of today, which start with any whole number, and with nothing else."""
    variable = "VLLM_NIXL_ABORT_REQUEST_TIMEOUT"
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", value)
    why = f"{variable} is not used: its value is no number of seconds above 0"
    found = understood("NixlConnector", {}, "decode")
    assert found.settings == ({} if lease is None else {"lease_s": lease})
    assert found.remarks[1:] == [f"{variable} is taken as lease_s = {lease}" if lease else why]
    given = understood("NixlConnector", {"lease_s": 20}, "decode")
    assert given.settings == {"lease_s": 20}
    assert given.remarks[1:] == [f"{variable} is not used: lease_s is given" if lease else why]
    if value not in ("soon", "4.5"):
        assert understood("MooncakeConnector", {}, "decode").settings == found.settings


def test_variables_of_mooncakes_library(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to = {"MC_FORCE_TCP": "0", "MC_TCP_BIND_ADDRESS": "10.0.0.8", "MC_GID_INDEX": "3", "MC_IB_TC": "104"}
    for variable, value in set_to.items():
        monkeypatch.setenv(variable, value)
    means = {"transport": "tcp", "rdma_gid_index": 3, "rdma_traffic_class": 104}
    found = understood("MooncakeConnector", {}, "prefill")
    assert found.settings == means
    assert [remark.partition(" ")[0] for remark in found.remarks[1:]] == ["MC_TCP_BIND_ADDRESS", "MC_FORCE_TCP", "MC_GID_INDEX", "MC_IB_TC"]
    assert found.remarks[1] == "MC_TCP_BIND_ADDRESS is not used: vLLM's connector for Mooncake does not use it: see advertise_host"
    kvconn.Agent({"engine_id": "e", "role": "prefill", "bootstrap_port": 0, **means}).close()
    assert understood("MooncakeConnector", {"transport": "auto"}, "prefill").settings == {**means, "transport": "auto"}
    assert understood("NixlConnector", {}, "decode").settings == understood(OWN, {}, "prefill").settings == {}
    monkeypatch.setenv("MC_FORCE_TCP", "")  # set to nothing, it counts
    assert understood("MooncakeConnector", {}, "prefill").settings == means
    monkeypatch.delenv("MC_FORCE_TCP")
    monkeypatch.setenv("MC_IB_TC", "")  # this one does not
    assert understood("MooncakeConnector", {}, "prefill").settings == {"rdma_gid_index": 3}


@pytest.mark.parametrize(
    ("value", "number"), [("+3", 3), (" 3", 3), ("0", 0), ("255", 255), ("256", None), ("300", None), ("-1", None), ("first", None)]
)
@pytest.mark.parametrize(("variable", "ours"), [("MC_GID_INDEX", "rdma_gid_index"), ("MC_IB_TC", "rdma_traffic_class")])
def test_number_that_is_none_is_not_used(variable: str, ours: str, value: str, number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    found = understood("MooncakeConnector", {}, "decode")
    assert found.settings == ({} if number is None else {ours: number})
    taken = f"taken as {ours} = {number}"
    said = "not used: its value is no number from 0 to 255, so none is forced" if number is None else taken
    assert found.remarks[1:] == [f"{variable} is {said}"]


def test_variables_that_mean_nothing_are_said_once_by_name_and_without_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {"NixlConnector": ["NIXL_LOG_LEVEL", "UCX_TLS"], "MooncakeConnector": ["MC_REDIS_PASSWORD", "VLLM_MOONCAKE_CONNECTOR_TIMEOUT"]}
    for name in (variable for variables in theirs.values() for variable in variables):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("MOONCAKE_PREFERRED_SEGMENT", "a:1")
    for name, variables in theirs.items():
        said = understood(name, {}, "decode")
        assert said.settings == {}
        told = "\n".join(said.remarks)
        assert all(told.count(variable) == 1 for variable in variables) and "secret" not in told
        assert "MOONCAKE_PREFERRED_SEGMENT is not used: kvconn has no store" in said.remarks or name == "NixlConnector"
    assert understood(OWN, {}, "decode").remarks == []
