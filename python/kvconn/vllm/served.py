"""What an engine serves, as far as two engines must have it in common: the model's fingerprint, how weights are quantised, the
speculative model.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from .. import weights
from ..checkpoint import NoFingerprint, adapter_fingerprint, model_fingerprint

# Formats in which vLLM loads the weights from the files of the model's folder.
_FROM_FILES = (
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt"),
    *("sharded_state", "runai_streamer", "runai_streamer_sharded"),
)
# Methods that draft without a KV cache of their own.
_WITHOUT_CACHE = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")


def model_keys(vllm_config: Any, extra: Mapping[str, Any]) -> dict[str, str]:
    """The agent's keys about the model. A user who names the model vouches that models of one name are the same."""
    model = vllm_config.model_config
    # The last part of the path: it stands in messages beside the fingerprint.
    keys = {"model": os.path.basename(str(model.model).rstrip("/"))}
    if not named(extra):
        keys["model_fingerprint"] = _fingerprint(vllm_config, model, vllm_config.load_config)
    return keys


def named(extra: Mapping[str, Any]) -> bool:
    """Whether the user says which model it is: then weights are not compared."""
    return "model" in extra or "model_fingerprint" in extra


def _fingerprint(vllm_config: Any, model: Any, load: Any) -> str:
    facts: dict[str, Any] = {}
    overrides = getattr(model, "hf_overrides", None)
    if overrides:
        facts["overrides"] = _name(overrides) if callable(overrides) else overrides
    if (long := _long_rope(model)) is not None:
        facts["long_rope"] = long
    try:
        lora = getattr(vllm_config, "lora_config", None)
        if adapters := getattr(lora, "default_mm_loras", None):
            facts["adapters"] = {name: adapter_fingerprint(path, cache_dir=load.download_dir) for name, path in adapters.items()}
        form, where = str(load.load_format), str(getattr(model, "model_weights", "") or "")
        if "://" in where:  # in a store of objects, of which the address says what is there
            facts["weights"] = where
        elif form not in (*_FROM_FILES, "dummy"):
            raise NoFingerprint(f"--load-format {form} does not say from which files the weights come")
        return model_fingerprint(
            str(model.model),
            revision=getattr(model, "revision", None),
            cache_dir=load.download_dir,
            config=getattr(model, "hf_config_path", None),
            config_revision=getattr(model, "_hf_config_revision", None) or getattr(model, "revision", None),
            dummy=form == "dummy" or "weights" in facts,
            facts={**facts, "seed": model.seed} if form == "dummy" else facts,
        )
    except NoFingerprint as error:
        raise ValueError(
            f"{error}. Two engines compare their weights. To compare a name in their place, "
            'set "model" in kv_connector_extra_config of both engines'
        ) from error


def _name(function: Any) -> str:
    """The name of the code that overrides a configuration. vLLM sets such a function for speculative models."""
    function = getattr(function, "func", function)  # the function within a functools.partial
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _long_rope(model: Any) -> bool | None:
    """Whether positions are scaled for long prompts, which depends on --max-model-len; None for a model that has one scale."""
    config = getattr(model, "hf_text_config", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
        return None
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", 0)
    return int(model.max_model_len) > int(original or 0)


def must_match(vllm_config: Any, extra: Mapping[str, Any]) -> dict[str, str]:
    """What else both engines must have in common. What lies in a cache's blocks stands in the regions' names."""
    return {**_quantized(vllm_config.model_config), **_speculative(vllm_config, extra), **_inputs(vllm_config)}


def short(said: str) -> str:
    """A value that a refusal says in full."""
    return said if len(said) <= 80 else f"{said[:60]}… {sha256(said.encode()).hexdigest()[:16]}"


def _inputs(vllm_config: Any) -> dict[str, str]:
    """How images and the like become a part of the prompt, and to which modules adapters are applied."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    said = {name: getattr(multimodal, name, None) for name in ("mm_processor_kwargs", "video_pruning_rate")}
    if isinstance(given := said["mm_processor_kwargs"], Mapping):  # the device says where it is computed, not what
        said["mm_processor_kwargs"] = {name: value for name, value in given.items() if name != "device"}
    said["lora_target_modules"] = sorted(getattr(getattr(vllm_config, "lora_config", None), "target_modules", None) or ())
    return {name: short(json.dumps(value, sort_keys=True, default=str)) for name, value in said.items() if value}


def _quantized(model: Any) -> dict[str, str]:
    """How weights are quantised while they are loaded. How a checkpoint's own weights are stands in its fingerprint."""
    quantization, configs = getattr(model, "quantization", None), [getattr(model, name, None) for name in ("hf_config", "hf_text_config")]
    stored = [getattr(config, name, None) for config in configs for name in ("quantization_config", "compression_config")]
    if not quantization or any(stored):
        return {}
    more = getattr(model, "quantization_config", None)
    said = f"{quantization} {more}" if more else str(quantization)
    return {"quantization": short(said)}


def _speculative(vllm_config: Any, extra: Mapping[str, Any]) -> dict[str, str]:
    speculative = getattr(vllm_config, "speculative_config", None)
    method = getattr(speculative, "method", None)
    if not method or method in _WITHOUT_CACHE:
        return {}
    said, draft = str(method), getattr(speculative, "draft_model_config", None)
    if getattr(speculative, "parallel_drafting", False):
        said += ", parallel"
    if draft is not None and draft.model != vllm_config.model_config.model:
        load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
        said += f" by {os.path.basename(str(draft.model).rstrip('/'))[:80]}"
        if not named(extra):
            said += f" {_fingerprint(vllm_config, draft, load)}"
    return {"speculative": said}


_SAME_DTYPE = {"fp8": "fp8_e4m3"}  # vLLM has two names for one type


def cache_dtype(vllm_config: Any) -> str:
    """The type of the numbers in the engine's caches. A layer may have another one: its regions' names say that."""
    dtype = str(getattr(vllm_config.cache_config, "cache_dtype", "auto"))
    dtype = str(vllm_config.model_config.dtype) if dtype == "auto" else _SAME_DTYPE.get(dtype, dtype)
    return dtype.removeprefix("torch.")


def check_engine(vllm_config: Any) -> None:
    """Refuses what would go wrong later, with the option's name."""
    aux = getattr(vllm_config, "aux_output_config", None) or vllm_config.model_config
    if getattr(aux, "enable_return_routed_experts", False):
        raise ValueError(
            "--enable-return-routed-experts is not supported: a decode engine that loads a prompt's cache "
            "has not routed the prompt's tokens, so their experts would be missing"
        )
    if getattr(vllm_config.parallel_config, "enable_elastic_ep", False):
        raise ValueError(
            "--enable-elastic-ep is not supported: the number of data parallel ranks is fixed when an agent opens, "
            "so ranks that are added later could not be found"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ValueError("--calculate-kv-scales is not supported: each engine would read the cache by scales of its own")
    ahead = getattr(vllm_config, "num_prefill_lookahead_tokens", 0)
    if ahead > 1:
        raise ValueError(
            f"MTP of several modules (they look {ahead} tokens ahead) is not supported: unverified drafts would "
            "stay in the decode engine's cache"
        )


# The methods by which vLLM's worker replaces weights: in one call each, or between a first and a last one. Not each release has all.
_RELOAD, _UPDATE, _CLOSE = ("reload_weights",), ("update_weights",), ("finish_weight_update",)
_OPEN = ("start_weight_update", "start_draft_weight_update")
_LOSE = ("reset_weights",)  # sets them to zero
_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")


def count_replacements(vllm_config: Any) -> None:
    """Counts from now on how often this worker replaces its weights. Each of vLLM's calls reaches all workers of an engine."""
    place = str(vllm_config.parallel_config.worker_cls)
    worker = _worker(place)
    ways = ((_RELOAD, _replace), (_UPDATE, _update), (_OPEN, _open), (_CLOSE, _close), (_LOSE, _lose))
    found = {name for names, how in ways for name in names if weights.follow(worker, name, how)}
    if not found.intersection(_RELOAD):
        raise ValueError(
            f"the worker {place} has no method {_RELOAD[0]}, so kvconn could not tell when it replaces its weights: "
            "it does not work with this worker"
        )
    # What a worker's extension replaces (--worker-extension-cls) it does by the runner or the model.
    for module in filter(None, map(sys.modules.get, _RUNNERS)):
        weights.follow(module.GPUModelRunner, "reload_weights", _replace)
    from vllm.model_executor.model_loader.utils import get_model_architecture

    model, name = get_model_architecture(vllm_config.model_config)
    if not weights.follow(model, "load_weights", _replace):
        raise ValueError(f"the model {name} has no method load_weights, so kvconn could not tell when its weights are replaced")
    weights.started()


def _worker(place: str) -> type:
    module, _, name = place.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
    except (AttributeError, ImportError, ValueError) as error:
        raise ValueError(f"the class of vLLM's worker, {place}, is not found: {error}") from error


_MODEL = "model"  # a worker has one session at a time, of its model or of its draft model


def _replace(call: Any, *_: Any, **__: Any) -> Any:
    return weights.engine.replace(_MODEL, call)


def _update(call: Any, worker: Any, *_: Any, **__: Any) -> Any:
    return weights.engine.replace(_MODEL, call) if _has_source(worker) else call()


def _open(call: Any, worker: Any, *_: Any, **__: Any) -> Any:
    return weights.engine.open(_MODEL, call) if _has_source(worker) else call()


def _has_source(worker: Any) -> bool:
    """Whether there is somebody to send weights. If not, vLLM refuses the call and nothing changes."""
    return getattr(worker, "weight_transfer_engine", worker) is not None


def _close(call: Any, *_: Any, **__: Any) -> Any:
    return weights.engine.close(_MODEL, call)


def _lose(call: Any, *_: Any, **__: Any) -> Any:
    weights.engine.lose(_MODEL)
    return call()
