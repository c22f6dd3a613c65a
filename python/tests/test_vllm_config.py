"""The agent's configuration, from what vLLM knows and what the user says. Needs no vLLM."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import like as vllm
import pytest
from like import like

import kvconn
from kvconn.checkpoint import model_fingerprint
from kvconn.vllm import params
from kvconn.vllm.shards import Shard

BLOCK = 16
CACHES = like(vllm.CACHES, kv_cache_groups=[like(vllm.GROUP, kv_cache_spec=like(vllm.FULL, block_size=BLOCK))])
ONE = params.Rank()
MODEL = f"{Path(__file__).resolve().parent}/"  # a folder that is there; dummy weights need no more


def vllm_config(extra: dict[str, Any], role: str = "kv_producer", **parallel: Any) -> Any:
    return like(
        vllm.VLLM_CONFIG,
        kv_transfer_config=like(vllm.TRANSFER_CONFIG, engine_id="e", kv_role=role, kv_connector_extra_config=extra),
        model_config=like(vllm.MODEL_CONFIG, model=MODEL, dtype="torch.bfloat16", seed=0),
        cache_config=like(vllm.CACHE_CONFIG, cache_dtype="auto", block_size=BLOCK),
        parallel_config=like(vllm.PARALLEL_CONFIG, **parallel),
        load_config=like(vllm.LOAD_CONFIG, load_format="dummy", download_dir=None),
    )


def parallel_config(**sizes: Any) -> Any:
    return like(vllm.PARALLEL_CONFIG, **sizes)


def test_context_parallel_engines_are_refused_by_name() -> None:
    params.check_parallel(parallel_config(tensor_parallel_size=2, data_parallel_size=4, decode_context_parallel_size=2))
    with pytest.raises(ValueError, match="PCP = 4 is not supported"):
        params.check_parallel(parallel_config(tensor_parallel_size=2, prefill_context_parallel_size=4))


def test_agent_config(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVCONN_BOOTSTRAP_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT"):
        monkeypatch.delenv(name, raising=False)
    made = params.agent_config(vllm_config({"lease_s": 5, "idle_wait_ms": 1}), CACHES, ONE)
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "dp_rank": 0, "dp_size": 1}
    assert made == {
        "engine_id": "e",
        "role": "prefill",
        "model": "tests",
        "model_fingerprint": model_fingerprint(MODEL, dummy=True, facts={"seed": 0}),
        "dtype": "bfloat16",
        "block_tokens": BLOCK,
        "lease_s": 5,
        **ranks,
    }

    for cache_dtype, told in {"auto": "bfloat16", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}.items():
        config = vllm_config({})
        config.cache_config.cache_dtype = cache_dtype
        assert params.agent_config(config, CACHES, ONE)["dtype"] == told  # engines with another one refuse each other

    def port(config: Any) -> Any:
        return params.agent_config(config, CACHES, ONE).get("bootstrap_port")

    assert "lease_s" not in params.agent_config(vllm_config({}), CACHES, ONE)
    monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", "9001")
    assert port(vllm_config({})) == 9001
    monkeypatch.setenv("KVCONN_BOOTSTRAP_PORT", "9002")
    assert port(vllm_config({})) == 9002
    assert port(vllm_config({"bootstrap_port": 1})) == 1
    assert port(vllm_config({}, "kv_consumer")) is None
    monkeypatch.setenv("KVCONN_BOOTSTRAP_PORT", "x")
    with pytest.raises(ValueError, match="KVCONN_BOOTSTRAP_PORT is 'x'"):
        port(vllm_config({}))


TP1 = params.Rank(tp_rank=1, tp_size=2)
PP1 = params.Rank(pp_rank=1, pp_size=2)
DP1 = params.Rank(dp_rank=1, dp_size=2)


@pytest.mark.parametrize(
    ("rank", "extra", "parallel", "joins"),
    [
        (params.Rank(tp_size=2), {}, {}, None),
        (TP1, {}, {}, "http://127.0.0.1:8998"),
        (PP1, {"bootstrap_port": 9000}, {"nnodes_within_dp": 2, "master_addr": "10.0.0.7"}, "http://10.0.0.7:9000"),
        (DP1, {"bootstrap_host": "10.0.0.1"}, {}, "http://10.0.0.1:8998"),
        (DP1, {"bootstrap_host": "::"}, {"data_parallel_master_ip": "fd00::1"}, "http://[fd00::1]:8998"),
        (DP1, {"tls_cert_file": "c"}, {"data_parallel_master_ip": "10.0.0.9"}, "https://10.0.0.9:8998"),
        # A front end on each host: its first engine has a port of its own, the next one joins that.
        (DP1, {}, {"local_engines_only": True, "data_parallel_rank_local": 0}, None),
        (DP1, {}, {"local_engines_only": True, "data_parallel_rank_local": 1}, "http://127.0.0.1:8998"),
        (TP1, {"bootstrap_join": "http://p:1"}, {}, "http://p:1"),
        (TP1, {"nats_url": "nats://n:4222"}, {}, None),
    ],
)
def test_ranks_join_the_first_one(rank: Any, extra: dict[str, Any], parallel: dict[str, Any], joins: str | None) -> None:
    assert params.agent_config(vllm_config(extra, **parallel), CACHES, rank).get("bootstrap_join") == joins
    decode = {key: value for key, value in extra.items() if key != "bootstrap_join"}
    assert "bootstrap_join" not in params.agent_config(vllm_config(decode, "kv_consumer", **parallel), CACHES, rank)


def test_a_rank_s_share_of_the_tokens() -> None:
    """Agents know the rank by another number than vLLM, and engines that deal tokens out otherwise refuse each other."""
    rank, share = params.Rank(tp_rank=1, tp_size=4), Shard(1, 2, 16, (16,))
    made = params.agent_config(vllm_config({"must_match": {"a": "b"}}), CACHES, rank, shard=share)
    assert (made["tp_rank"], made["tp_size"]) == (2, 4)
    assert made["must_match"] == {"a": "b", "decode_context_parallel": "2 ranks, 16 tokens in turn"}


def test_servers_of_one_host_under_nixls_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each data parallel rank is a server: NIXL's connector listens at its port and the rank's number."""

    def port(name: str, extra: dict[str, Any] | None = None) -> Any:
        apart = {"data_parallel_external_lb": True, "data_parallel_index": 3, "local_engines_only": True, "data_parallel_rank_local": 0}
        return params.agent_config(vllm_config(extra or {}, **apart), CACHES, params.Rank(dp_rank=3, dp_size=4), name).get("bootstrap_port")

    for variable in ("KVCONN_BOOTSTRAP_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT", "VLLM_NIXL_SIDE_CHANNEL_PORT"):
        monkeypatch.delenv(variable, raising=False)
    assert (port("NixlConnector"), port("NixlConnector", {"bootstrap_port": 9000}), port("KVConnConnector")) == (5603, 9000, None)
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "6000")
    assert port("NixlConnector") == 6003
    monkeypatch.setenv("KVCONN_BOOTSTRAP_PORT", "7000")
    assert port("NixlConnector") == 7000


def test_independent_ranks_of_a_dense_model() -> None:
    assert params.dp_of(parallel_config(), "e") == (0, 1)
    assert params.dp_of(parallel_config(data_parallel_size=4, data_parallel_index=2), "e_dp2") == (2, 4)
    assert params.dp_of(parallel_config(data_parallel_size=1, data_parallel_index=0), "e_dp0") == (0, 65536)
    assert params.dp_of(parallel_config(data_parallel_size=1, data_parallel_index=3), "e_dp3") == (3, 65536)
    assert params.dp_of(parallel_config(data_parallel_size=1, data_parallel_index=3), "e") == (3, 4)


def test_ranks_must_know_the_port() -> None:
    with pytest.raises(ValueError, match="bootstrap_port is 0"):
        params.agent_config(vllm_config({"bootstrap_port": 0}), CACHES, TP1)


def test_address_for_others() -> None:
    assert params.advertised("http://127.0.0.1:8998", {"advertise_host": "p"}) == "http://p:8998"
    assert params.advertised("https://127.0.0.1:8998", {"advertise_host": "fd00::1"}) == "https://[fd00::1]:8998"
    assert params.advertised("http://127.0.0.1:8998", {}) == "http://127.0.0.1:8998"
    assert params.advertised(None, {"advertise_host": "p"}) is None
    # A rank on another host than the first: its own address leads to no port.
    far = {"advertise_host": "10.0.0.2", "bootstrap_join": "http://10.0.0.1:5600"}
    assert params.advertised("http://10.0.0.1:5600", far) == "http://10.0.0.1:5600"
    near = {"advertise_host": "p", "bootstrap_join": "http://10.0.0.1:8998", "bootstrap_host": "10.0.0.1"}
    assert params.advertised("http://10.0.0.1:8998", near) == "http://p:8998"
    assert params.advertised("http://127.0.0.1:8998", {**far, "bootstrap_join": "http://127.0.0.1:8998"}) == "http://10.0.0.2:8998"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("bootstrap_prot", '"bootstrap_port"'),  # the agent's own
        ("send_erly", '"send_early"'),  # the connector's
        ("kv_lease_duratoin", '"kv_lease_duration" (of NIXL\'s connector)'),
        ("mooncake_protocoll", '"mooncake_protocol" (of Mooncake\'s connector)'),
        ("pigeons", ""),
    ],
)
def test_unknown_key_is_named_with_the_nearest_known_one(key: str, meant: str) -> None:
    config = params.agent_config(vllm_config({key: 8998}), CACHES, ONE)
    with pytest.raises(kvconn.ConfigError) as raised:
        params.open_agent(config)
    says = f'unknown config key "{key}"' + (f", the nearest is {meant}" if meant else "") + "; known keys are advertise_host, "
    assert says in raised.value.reason and raised.value.code == kvconn.Status.INVALID


@pytest.mark.parametrize("value", [-1, True, "64", 1.5, None, 1 << 31])
def test_threshold_of_a_wrong_kind(value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"kv_recompute_threshold is {value!r}: a number of tokens was expected")):
        params.recompute_below({"kv_recompute_threshold": value})


def test_threshold() -> None:
    assert params.recompute_below({}) == 0 and params.recompute_below({"kv_recompute_threshold": 64}) == 64


@pytest.mark.parametrize("value", ["2", True, -1, 1000])
def test_idle_wait_of_a_wrong_kind(value: Any) -> None:
    with pytest.raises(ValueError, match="idle_wait_ms"):
        params.idle_wait_s({"idle_wait_ms": value}, parallel_config())


@pytest.mark.parametrize(
    ("parallel", "waits"),
    [
        ({"data_parallel_size": 1, "is_moe_model": True}, True),
        ({"data_parallel_size": 2, "is_moe_model": False}, True),
        ({"data_parallel_size": 2, "is_moe_model": True}, False),
        ({"data_parallel_size": 2, "is_moe_model": None}, False),  # not known
    ],
)
def test_ranks_that_compute_together_do_not_wait(parallel: dict[str, Any], waits: bool) -> None:
    """If such a rank waited, the other ranks would stand still as long, in the batch that they all take part in."""
    assert bool(params.idle_wait_s({"idle_wait_ms": 5}, parallel_config(**parallel))) is waits


def test_importing_kvconn_vllm_imports_no_vllm() -> None:
    code = "import sys, kvconn.vllm; assert 'vllm' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_port_of_the_first_rank_is_the_agents_default() -> None:
    """The other ranks are told the port before any agent is open."""
    with pytest.raises(kvconn.ConfigError, match=rf"like http://host:{params._DEFAULT_PORT}\b"):
        kvconn.Agent({"engine_id": "e", "role": "prefill", "tp_rank": 1, "tp_size": 2})
