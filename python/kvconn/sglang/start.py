"""What SGLang's queue knows when it makes the backend's manager: the pools, the model, the other ranks.

SGLang hands its backends addresses and lengths. What those hold, and what the two engines must have in common, follows from
the queue, which the plugin shows to this module just before (plugin.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from . import pools
from .parallel import leaf

logger = logging.getLogger("kvconn.sglang")

_queue: Any = None  # the queue that makes its manager now


@dataclass(frozen=True)
class Start:
    """The pools and the common ground of a rank."""

    pool: Any
    draft: Any  # the pool of a draft model; None: there is none
    model_config: Any
    common: dict[str, Any]


def show(queue: Any) -> None:
    """Called before SGLang's method that makes a queue's manager."""
    global _queue
    _queue = queue


def take(server_args: Any) -> Start:
    """What follows from the queue that was shown last. Each manager has a queue of its own."""
    global _queue
    queue, _queue = _queue, None
    if queue is None:
        raise ValueError(
            "kvconn: SGLang has not called _init_kv_manager of PrefillBootstrapQueue or DecodePreallocQueue: "
            "without it kvconn does not know which layers its buffers are of, so it does not work with this SGLang"
        )
    scheduler = queue.scheduler
    if getattr(scheduler, "enable_hisparse", False):
        raise ValueError("--disaggregation-transfer-backend kvconn: --enable-hisparse is not supported")
    draft = queue.draft_token_to_kv_pool
    return Start(queue.token_to_kv_pool, draft, scheduler.model_config, common_ground(server_args, queue.token_to_kv_pool, draft))


def common_ground(server_args: Any, pool: Any, draft: Any) -> dict[str, Any]:
    """What both engines must have in common, as keys of the agent's configuration."""
    from sglang.srt.runtime_context import attention_backends

    prefill, decode = attention_backends()
    return {
        **_model(server_args),
        "must_match": {
            # Of a pool as a test has seen it: whether two backends use one in the same way is not known.
            "attention_backend": str(prefill) if prefill == decode else f"{prefill} for prefill, {decode} for decode",
            "quantization": str(leaf("quantization", server_args, "none")),
            "speculative": _draft(server_args, draft),
            "state_layout": _short(pools.described(pool)),
            **{f"state {part}": _short(shape) for part, shape in pools.shapes(pool).items()},
        },
    }


def _short(text: str) -> str:
    """A value that a refusal says in full."""
    return text if len(text) <= 80 else f"{text[:60]}… {sha256(text.encode()).hexdigest()[:16]}"


def _model(server_args: Any) -> dict[str, str]:
    from ..checkpoint import NoFingerprint, adapter_fingerprint, model_fingerprint

    name = {"model": leaf("model_path", server_args).rstrip("/").rpartition("/")[2][:128]}
    try:
        adapters = {name: adapter_fingerprint(path) for name, path in _adapters(leaf("lora_paths", server_args))}
        fingerprint = model_fingerprint(
            leaf("model_path", server_args),
            revision=leaf("revision", server_args),
            dummy=leaf("load_format", server_args) == "dummy",
            facts={"adapters": adapters, "overrides": leaf("json_model_override_args", server_args)},
        )
    except NoFingerprint as error:
        logger.warning("only the name %r of the model is compared with the other engine's: %s", name["model"], error)
        return name
    return {**name, "model_fingerprint": fingerprint}


def _draft(server_args: Any, pool: Any) -> str:
    from ..checkpoint import NoFingerprint, model_fingerprint

    if pool is None:
        return "none"
    path = leaf("speculative_draft_model_path", server_args) or leaf("model_path", server_args)
    try:
        weights = model_fingerprint(path, revision=leaf("speculative_draft_model_revision", server_args))
    except NoFingerprint:
        weights = str(path).rstrip("/").rpartition("/")[2]
    return _short(f"{leaf('speculative_algorithm', server_args)}, {weights}, {pools.described(pool)}")


def _adapters(given: Any) -> list[tuple[str, str]]:
    """SGLang keeps them as a mapping, as words "name=path", as paths, or as objects."""
    out = []
    for one in given.items() if isinstance(given, dict) else given or ():
        if isinstance(one, tuple):
            name, path = one
        elif isinstance(one, str):
            name, _, path = one.rpartition("=")
        else:
            name, path = one.lora_name, one.lora_path
        out.append((name or path, path))
    return sorted(out)


def check_stages(mine: Iterable[int], plain: bool, group: Any) -> None:
    """Checks that the stages of this engine's pipeline have each layer, and only once. plain: every layer has a cache."""
    stages = group.all_gather_object(sorted(set(mine)))
    told = ", ".join(f"stage {number} has {_runs(stage)}" for number, stage in enumerate(stages))
    held = Counter(layer for stage in stages for layer in stage)
    for layer in range(max(held, default=-1) + 1):
        if held[layer] > 1:
            raise ValueError(f"kvconn: {held[layer]} stages of the pipeline have layer {layer}: {told}")
        if plain and not held[layer]:
            raise ValueError(f"kvconn: no stage of the pipeline has layer {layer}: {told}")


def _runs(layers: list[int]) -> str:
    if layers and layers == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]} to {layers[-1]}"
    return f"the layers {layers}"
