"""What an engine serves, as far as two engines must have it in common: weights, adapters, quantisation, draft model, layout.

What cannot be compared ends the start, or the request. Only a user who names the model vouches for it: then names are compared.
"""

from __future__ import annotations

import importlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from .. import weights
from ..checkpoint import NoFingerprint, adapter_fingerprint, model_fingerprint
from . import pools
from .parallel import leaf
from .params import CONFIG_VARIABLE

_ADAPTERS = 1024  # the adapters whose fingerprints are kept

# Formats in which SGLang loads the weights from the files of the model's folder.
FROM_FILES = (
    *("auto", "pt", "safetensors", "instanttensor", "npcache", "sharded_state", "gguf", "bitsandbytes", "mistral", "layered"),
    *("flash_rl", "fastsafetensors", "runai_streamer"),
)
# Options by which the configuration or the weights come from elsewhere than the model's folder, with the values that do not mean it.
ELSEWHERE = {"decrypted_config_file": (), "checkpoint_engine_wait_weights_before_ready": (), "weight_cache_mode": ("off", "daemon")}
# How weights are quantised while they are loaded. How a checkpoint's own weights are stands in its fingerprint.
QUANTISATION = ("quantization", "modelopt_quant")
# The other options that are read here.
READ = (
    *("model_path", "revision", "download_dir", "load_format", "json_model_override_args", "lora_paths", "quantization_param_path"),
    *("speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision", "speculative_draft_load_format"),
    *("mm_process_config", "rl_quant_profile"),
)


def common_ground(server_args: Any, pool: Any, draft: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    """What both engines must have in common, as keys of the agent's configuration. extra: the user's keys."""
    from sglang.srt.runtime_context import attention_backends

    prefill, decode = attention_backends()
    named = vouched(extra)
    return {
        **_model(server_args, named),
        "must_match": {
            # Of a pool as a test has seen it: whether two backends use one in the same way is not known.
            "attention_backend": str(prefill) if prefill == decode else f"{prefill} for prefill, {decode} for decode",
            "quantization": _short(" ".join(str(each) for name in QUANTISATION if (each := leaf(name, server_args))) or "none"),
            "quantization_profile": _digest(_file("rl_quant_profile", server_args)),
            "kv_cache_scales": _scales(server_args),
            "mm_process_config": _short(_text(leaf("mm_process_config", server_args)) or "none"),
            "speculative": _draft(server_args, draft, named),
            "state_layout": _short(pools.described(pool)),
            **{f"state {part}": _short(shape) for part, shape in pools.shapes(pool).items()},
        },
    }


def vouched(extra: Mapping[str, Any]) -> bool:
    """Whether the user vouches that models of one name are equal, by naming the model or its fingerprint."""
    return "model" in extra or "model_fingerprint" in extra


def _short(text: str) -> str:
    """A value as a refusal names it: in full, or its beginning and its digest if it is long."""
    return text if len(text) <= 80 else f"{text[:60]}… {sha256(text.encode()).hexdigest()[:16]}"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str) if value else ""


def _scales(server_args: Any) -> str:
    """A digest of the factors that scale the numbers of a cache of type fp8, if a file has them; "none" if no file has."""
    said = _file("quantization_param_path", server_args)
    try:
        return _digest(_text(json.loads(said)).encode()) if said else "none"
    except ValueError as error:
        raise ValueError(f"kvconn: --quantization-param-path is {leaf('quantization_param_path', server_args)}: {error}") from error


def _file(option: str, server_args: Any) -> bytes:
    """The content of the file that an option names; empty if the option names no file."""
    if not (path := leaf(option, server_args)):
        return b""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"kvconn: --{option.replace('_', '-')} is {path}: {error}") from error


def _digest(said: bytes) -> str:
    return sha256(said).hexdigest()[:16] if said else "none"


def _name(path: Any) -> str:
    """The last part of the path: it stands in messages beside the fingerprint."""
    return str(path).rstrip("/").rpartition("/")[2][:128]


def _model(server_args: Any, named: bool) -> dict[str, str]:
    path, form = leaf("model_path", server_args), str(leaf("load_format", server_args, "auto"))
    if named:
        return {"model": _name(path)}
    try:
        for option, harmless in ELSEWHERE.items():
            if (value := leaf(option, server_args)) and value not in harmless:
                raise NoFingerprint(f"with --{option.replace('_', '-')} {value} the model is not that of the folder {path}")
        _check_format("--load-format", form)
        cache_dir = leaf("download_dir", server_args)
        adapters = {name: adapter_fingerprint(where, cache_dir=cache_dir) for name, where in _adapters(leaf("lora_paths", server_args))}
        fingerprint = model_fingerprint(
            path,
            revision=leaf("revision", server_args),
            cache_dir=cache_dir,
            dummy=form == "dummy",
            facts={"adapters": adapters, "overrides": leaf("json_model_override_args", server_args)},
        )
    except NoFingerprint as error:
        raise _cannot(error) from error
    return {"model": _name(path), "model_fingerprint": fingerprint}


def _check_format(option: str, form: str) -> None:
    if form not in (*FROM_FILES, "dummy"):
        raise NoFingerprint(f"{option} {form} does not say from which files the weights come")


def _cannot(error: NoFingerprint) -> ValueError:
    return ValueError(
        f'kvconn: {error}. Two engines compare their weights. To compare a name in their place, set "model" in {CONFIG_VARIABLE} '
        "of both engines"
    )


def _draft(server_args: Any, pool: Any, named: bool) -> str:
    if pool is None:
        return "none"
    path = leaf("speculative_draft_model_path", server_args) or leaf("model_path", server_args)
    if named:
        weights = _name(path)
    else:
        form = str(leaf("speculative_draft_load_format", server_args) or leaf("load_format", server_args, "auto"))
        try:
            _check_format("--speculative-draft-load-format", form)
            weights = model_fingerprint(
                path,
                revision=leaf("speculative_draft_model_revision", server_args),
                cache_dir=leaf("download_dir", server_args),
                dummy=form == "dummy",
            )
        except NoFingerprint as error:
            raise _cannot(error) from error
    return _short(f"{leaf('speculative_algorithm', server_args)}, {weights}, {pools.described(pool)}")


def _adapters(given: Any) -> list[tuple[str, str]]:
    """SGLang keeps them as a mapping, as words "name=path", as paths, or as objects."""
    out = []
    for one in given.items() if isinstance(given, dict) else given or ():
        if isinstance(one, tuple):
            name, path = one
        elif isinstance(one, str):
            name, path = one.split("=", 1) if "=" in one else ("", one)  # as SGLang: a path may have the sign too
        else:
            name, path = one.lora_name, one.lora_path
        out.append((name or path, path))
    return sorted(out)


class Adapters:
    """The adapters of requests. SGLang loads adapters while it runs, so two engines may have different ones of one name."""

    def __init__(self, scheduler: Any, cache_dir: str | None = None, named: bool = False) -> None:
        self._scheduler = scheduler
        self._cache_dir = cache_dir
        self._named = named  # the user vouches for what has one name
        self._known: OrderedDict[str, str] = OrderedDict()  # by SGLang's id, which a later adapter of the name does not have

    def of_prompt(self, request: Any, prompt: int) -> tuple[int, str]:
        """The fingerprint of a prompt whose cache the request's adapter computes; or why the adapter cannot be compared."""
        number = request.lora_id
        known = self._known.get(number)
        if known is None:
            refs = getattr(self._scheduler.tp_worker.model_runner.lora_manager, "lora_refs", {})
            if number not in refs:
                return 0, f"SGLang does not tell where the request's adapter {number} comes from"
            try:
                if self._named:
                    known = sha256(refs[number].lora_name.encode()).hexdigest()
                else:
                    known = adapter_fingerprint(refs[number].lora_path, cache_dir=self._cache_dir)
            except NoFingerprint as error:
                return 0, f"the adapter {refs[number].lora_name!r} cannot be compared: {error}"
            self._known[number] = known
            while len(self._known) > _ADAPTERS:
                self._known.popitem(last=False)
        return ((prompt ^ int(known[2:18], 16)) or 1 if prompt else 0), ""


_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"  # of one model; a draft model has its own


def count_replacements() -> None:
    """Counts from now on how often this process replaces its weights. Each of SGLang's requests for it reaches all ranks of a server."""
    module, _, name = _UPDATER.rpartition(".")
    ways = {
        "update_weights_from_disk": _from_disk,
        "update_weights_from_tensor": _replace,
        "update_weights_from_ipc": _replace,
        "load_weights_from_distributed": _replace,
        "receive_weights_from_distributed": lambda call, *_, **__: weights.engine.part(call),
        "begin_weight_update": lambda call, updater, *_, **__: weights.engine.open(id(updater), call),
        "end_weight_update": lambda call, updater, *_, **__: weights.engine.close(id(updater), call),
    }
    try:
        updater = getattr(importlib.import_module(module), name)
        missing = [name for name, how in ways.items() if not weights.follow(updater, name, how)]
    except (AttributeError, ImportError) as error:
        raise _uncounted(str(error)) from error
    if missing:
        raise _uncounted(f"it has no {', '.join(missing)}")


def _uncounted(why: str) -> ValueError:
    return ValueError(
        f"kvconn: SGLang's {_UPDATER} is not as kvconn knows it ({why}), so kvconn could not tell when the server replaces its "
        "weights: it does not work with this SGLang"
    )


def _replace(call: Any, updater: Any, *_: Any, **__: Any) -> Any:
    return weights.engine.replace(id(updater), call)


def _from_disk(call: Any, updater: Any, path: Any, form: Any, name_filter: Any = None, **more: Any) -> Any:
    # SGLang's own balance of experts reads again what a rank lacks: the weights stay the model's.
    return call() if more.get("weight_name_filter", name_filter) is not None else _replace(call, updater)
