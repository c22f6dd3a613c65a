"""The keys and variables of NIXL's and Mooncake's connectors. Needs no vLLM; test_vllm_names holds the list against vLLM's own code."""

from __future__ import annotations

from typing import Any

import pytest

import kvconn
from kvconn.vllm.others import understood

OWN = "KVConnConnector"
VARIABLES = (
    *("KVCONN_BOOTSTRAP_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "VLLM_MOONCAKE_CONNECTOR_TIMEOUT"),
    *("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"),
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


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
    found = understood(OWN, {"bootstrap_server_address": "10.0.0.1:8998"}, "decode")
    assert found.settings == {} and "is not used: a decode engine has no such port" in found.remarks[0]


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
    for part in ("KVConnConnector in the place of NixlConnector", key, repr(value), says):
        assert part in str(raised.value)


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
    assert settings("MooncakeConnector") == {"bootstrap_port": 9001, "lease_s": 99}
    assert settings("MooncakeConnector", "decode", lease_s=3) == {"lease_s": 3}
    assert settings(OWN) == {"bootstrap_port": 9001}
    monkeypatch.setenv("KVCONN_BOOTSTRAP_PORT", "9002")
    assert settings("NixlConnector")["bootstrap_port"] == settings("MooncakeConnector")["bootstrap_port"] == 9002
    assert settings("NixlConnector", bootstrap_port=9003)["bootstrap_port"] == 9003


def test_wrong_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "0.0.0.0")
    found = understood("NixlConnector", {}, "prefill")
    assert "advertise_host" not in found.settings
    assert found.remarks[0] == "kvconn serves as NixlConnector" and "VLLM_NIXL_SIDE_CHANNEL_HOST is '0.0.0.0'" in found.remarks[1]
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "70000")
    with pytest.raises(ValueError, match="VLLM_NIXL_SIDE_CHANNEL_PORT is '70000'"):
        understood("NixlConnector", {}, "prefill")
    monkeypatch.setenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="MooncakeConnector: VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT is 'soon'"):
        understood("MooncakeConnector", {}, "prefill")
