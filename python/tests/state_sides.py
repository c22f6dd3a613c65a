"""Engines with states: vLLM's own specs, groups, tensors and scheduler, the connector's two sides, and an agent. Only the model is
played: it leaves in each layer's cache what depends on all tokens so far, and checks what it finds there before it goes on.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache, copy_kv_cache_blocks_inplace
from vllm_engine import BLOCK, Engine

import kvconn
from kvconn.vllm import states
from kvconn.vllm.groups import layer_specs
from kvconn.vllm.layout import Heads, make_regions, regions_by_layer
from kvconn.vllm.worker import WorkerSide

try:  # before 0.32 another rule says where a step leaves a state within it; there steps end at blocks' borders here
    from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints as checkpoints

    CHECKPOINTS = "cache_hit_alignment_tokens" in inspect.signature(checkpoints).parameters
except ImportError:
    CHECKPOINTS = False

BLOCKS = 128
DTYPES = MambaStateDtypeCalculator.mamba2_state_dtype(torch.bfloat16, "auto", "float32")
AT = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 0, "tcp_listen_host": "127.0.0.1"}


def mamba2(align: bool, tp: int = 1, **more: Any) -> MambaSpec:
    """As vLLM's Mamba 2 layers say it."""
    shapes = MambaStateShapeCalculator.mamba2_state_shape(tp, 64, 1, 4, 16, 8, 4)
    fields: dict[str, Any] = {"shapes": shapes, "dtypes": DTYPES, "block_size": BLOCK if align else 1024, **more}
    mode = "align" if align else "none"
    borders = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1} if CHECKPOINTS else {}
    return MambaSpec(**{"mamba_cache_mode": mode, **borders, **fields})


def short_conv(align: bool) -> MambaSpec:
    more = {"num_prefill_checkpoint_blocks": 0, "prefill_checkpoint_alignment": None, "mamba_type": Kind.SHORT_CONV}
    shapes = MambaStateShapeCalculator.short_conv_state_shape(1, 64, 3)
    return mamba2(align, shapes=shapes, dtypes=DTYPES[:1], **more)


def model_layers(align: bool, attention: bool = True) -> dict[str, Any]:
    """Two layers with states, of two kinds and so of two groups, and one with attention, all of one page size."""
    full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    kinds = {"model.layers.0.mixer": mamba2(align), "model.layers.1.conv": short_conv(align)}
    if not attention:
        return {"model.layers.0.mixer": mamba2(align), "model.layers.1.mixer": mamba2(align)}
    padded = {name: type(spec)(**{**spec.__dict__, "page_size_padded": full.page_size_bytes}) for name, spec in kinds.items()}
    return {**padded, "model.layers.2.self_attn": full}


def left(layer: str, tokens: Sequence[int], size: int) -> torch.Tensor:
    """The state that these tokens leave: all of them decide each byte."""
    seed = hashlib.sha256(f"{layer} {list(tokens)}".encode()).digest()
    return torch.frombuffer(bytearray((seed * (size // len(seed) + 1))[:size]), dtype=torch.uint8).view(torch.int8)


class Side:
    """One engine."""

    def __init__(self, model: Path, role: str, *, align: bool, attention: bool = True, blocks: int = BLOCKS, **more: Any) -> None:
        self.engine = Engine(model, role, layers=model_layers(align, attention), prefixes=align, blocks=blocks, **more)
        self.align = align
        caches = self.engine.caches
        self.tensors = allocate_kv_cache(caches, torch.device("cpu"), KVCacheLayout.LBHNC)
        self.layers = {name: (place, spec) for name, place, spec in layer_specs(caches)}
        facts = states.facts(self.engine.config, caches, 1)
        name = {"kv_producer": "prefill", "kv_consumer": "decode"}[role]
        self.agent = kvconn.Agent(
            {"engine_id": f"engine-{name}", "role": name, "must_match": facts, "peer_timeout_s": 15, **(AT if name == "prefill" else {})}
        )
        regions = make_regions(self.tensors, self.engine.config, caches, kvconn.regions_from_tensor, Heads(2))
        self.agent.register_kv_caches(regions)
        self.worker = WorkerSide(lambda: self.agent, 0.001, by_layers=True)
        self.worker.follow_layers(regions_by_layer(self.tensors, regions))
        self.ahead = 1 + bool(more.get("async_scheduling"))  # steps that are scheduled before the first one's tokens are known
        self.outputs: list[Any] = []
        self.failures: list[str] = []

    def page(self, layer: str, block: int) -> torch.Tensor:
        """A block of a layer, as bytes."""
        return self.tensors[layer][block].reshape(-1).view(torch.int8)

    def begin(self) -> None:
        """A step up to where its tokens are computed."""
        engine, scheduler = self.engine, self.engine.scheduler
        output = engine.schedule()
        self.outputs.append(output)
        meta = engine.metas[-1]
        self.worker.withdraw(meta)
        self._overwrite_free()
        self.worker.begin(meta)
        for block in output.new_block_ids_to_zero or ():
            for name in self.layers:
                self.page(name, block)[:] = 0
        copy_kv_cache_blocks_inplace(self.tensors.values(), self.engine.caches.num_blocks, output.kv_cache_block_copies or ())
        for name, (place, spec) in self.layers.items():
            for req_id, scheduled in output.num_scheduled_tokens.items():
                request = scheduler.requests[req_id]
                blocks = scheduler.kv_cache_manager.get_block_ids(req_id)[place]
                tokens, end = [*request.all_token_ids, 7, 7], request.num_computed_tokens  # each token that is sampled is a 7
                (self._state if states.is_state(spec) else self._attention)(name, spec, blocks, tokens, end - scheduled, end)
            if not states.is_state(spec):  # vLLM makes no such call of the others
                self.worker.layer_written(name)
        self.worker.load(meta)
        self.worker.step_written()

    def _overwrite_free(self) -> None:
        """What no request has, and no prefix that vLLM may find again."""
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        for block in pool.blocks:
            if block.ref_cnt == 0 and block.block_hash is None and not block.is_null:
                for name in self.layers:
                    self.page(name, block.block_id)[:] = 0x6E

    def _state(self, name: str, spec: Any, blocks: list[int], tokens: list[int], begin: int, end: int) -> None:
        size = spec.state_content_size_bytes
        if begin:
            found = self.page(name, blocks[(begin - 1) // spec.block_size])[:size]
            assert torch.equal(found, left(name, tokens[:begin], size)), f"{name}: not the state of {begin} tokens"
        self.page(name, blocks[(end - 1) // spec.block_size])[:size] = left(name, tokens[:end], size)
        if self.align and spec.num_prefill_checkpoint_blocks:  # within the step such a layer leaves a state at a block's border too
            (offset,), (place,) = checkpoints(
                *([end], [end - begin], self.engine.caches.hash_block_size, spec.block_size, spec.prefill_checkpoint_alignment, False),
                self.engine.caches.cache_hit_alignment_tokens,
            )
            if offset:
                self.page(name, blocks[place])[:size] = left(name, tokens[: begin + offset], size)

    def _attention(self, name: str, spec: Any, blocks: list[int], tokens: list[int], begin: int, end: int) -> None:
        size = spec.page_size_bytes // spec.block_size
        place = torch.arange(end)[:, None]
        values = ((torch.tensor(tokens[:end])[:, None] * 7 + place * 13 + torch.arange(size)) % 113).to(torch.int8)
        items = [self.page(name, block).view(BLOCK, size) for block in blocks[: -(-end // BLOCK)]]
        assert torch.equal(torch.cat(items)[:begin], values[:begin]), f"{name}: not what {begin} tokens left"
        for at in range(begin, end):
            items[at // BLOCK][at % BLOCK] = values[at]

    def end(self) -> None:
        reports = self.worker.collect(False)
        self.failures += sorted(reports.failed)
        self.engine.update(self.outputs.pop(0), sent=reports.sent, received=reports.received, failed=reports.failed)

    def step(self) -> None:
        self.begin()
        self.agent.wait(0.002)
        if len(self.outputs) == self.ahead:
            self.end()


def run(*sides: Side) -> None:
    """Steps of all engines, until none has anything to do."""
    for _ in range(5000):
        if not any(side.outputs or side.engine.scheduler.has_requests() for side in sides):
            break
        for side in sides:
            if side.outputs and not side.engine.scheduler.has_requests():
                side.end()
            else:
                side.step()
    for side in sides:
        side.engine.nothing_is_left()
