"""What SGLang's queue knows when it makes the backend's manager: the pools, the model, the other ranks.

SGLang hands its backends only addresses and lengths. The queue tells what lies at these addresses, and what the two engines
must have in common. The plugin shows the queue to this module just before SGLang makes the manager (plugin.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .parallel import leaf, turns
from .params import CONFIG_VARIABLE, unused
from .served import common_ground, count_replacements

logger = logging.getLogger("kvconn.sglang")

_queue: Any = None  # the queue that makes its manager now


@dataclass(frozen=True)
class Start:
    """A rank's pools, its model, and what both engines must have in common."""

    pool: Any
    draft: Any  # the pool of a draft model; None: there is none
    model_config: Any
    common: dict[str, Any]
    scheduler: Any


def show(queue: Any) -> None:
    """Called before SGLang's method that makes a queue's manager."""
    global _queue
    _queue = queue


def take(server_args: Any, extra: Mapping[str, Any]) -> Start:
    """What follows from the queue that was shown last. Each manager has a queue of its own. extra: the user's keys."""
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
    rows = queue.metadata_buffers.bootstrap_room.device
    if rows.type != "cpu":  # SGLang writes them on its current stream, for one transport of Mooncake's
        raise ValueError(f"kvconn: SGLang keeps its metadata rows on {rows}: unset SGLANG_MOONCAKE_CUSTOM_MEM_POOL")
    pool, draft = queue.token_to_kv_pool, queue.draft_token_to_kv_pool
    # The model's files may be others when the engine goes on in its other role. Its weights are those that it started with.
    if not hasattr(scheduler, "kvconn_common"):
        count_replacements()
        _warn_of_cache(server_args, queue)
        if (names := unused()) and not queue.tp_rank and not queue.pp_rank:
            logger.info("%s: of SGLang's own transfer backends, and not used by kvconn: see %s", ", ".join(names), CONFIG_VARIABLE)
        scheduler.kvconn_common = common_ground(server_args, pool, draft, extra)
    return Start(pool, draft, scheduler.model_config, scheduler.kvconn_common, scheduler)


def _warn_of_cache(server_args: Any, queue: Any) -> None:
    """At the start of a server whose role may change, by its first rank.

    SGLang turns the prefix cache off for a server that starts as decode, but not for one that turns to decode. There it counts a
    cached beginning of a prompt as protected by the cache (Req.init_next_round_input), also where the request has pages of its
    own for it, and frees those never.
    """
    if not turns(server_args) or queue.tp_rank or queue.pp_rank or leaf("disaggregation_mode", server_args) != "prefill":
        return
    if not leaf("disable_radix_cache", server_args, False) and not leaf("disaggregation_decode_enable_radix_cache", server_args, False):
        logger.warning(
            "--enable-pd-role-switch: when this server turns to decode, SGLang keeps its prefix cache, loses pages of repeated prompts and "
            "ends the server with `pool memory leak detected`: start it with --disable-radix-cache"
        )


def check_stages(mine: Iterable[int], plain: bool, layers: int, group: Any) -> None:
    """Checks that the stages of this engine's pipeline have each layer, and only once.

    plain: every one of the model's layers, of which there are so many, has a cache.
    """
    stages = group.all_gather_object(sorted(set(mine)))
    told = ", ".join(f"stage {number} has {_runs(stage)}" for number, stage in enumerate(stages))
    held = Counter(layer for stage in stages for layer in stage)
    for layer in range(max([layers - 1 if plain else -1, *held]) + 1):
        if held[layer] > 1:
            raise ValueError(f"kvconn: {held[layer]} stages of the pipeline have layer {layer}: {told}")
        if plain and not held[layer]:
            raise ValueError(f"kvconn: no stage of the pipeline has layer {layer} of {layers}: {told}")


def _runs(layers: list[int]) -> str:
    if layers and layers == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]} to {layers[-1]}"
    return f"the layers {layers}"
