"""kvconn under its own name and under those of other connectors, in the installed vLLM."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector import factory
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from vllm.utils import random_uuid

import kvconn.vllm
from kvconn.vllm import connector, names, others, params
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
    with pytest.raises(ValueError, match=f"KVCONN_SERVES names '{name}': kvconn serves in the place of NixlConnector, "):
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
    with pytest.raises(RuntimeError, match="KVCONN_SERVES: this vLLM has no register"):
        names.register()


def test_refusals_of_the_agent_have_both_names() -> None:
    with pytest.raises(kvconn.ConfigError, match=r'KVConnConnector in the place of MooncakeConnector: .*"bootstrap_prot"'):
        connector._open({"engine_id": "e", "role": "decode", "bootstrap_prot": 1}, "MooncakeConnector")
    with pytest.raises(kvconn.ConfigError, match=r'^(?!.*in the place of).*"bootstrap_prot"'):
        connector._open({"engine_id": "e", "role": "decode", "bootstrap_prot": 1}, "KVConnConnector")


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
    assert keys and keys <= others._WORDS.keys()
    assert {others._WORDS[key].of for key in keys} == {of}


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
