"""kvconn under its own name and under those of other connectors, in the installed vLLM."""

from __future__ import annotations

import inspect
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
import vllm.envs
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector import factory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, supports_hma
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.platforms import cpu
from vllm.utils import random_uuid
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm_engine import Engine

import kvconn.vllm
from kvconn.vllm import compat, connector, names, params
from kvconn.vllm.stats import KVConnStats

Factory = factory.KVConnectorFactory
V1 = Path(factory.__file__).parent / "v1"


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """vLLM's register, as vLLM fills it."""
    entries = {name: loader for name, loader in Factory._registry.items() if names._module_of(loader).startswith("vllm.")}
    monkeypatch.setattr(Factory, "_registry", entries)
    monkeypatch.delenv("KVCONN_SERVES", raising=False)
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "")
    yield entries


def module_of(name: str) -> str:
    return Factory.get_connector_class_by_name(name).__module__


def test_vllm_finds_it_by_its_name_alone() -> None:
    """As vLLM's processes do: by the entry point of the installed package. The connector itself is not imported by that."""
    code = """
import os, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
assert not {"kvconn.vllm.connector", "vllm.distributed.kv_transfer.kv_connector.factory"} & sys.modules.keys()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
assert KVConnectorFactory.get_connector_class_by_name("KVConnConnector").__module__ == "kvconn.vllm.connector"
assert KVConnectorFactory.get_connector_class_by_name("NixlConnector").__module__ == "kvconn.vllm.connector"
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
stats = MultiConnector.build_kv_connector_stats({"NixlConnector": {"failed": {"load peer_lost": 1}}})
assert stats["NixlConnector"].reduce()["loads failed"] == 1
assert os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"] == "OTHER,KVCONN_SERVES"
"""
    env = {**os.environ, "KVCONN_SERVES": "NixlConnector", "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": "OTHER", "VLLM_LOGGING_LEVEL": "ERROR"}
    env.pop("VLLM_PLUGINS", None)
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=300)


def test_others_stay_vllms(register: dict[str, Any]) -> None:
    before = dict(register)
    names.register()
    names.register()  # vLLM calls it in several processes, and twice in some
    assert module_of("KVConnConnector") == "kvconn.vllm.connector"
    assert {name: loader for name, loader in register.items() if name != "KVConnConnector"} == before


@pytest.mark.parametrize("name", names.OTHERS)
def test_in_the_place_of_another(name: str, register: dict[str, Any]) -> None:
    """By one key. MultiConnector finds statistics by the class's name."""
    found = Factory.get_connector_class(KVTransferConfig(kv_connector=name, kv_connector_module_path="kvconn.vllm", kv_role="kv_both"))
    assert found.__name__ == name and found.__module__ == "kvconn.vllm.connector" and supports_hma(found)
    assert Factory.get_connector_class_by_name(name) is found and type(found.build_kv_connector_stats()) is KVConnStats


def test_in_the_place_of_others_by_the_variable(register: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCONN_SERVES", " NixlConnector,MooncakeConnector, ")
    names.register()
    names.register()
    assert [module_of(name) for name in ("NixlConnector", "MooncakeConnector")] == ["kvconn.vllm.connector"] * 2
    assert names._module_of(register["NixlPullConnector"]).startswith("vllm.")


@pytest.mark.parametrize("name", ["Nixl", "KVConnConnector", "MultiConnector"])
def test_names_that_nobody_has_are_refused(name: str, register: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCONN_SERVES", name)
    with pytest.raises(ValueError, match=f"KVCONN_SERVES names '{name}': KVConnConnector serves in the place of NixlConnector, "):
        names.register()


def test_a_name_that_somebody_else_has_is_refused(register: dict[str, Any]) -> None:
    del register["NixlConnector"]
    Factory.register_connector("NixlConnector", "their.module", "Theirs")
    says = r"KVConnConnector in the place of NixlConnector: vLLM's register has NixlConnector from their\.module already"
    with pytest.raises(ValueError, match=says):
        kvconn.vllm.NixlConnector  # noqa: B018  # as vLLM asks for it
    assert names._module_of(register["NixlConnector"]) == "their.module"


def test_vllm_without_such_a_register(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts, unless it was to serve somebody by kvconn."""
    monkeypatch.delattr(Factory, "_registry")
    monkeypatch.delenv("KVCONN_SERVES", raising=False)
    names.register()
    monkeypatch.setenv("KVCONN_SERVES", "NixlConnector")
    with pytest.raises(RuntimeError, match=r"KVConnConnector in the place of NixlConnector \(KVCONN_SERVES\): this vLLM has no register"):
        names.register()


def configured(model: Path, name: str, extra: dict[str, Any], role: str = "kv_producer") -> VllmConfig:
    """As `vllm serve` makes it of --kv-transfer-config."""
    given = {} if name in (names.OWN, "MultiConnector") else {"kv_connector_module_path": "kvconn.vllm"}
    transfer = KVTransferConfig(kv_connector=name, kv_role=role, kv_connector_extra_config=extra, **given)
    return EngineArgs(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        kv_transfer_config=transfer,
    ).create_engine_config()


CONVOLUTIONS = "VLLM_SSM_CONV_STATE_LAYOUT"


@pytest.fixture(autouse=True)
def layout_of_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's configuration sets this variable, for its process."""
    monkeypatch.setenv(CONVOLUTIONS, "")
    monkeypatch.delenv(CONVOLUTIONS)


@pytest.mark.skipif("uses_nixl" not in inspect.getsource(cpu), reason="this vLLM, older than 0.31, has no rule for NIXL's names")
@pytest.mark.parametrize("name", [*names.OTHERS, names.OWN])
@pytest.mark.parametrize("multi", [False, True], ids=["alone", "in a MultiConnector"])
def test_layout_of_convolutions_is_granted_by_the_name(name: str, multi: bool, model: Path, register: dict[str, Any]) -> None:
    """vLLM's own function asks the configuration, before it makes the states. Under NIXL's names kvconn gets what NIXL's connector gets."""
    one = {"kv_connector": name, "kv_connector_module_path": "kvconn.vllm", "kv_role": "kv_both"}
    if name == names.OWN:
        del one["kv_connector_module_path"]
        names.register()
    if multi:
        configured(model, "MultiConnector", {"connectors": [one]}, "kv_both")
    else:
        configured(model, name, {}, "kv_both")
    by_itself = "SD" if torch.cpu._is_avx512_bf16_supported() else None
    assert os.environ.get(CONVOLUTIONS) == ("DS" if name in names.NIXL else by_itself)
    if name in names.NIXL:
        assert get_conv_state_layout.__wrapped__() == "DS"  # what its cache holds is of another test


def caches(config: VllmConfig) -> KVCacheConfig:
    return Engine._caches(config, 8, (0,))


@pytest.mark.parametrize("name", ["KVConnConnector", "MooncakeConnector"])
@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"kv_lease_duration": "long"}, "kv_lease_duration (of NIXL's connector) is 'long': a number of seconds"),
        ({"mooncake_protocol": "pigeon"}, "mooncake_protocol (of Mooncake's connector) is 'pigeon'"),
        ({"kv_recompute_threshold": -1}, "kv_recompute_threshold is -1"),
        ({"idle_wait_ms": "2"}, "idle_wait_ms is '2'"),
        ({"send_early": "never"}, "send_early is 'never'"),
        ({"bootstrap_prot": 1}, '"bootstrap_prot"'),
        ({"lease_s": "soon"}, '"lease_s"'),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_refusal_has_both_names(
    name: str, extra: dict[str, Any], says: str, model: Path, register: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong value of each kind, a refused key and an unknown one. What only the agent knows of ends the worker's start."""
    monkeypatch.setattr(connector, "rank_of", lambda *_: params.Rank())
    names.register()
    config = configured(model, name, extra)
    made = Factory.get_connector_class(config.kv_transfer_config)
    with pytest.raises(ValueError) as raised:
        for role in KVConnectorRole:
            made(config, role, caches(config))
    said = str(raised.value)
    both = names.OWN if name == names.OWN else f"KVConnConnector in the place of {name}"
    assert said.startswith(f"{both}: ") and says in said and said.count(names.OWN) == 1, said


@pytest.mark.parametrize("name", ["KVConnConnector", "NixlConnector"])
def test_refusals_that_are_not_of_a_key_have_both_names(
    name: str, model: Path, register: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option of vLLM's, a variable, a port that is taken: the exception stays of its kind."""
    monkeypatch.setattr(connector, "rank_of", lambda *_: params.Rank())
    names.register()
    both = names.OWN if name == names.OWN else f"KVConnConnector in the place of {name}"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = configured(model, name, {"bootstrap_host": "127.0.0.1", "bootstrap_port": taken.getsockname()[1]})
        made = Factory.get_connector_class(config.kv_transfer_config)
        with pytest.raises(kvconn.AddressError, match=f"^{both}: ") as raised:
            made(config, KVConnectorRole.WORKER, caches(config))
        assert raised.value.code == kvconn.Status.ADDRESS
    monkeypatch.setattr(config.parallel_config, "enable_elastic_ep", True)
    with pytest.raises(ValueError, match=f"^{both}: --enable-elastic-ep is not supported"):
        made(config, KVConnectorRole.SCHEDULER, caches(config))
    monkeypatch.setattr(config.parallel_config, "enable_elastic_ep", False)
    config.kv_transfer_config.kv_connector_extra_config = {}
    monkeypatch.setenv("KVCONN_BOOTSTRAP_PORT", "x")
    with pytest.raises(ValueError, match=f"^{both}: KVCONN_BOOTSTRAP_PORT is 'x'"):
        made(config, KVConnectorRole.SCHEDULER, caches(config))


def test_decode_engine_with_an_id_in_the_extra_configuration_starts(
    model: Path, register: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "rank_of", lambda *_: params.Rank())
    config = configured(model, "NixlConnector", {"engine_id": "d1"}, "kv_consumer")
    made = Factory.get_connector_class(config.kv_transfer_config)
    made(config, KVConnectorRole.SCHEDULER, caches(config))
    worker = made(config, KVConnectorRole.WORKER, caches(config))
    try:
        assert worker._config["engine_id"] == config.kv_transfer_config.engine_id != "d1"
    finally:
        worker.shutdown()


@pytest.mark.parametrize(
    ("of", "where"), [("NIXL", "nixl/*.py"), ("Mooncake", "mooncake/mooncake_connector.py"), ("Mooncake", "mooncake/rdma_utils.py")]
)
def test_each_key_of_theirs_is_known(of: str, where: str) -> None:
    files = sorted(V1.glob(where))
    if not files:
        pytest.skip(f"this vLLM has no {where}")
    text = " ".join(file.read_text() for file in files)
    keys = set(re.findall(r"(?:get_from_extra_config|extra_config\.get)\(\s*\"(\w+)\"", text))
    keys -= set(params._OWN_KEYS)  # which kvconn calls the same
    assert keys and keys <= compat._WORDS.keys()
    assert {compat._WORDS[key].of for key in keys} == {of}


def test_each_variable_of_theirs_is_known() -> None:
    """Those of vLLM itself; their libraries have more, which begin with the same letters."""
    for name in names.OTHERS:
        theirs = {each for each in vllm.envs.environment_variables if each.startswith(compat._PREFIXES[name])}
        assert theirs and theirs <= {each for each, variable in compat._VARIABLES.items() if name in variable.names}


def test_ids_that_one_x_request_id_gives_are_vllms() -> None:
    """NixlPushConnector joins two requests by the same part of their ids."""
    utils = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils")
    if not hasattr(utils, "get_base_request_id"):
        pytest.skip("this vLLM has no NixlPushConnector")
    for text in ("cmpl-9f-0", "chatcmpl-9f", "1_cmpl-9f-0", "cmpl-12345678", "cmpl-12345678-0", "", "-12345678"):
        for request_id in (text, f"{text}-{random_uuid():.8}"):
            assert params.base_of(request_id) == utils.get_base_request_id(request_id), request_id


def test_names_are_vllms(register: dict[str, Any]) -> None:
    """An older vLLM may lack the two halves of NIXL's."""
    assert {"NixlConnector", "MooncakeConnector"} <= register.keys() & set(names.OTHERS)
