"""What an engine serves, as its worker reads it from vLLM's own configuration: the fingerprint, and options refused at start."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

import like as vllm
import numpy as np
from like import like
from test_checkpoint import tensors, write
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from kvconn.vllm import served
from kvconn.vllm.connector import KVConnConnector
from kvconn.vllm.served import check_engine, model_keys, must_match


def checkpoint(where: Path, config: Path, seed: int = 0) -> Path:
    where.mkdir(parents=True)
    (where / "config.json").write_text((config / "config.json").read_text())
    write(where / "model.safetensors", tensors(seed))
    return where


def made(model: Path, **args: Any) -> Any:
    """vLLM's own configuration."""
    fixed = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 1024}
    return EngineArgs(model=str(model), **{**fixed, **args}).create_engine_config()


def fingerprint(model: Path, extra: dict[str, Any] | None = None, **args: Any) -> str | None:
    return model_keys(made(model, **args), extra or {}).get("model_fingerprint")


def test_same_name_other_weights(model: Path, tmp_path: Path) -> None:
    """The two ways in which a name misleads."""
    one, copy, other = (
        checkpoint(tmp_path / "a/tiny", model),
        checkpoint(tmp_path / "copy", model),
        checkpoint(tmp_path / "b/tiny", model, 1),
    )
    assert fingerprint(one) == fingerprint(copy) != fingerprint(other)
    assert model_keys(made(one), {})["model"] == model_keys(made(other), {})["model"] == "tiny"


def test_how_it_is_loaded(model: Path, tmp_path: Path) -> None:
    """An option that changes what is computed changes the fingerprint. An option that changes only the speed does not."""
    one = checkpoint(tmp_path / "tiny", model)
    plain = fingerprint(one)
    same = [{"dtype": "float32"}, {"load_format": "safetensors"}, {"seed": 3}, {"max_model_len": 512}, {"block_size": 32}]
    assert {fingerprint(one, **args) for args in same} == {plain}
    others = [{"hf_overrides": {"rope_theta": 1.0}}, {"load_format": "dummy"}, {"load_format": "dummy", "seed": 3}]
    assert len({plain, *(fingerprint(one, **args) for args in others)}) == 4


def test_overrides_by_a_function_are_named(model: Path, tmp_path: Path) -> None:
    """Such as the function that vLLM sets for speculative models."""
    from vllm.config.speculative import SpeculativeConfig

    one = made(checkpoint(tmp_path / "tiny", model))
    override = SpeculativeConfig.hf_config_override
    assert (
        served._name(override)
        == served._name(functools.partial(override))
        == "vllm.config.speculative.SpeculativeConfig.hf_config_override"
    )
    plain = model_keys(one, {})
    one.model_config.hf_overrides = override
    assert model_keys(one, {}) != plain


def test_users_name_stands_in_the_place_of_the_weights(model: Path) -> None:
    """The folder has no weights: with a name by the user nothing is read."""
    assert fingerprint(model, {"model": "mine"}) is None
    assert fingerprint(model, {"model_fingerprint": "v7"}) is None
    with pytest.raises(ValueError, match=r'holds no weights.*set "model" in kv_connector_extra_config of both engines'):
        fingerprint(model)


def test_weights_that_do_not_come_from_the_folder(model: Path, tmp_path: Path) -> None:
    one = made(checkpoint(tmp_path / "tiny", model))
    one.load_config.load_format = "tensorizer"
    with pytest.raises(ValueError, match="--load-format tensorizer does not say from which files"):
        model_keys(one, {})
    one.load_config.load_format = "runai_streamer"
    on_disk = model_keys(one, {})
    one.model_config.model_weights = "s3://bucket/tiny"
    in_store = model_keys(one, {})
    one.model_config.model_weights = "s3://bucket/other"
    assert len({str(each) for each in (on_disk, in_store, model_keys(one, {}))}) == 3


def test_formats_are_those_of_the_installed_vllm() -> None:
    """A new format must be looked at: whether it loads the files of the model's folder."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

    refused = {"tensorizer", "modelexpress", "ipc_cache"}
    assert set(_LOAD_FORMAT_TO_MODEL_LOADER) <= {*served._FROM_FILES, "dummy", *refused}


def test_long_rope_depends_on_the_longest_prompt(model: Path, tmp_path: Path) -> None:
    """Of such a model --max-model-len says by which factors all positions are turned."""
    one = checkpoint(tmp_path / "long", model)
    config = json.loads((one / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config["original_max_position_embeddings"] = 512
    (one / "config.json").write_text(json.dumps(config))
    said = made(one)
    assert served._long_rope(said.model_config) is True
    long = model_keys(said, {})
    said.model_config.max_model_len = 512
    assert served._long_rope(said.model_config) is False and model_keys(said, {}) != long
    assert served._long_rope(made(checkpoint(tmp_path / "short", model)).model_config) is None


def speculative(method: str | None, draft: Path | None, model: Path) -> Any:
    config = made(model)
    if method:
        drafting = like(vllm.MODEL_CONFIG, model=str(draft or model), seed=0)
        config.speculative_config = like(
            vllm.SPECULATIVE_CONFIG, method=method, draft_model_config=drafting, parallel_drafting=False, draft_load_config=None
        )
    return config


def test_speculative_models_are_compared(model: Path, tmp_path: Path) -> None:
    """Speculative models that have caches are compared. If two drafts have one name and different models, they differ."""
    one = checkpoint(tmp_path / "tiny", model)
    draft, copy, other = (
        checkpoint(tmp_path / "a/d", model, 2),
        checkpoint(tmp_path / "b/d", model, 2),
        checkpoint(tmp_path / "c/d", model, 3),
    )
    assert must_match(speculative(None, None, one)) == must_match(speculative("ngram", None, one)) == {}
    eagle = must_match(speculative("eagle3", draft, one))
    assert eagle["speculative"].startswith("eagle3 by d 1:")
    assert eagle == must_match(speculative("eagle3", copy, one))
    assert eagle != must_match(speculative("eagle3", other, one)) and eagle != must_match(speculative("eagle", draft, one))
    assert must_match(speculative("mtp", None, one)) == {"speculative": "mtp"}


def test_methods_without_a_cache_are_vllms() -> None:
    """Releases may have dropped some of the methods. A method that is not in the list is taken for one with a cache."""
    from typing import get_args

    from vllm.config.speculative import SpeculativeMethod

    def names(kind: Any) -> set[str]:
        return {kind} if isinstance(kind, str) else set().union(*(names(each) for each in get_args(kind)))

    assert {"ngram", "suffix"} <= names(SpeculativeMethod) & set(served._WITHOUT_CACHE)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("aux_output_config.enable_return_routed_experts", True, "--enable-return-routed-experts is not supported"),
        ("parallel_config.enable_elastic_ep", True, "--enable-elastic-ep is not supported"),
        ("cache_config.calculate_kv_scales", True, "--calculate-kv-scales is not supported"),
    ],
)
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_options_that_would_go_wrong_later(model: Path, place: str, value: Any, said: str, role: str) -> None:
    """On either side, before anything is opened."""
    transfer = KVTransferConfig(kv_connector="KVConnConnector", kv_connector_module_path="kvconn.vllm", kv_role=role)
    config = made(model, kv_transfer_config=transfer)
    check_engine(config)
    part, name = place.split(".")
    object.__setattr__(getattr(config, part), name, value)
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    for side in KVConnectorRole:
        with pytest.raises(ValueError, match=said):
            KVConnConnector(config, side, None)


def test_options_that_are_refused_are_the_installed_vllms() -> None:
    """All but the option for scales, which releases before 0.32 computed."""
    assert "enable_return_routed_experts" in vllm.fields_of(vllm.AUX_CONFIG)
    assert "enable_elastic_ep" in vllm.fields_of(vllm.PARALLEL_CONFIG)
    assert "num_prefill_lookahead_tokens" in vllm.fields_of(vllm.VLLM_CONFIG)


@pytest.mark.parametrize(("ahead", "refused"), [(0, False), (1, False), (3, True)])
def test_mtp_of_several_modules(ahead: int, refused: bool) -> None:
    config = like(
        vllm.VLLM_CONFIG,
        aux_output_config=like(vllm.AUX_CONFIG, enable_return_routed_experts=False),
        parallel_config=like(vllm.PARALLEL_CONFIG),
        cache_config=like(vllm.CACHE_CONFIG),
        num_prefill_lookahead_tokens=ahead,
    )
    if refused:
        with pytest.raises(ValueError, match=r"MTP of several modules \(they look 3 tokens ahead\) is not supported"):
            check_engine(config)
    else:
        check_engine(config)


def test_layout_that_is_asked_for(model: Path) -> None:
    """The layout is asked for in vLLM's own way; for a latent no layout is asked for."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout

    transfer = KVTransferConfig(kv_connector="KVConnConnector", kv_connector_module_path="kvconn.vllm", kv_role="kv_both")
    assert get_kv_connector_cache_layout(made(model, kv_transfer_config=transfer)) == "LBHNC"
    assert KVConnConnector.get_required_kvcache_layout(like(vllm.VLLM_CONFIG, model_config=like(vllm.MODEL_CONFIG, use_mla=True))) is None


def test_adapters_of_modalities(model: Path, tmp_path: Path) -> None:
    """Such adapters are set for the whole engine."""
    one = checkpoint(tmp_path / "tiny", model)

    def adapter(name: str, seed: int) -> str:
        folder = tmp_path / name
        folder.mkdir()
        write(folder / "adapter_model.safetensors", tensors(seed, layers=1))
        (folder / "adapter_config.json").write_text("{}")
        return str(folder)

    def said(path: str) -> str:
        config = made(one)
        config.lora_config = like(vllm.LORA_CONFIG, default_mm_loras={"audio": path})
        return model_keys(config, {})["model_fingerprint"]

    first, same, other = adapter("x", 0), adapter("y", 0), adapter("z", 1)
    assert said(first) == said(same) != said(other)
    assert np.unique([said(first), fingerprint(one), said(other)]).size == 3
