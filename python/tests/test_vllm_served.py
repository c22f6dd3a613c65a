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
from like import like, older
from test_checkpoint import tensors, write
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from kvconn.checkpoint import model_fingerprint
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


def test_configuration_from_another_folder(model: Path, tmp_path: Path) -> None:
    """--hf-config-path: the configuration that counts is the one that vLLM reads, wherever it is."""
    one, other = checkpoint(tmp_path / "tiny", model), checkpoint(tmp_path / "other", model)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 1.0}))
    by_other = fingerprint(one, hf_config_path=str(other))
    assert fingerprint(one) == fingerprint(one, hf_config_path=str(one)) != by_other
    (one / "config.json").write_text((other / "config.json").read_text())
    assert fingerprint(one) == by_other


def test_model_of_which_the_engine_has_downloaded_a_part(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines download the files that they read. huggingface_hub keeps the list of all and calls such a folder incomplete."""
    from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache

    commit, hub = "a" * 40, tmp_path / "hub" / "models--org--tiny"
    folder = checkpoint(hub / "snapshots" / commit, model)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(commit)
    write_tree_cache(str(hub), commit, {name: TreeCacheEntry(1, "b" * 40) for name in ("README.md", "config.json", "model.safetensors")})
    assert model_fingerprint("org/tiny", revision="main", cache_dir=str(tmp_path / "hub")) == model_fingerprint(str(folder))


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


def test_quantization_while_loading_is_compared(model: Path, tmp_path: Path) -> None:
    """If a checkpoint's weights are quantised, its fingerprint says so."""
    one = checkpoint(tmp_path / "tiny", model)
    plain, quantised = made(one), made(one, quantization="fp8")
    assert must_match(plain, {}) == {} and must_match(quantised, {}) == {"quantization": "fp8"}
    assert model_keys(plain, {}) == model_keys(quantised, {}), "only the mode tells the two apart"
    quantised.model_config.hf_config.quantization_config = {"quant_method": "fp8"}
    assert must_match(quantised, {}) == {}


def test_quantization_of_each_layer_s_own_is_compared(model: Path, tmp_path: Path) -> None:
    one = checkpoint(tmp_path / "tiny", model)
    configs = [made(one, quantization=name) for name in ("fp8_per_tensor", "fp8_per_block")]
    said = [must_match(config, {})["quantization"] for config in configs]
    assert said[0] != said[1] and all(len(each) <= 80 and each.startswith("fp8_per_") for each in said)


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
    assert must_match(speculative(None, None, one), {}) == must_match(speculative("ngram", None, one), {}) == {}
    eagle = must_match(speculative("eagle3", draft, one), {})
    assert eagle["speculative"].startswith("eagle3 by d 1:")
    assert eagle == must_match(speculative("eagle3", copy, one), {})
    assert eagle != must_match(speculative("eagle3", other, one), {}) and eagle != must_match(speculative("eagle", draft, one), {})
    assert must_match(speculative("mtp", None, one), {}) == {"speculative": "mtp"}


def test_draft_model_that_the_user_vouches_for(model: Path, tmp_path: Path) -> None:
    one, draft = checkpoint(tmp_path / "tiny", model), tmp_path / "draft"
    draft.mkdir()
    with pytest.raises(ValueError, match=r'draft holds no weights.*set "model" in kv_connector_extra_config of both engines'):
        must_match(speculative("eagle3", draft, one), {})
    assert must_match(speculative("eagle3", draft, one), {"model": "mine"}) == {"speculative": "eagle3 by draft"}


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
        (f"{vllm.AUX}.enable_return_routed_experts", True, "--enable-return-routed-experts is not supported"),
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
    if vllm.AUX != "model_config":  # 0.30 has no such MTP
        assert "num_prefill_lookahead_tokens" in vllm.fields_of(vllm.VLLM_CONFIG)


@pytest.mark.parametrize(("ahead", "refused"), [(0, False), (1, False), (3, True)])
def test_mtp_of_several_modules(ahead: int, refused: bool) -> None:
    values = dict(
        **{vllm.AUX: like(vllm.AUX_CONFIG, enable_return_routed_experts=False)},
        parallel_config=like(vllm.PARALLEL_CONFIG),
        cache_config=like(vllm.CACHE_CONFIG),
        num_prefill_lookahead_tokens=ahead,
    )
    config = older(**values) if vllm.AUX == "model_config" else like(vllm.VLLM_CONFIG, **values)  # 0.30 has no such MTP
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


def test_modules_that_adapters_are_applied_to(model: Path, tmp_path: Path) -> None:
    """Two engines may apply one adapter to different modules: then it computes another cache."""
    one = checkpoint(tmp_path / "tiny", model)
    assert must_match(made(one, enable_lora=True), {}) == {}
    if "target_modules" in vllm.fields_of(vllm.LORA_CONFIG):  # some releases apply an adapter to all modules that it has
        for names in (["q_proj", "v_proj"], ["v_proj", "q_proj"]):
            some = made(one, enable_lora=True, lora_target_modules=names)
            assert must_match(some, {}) == {"lora_target_modules": '["q_proj", "v_proj"]'}


def test_what_becomes_of_images(model: Path, tmp_path: Path) -> None:
    """Options that change what an image is to the model, and not how many tokens it has."""
    from vllm.config import MultiModalConfig

    config = made(checkpoint(tmp_path / "tiny", model))
    config.model_config.multimodal_config = MultiModalConfig(mm_processor_kwargs={"size": 8}, video_pruning_rate=0.5)
    assert must_match(config, {}) == {"mm_processor_kwargs": '{"size": 8}', "video_pruning_rate": "0.5"}
    config.model_config.multimodal_config = MultiModalConfig()
    assert must_match(config, {}) == {}
