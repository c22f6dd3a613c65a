"""What two engines of SGLang compare when they meet, as their schedulers read it; in the environment of `make e2e-sglang`."""

from __future__ import annotations

import importlib.util
import re
from array import array
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed here: these run in the environment of `make e2e-sglang`", allow_module_level=True)

import like as sglang
import torch
from like import like
from safetensors.torch import save_file
from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache import memory_pool
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_engine import DIM, HEADS, PAGE, engine, mha, send, settings, start
from test_sglang_start import port, refused  # noqa: F401  # a fixture

from kvconn.checkpoint import model_fingerprint
from kvconn.sglang import served

FAILED, SUCCESS = 0, 4
HERE = str(Path(__file__).resolve().parent)


def model(where: Path, weight: float) -> dict[str, Any]:
    where.mkdir(parents=True)
    (where / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    save_file({"weight": torch.full((8, 8), weight)}, where / "model.safetensors")
    return {"model_path": str(where), "load_format": "auto"}


def adapter(where: Path, weight: float) -> str:
    where.mkdir(parents=True)
    (where / "adapter_config.json").write_text("{}")
    save_file({"lora": torch.full((8, 8), weight)}, where / "adapter_model.safetensors")
    return str(where)


def test_same_name_other_weights(port: int, tmp_path: Path) -> None:  # noqa: F811
    one, other = model(tmp_path / "a" / "tiny", 1), model(tmp_path / "b" / "tiny", 2)
    reason = refused(port, one, other)
    assert 'model "tiny" with fingerprint 1:' in reason and "their weights or configurations differ" in reason


def test_other_name_same_weights(port: int, tmp_path: Path) -> None:  # noqa: F811
    one, other = model(tmp_path / "a" / "tiny", 1), model(tmp_path / "b" / "copy", 1)
    with engine(port) as ranks:
        ranks.append(start("prefill", lambda: mha(0, 2), disaggregation_bootstrap_port=port, **one))
        ranks.append(start("decode", lambda: mha(0, 2), **other))
        assert send(ranks[:1], ranks[1:], port, ([1], [], 0), ([4], [], 1))[0] == [SUCCESS]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"load_format": "auto"}, "holds no weights"),
        ({"load_format": "auto", "model_path": "/no/such/model"}, "'/no/such/model' is no path on this host"),
        ({"load_format": "auto", "model_path": "s3://bucket/tiny"}, "'s3://bucket/tiny' is not in the file system"),
        ({"load_format": "remote_instance"}, "--load-format remote_instance does not say from which files the weights come"),
        ({"decrypted_config_file": "c.json"}, "with --decrypted-config-file c.json the model is not that of the folder"),
        ({"weight_cache_mode": "client"}, "with --weight-cache-mode client the model is not that of the folder"),
        ({"checkpoint_engine_wait_weights_before_ready": True}, "with --checkpoint-engine-wait-weights-before-ready True"),
    ],
)
def test_weights_that_cannot_be_compared(options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows by which weights a cache was computed: the start ends, unless the user says which model that is."""
    with settings("decode", **options) as server_args:
        with pytest.raises(ValueError, match=rf'{says}.*set "model" in KVCONN_SGLANG_CONFIG of both engines'):
            served.common_ground(server_args, mha(0, 2), None, {})
        assert "model_fingerprint" not in served.common_ground(server_args, mha(0, 2), None, {"model": "mine"})
    with pytest.raises(ValueError, match=says):
        start("decode", lambda: mha(0, 2), **options)
    monkeypatch.setenv("KVCONN_SGLANG_CONFIG", '{"model": "mine"}')
    start("decode", lambda: mha(0, 2), **options).manager.teardown()


def test_draft_that_cannot_be_compared(tmp_path: Path) -> None:
    draft = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(tmp_path / "none")}
    with settings("decode", **draft) as server_args:
        with pytest.raises(ValueError, match=r'none.* is no path on this host.*set "model"'):
            served.common_ground(server_args, mha(0, 2), mha(0, 1), {})
        said = served.common_ground(server_args, mha(0, 2), mha(0, 1), {"model": "mine"})["must_match"]["speculative"]
        assert said == "EAGLE, none, MHATokenToKVPool nhd float32"


def test_options_are_the_installed_sglang_s() -> None:
    """Of a name that SGLang has not got nothing would be compared. A new format must be looked at: does it load the model's folder?"""
    elsewhere = {"presharded", "expert_pack", "remote", "remote_instance", "private"}
    assert set(LOAD_FORMAT_CHOICES) == {*served.FROM_FILES, "dummy", *elsewhere}
    with settings("decode"):
        for name in (*served.READ, *served.QUANTISATION, *served.ELSEWHERE):
            get_context().config_leaf(name)


def test_engines_that_have_not_enough_in_common(port: int, tmp_path: Path) -> None:  # noqa: F811
    scales = tmp_path / "scales.json"
    scales.write_text('{"kv_cache": {"scaling_factor": {"0": {"0": 1.5}}}}')
    draft = model_fingerprint(HERE, dummy=True)
    for theirs, says in (
        ({"attention_backend": "intel_amx"}, 'attention_backend "intel_amx" at the prefill engine, "torch_native" at the decode engine'),
        ({"quantization": "w8a8_int8"}, 'quantization "w8a8_int8" at the prefill engine, "none" at the decode engine'),
        ({"modelopt_quant": "fp8"}, 'quantization "fp8" at the prefill engine, "none" at the decode engine'),
        ({"mm_process_config": {"image": {"max_pixels": 1}}}, 'mm_process_config "{'),
        ({"quantization_param_path": str(scales)}, 'kv_cache_scales "'),
        (
            {"draft": lambda: mha(0, 1), "speculative_algorithm": "EAGLE"},
            f'speculative "EAGLE, {draft}, MHATokenToKVPool nhd float32" at the prefill engine, "none" at the decode engine',
        ),
    ):
        assert says in refused(port, theirs, {}), theirs


def test_scales_are_compared_by_their_values(tmp_path: Path) -> None:
    def said(name: str, text: str) -> Any:
        file = tmp_path / name
        file.write_text(text)
        with settings("decode", quantization_param_path=str(file)) as server_args:
            return served.common_ground(server_args, mha(0, 2), None, {})["must_match"]["kv_cache_scales"]

    assert said("a", '{"0": 1.5, "1": 2}') == said("b", '{ "1": 2, "0": 1.5 }') != said("c", '{"0": 1.5, "1": 3}')
    with pytest.raises(ValueError, match=r"--quantization-param-path is .*d: "):
        said("d", "{")


@pytest.mark.parametrize(("theirs", "ours"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_caches_of_another_type_of_numbers(port: int, theirs: Any, ours: Any) -> None:  # noqa: F811
    """SGLang tells the type of the model's cache alone: layers with a window, and a draft model, may have another one."""
    reason = refused(port, {"make": lambda: half(theirs)}, {"make": lambda: half(ours)})
    p, d = (f'"MHATokenToKVPool nhd {str(each).removeprefix("torch.")}"' for each in (theirs, ours))
    assert f"state_layout {p} at the prefill engine, {d} at the decode engine" in reason, reason


def half(dtype: Any) -> Any:
    return memory_pool.MHATokenToKVPool(64, PAGE, dtype, HEADS, DIM, 2, "cpu", False, start_layer=0, end_layer=2)


def test_adapters_of_requests(tmp_path: Path) -> None:
    """SGLang loads adapters while it runs: of two that have one name the weights are compared, whatever their folders are called."""
    paths = {"one": adapter(tmp_path / "one", 1), "copy": adapter(tmp_path / "copy", 1), "two": adapter(tmp_path / "two", 2)}
    paths |= {"none": str(tmp_path / "none"), "tensors": "__tensor__"}
    refs = {name: LoRARef(lora_name="mixed", lora_path=path) for name, path in paths.items()}

    def room(manager: Any, number: int, name: str) -> Any:
        number_of = refs[name].lora_id if name in refs else name or None
        manager.coming = Req("r", "", array("q", [7, 8]), SamplingParams(), lora_id=number_of, bootstrap_room=number)
        return manager.open_room(number)

    manager = start("decode", lambda: mha(0, 2)).manager
    try:
        lora = like(sglang.SGLANG_LORA_MANAGER, lora_refs={ref.lora_id: ref for ref in refs.values()})
        vars(manager.adapters._scheduler.tp_worker.model_runner)["lora_manager"] = lora
        plain, one, copy, two = (room(manager, n, name).prompt for n, name in enumerate(("", "one", "copy", "two")))
        assert one == copy and len({plain, one, two}) == 3 and all((plain, one, two))
        for n, (name, says) in enumerate(
            (
                ("none", "the adapter 'mixed' cannot be compared: model '.*none' is no path"),
                ("tensors", "the adapter 'mixed' cannot be compared: model '__tensor__' is no path"),
                ("f" * 32, f"SGLang does not tell where the request's adapter {'f' * 32} comes from"),
            )
        ):
            failed = room(manager, 10 + n, name)
            assert failed.state == FAILED and re.search(says, failed.reason), failed.reason
        # A user who names the model vouches for adapters of one name, such as those that were sent over HTTP.
        manager.adapters = served.Adapters(manager.adapters._scheduler, named=served.vouched({"model": "mine"}))
        assert room(manager, 20, "tensors").prompt == room(manager, 21, "two").prompt not in (plain, 0)
    finally:
        manager.teardown()
