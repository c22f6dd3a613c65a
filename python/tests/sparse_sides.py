"""Engines of a model with sparse attention, whose index is a cache of its own; with HiSparse the attention's cache lies in a pool
of the host. vLLM's own groups, tensors and scheduler, its HiSparse connector's scheduler side, the connector's two sides, and an
agent. Only the model and HiSparse's copies are played.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import like as vllm
import torch
from like import like
from vllm.config import HiSparseConfig
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import HiSparseConnectorMetadata, HiSparseConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.hisparse.binding import allocate_hisparse_kv_caches, resolve_hisparse_specs
from vllm.v1.hisparse.coordinator import get_hisparse_coordinator
from vllm.v1.hisparse.layout import HISPARSE_HOT_SUFFIX
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SparseCacheRole
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache, copy_kv_cache_blocks_inplace
from vllm_engine import BLOCK, Engine

import kvconn
from kvconn.vllm.groups import host_layers, transfer_groups
from kvconn.vllm.layout import Heads
from kvconn.vllm.worker import WorkerSide

BLOCKS, TOP = 160, 8  # TOP: the tokens that attention picks
AT = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 0, "tcp_listen_host": "127.0.0.1"}
HISPARSE = {"kv_connector": "HiSparseConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"host_pool_gib": 0.001}}


def latents_with_indexes() -> dict[str, Any]:
    """Two layers, each with an index, as DeepSeek V3.2 has them."""
    layers: dict[str, Any] = {}
    for n in range(2):
        latent: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
        layers[f"model.layers.{n}.attn"] = MLAAttentionSpec(**latent, is_index_group_leader=True)
        index: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "max_tp_shards": 1, "head_size": 36, "dtype": torch.uint8}
        layers[f"model.layers.{n}.indexer.k_cache"] = MLAAttentionSpec(**index, cache_role=SparseCacheRole.INDEXER)
    return layers


def latents_with_one_index() -> dict[str, Any]:
    """The second layer attends to what the first one's index has found."""
    layers = latents_with_indexes()
    del layers["model.layers.1.indexer.k_cache"]
    layers["model.layers.1.attn"] = replace(layers["model.layers.1.attn"], is_index_group_leader=False)
    return layers


def heads_with_one_index() -> dict[str, Any]:
    """A layer that attends to all tokens, and one of sparse attention, as MiniMax M3 has them: keys and values, no latents."""
    heads: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.bfloat16}
    index: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 18, "dtype": torch.bfloat16}
    return {
        "model.layers.0.attn": FullAttentionSpec(**heads),
        "model.layers.1.attn": FullAttentionSpec(**heads),
        "model.layers.1.indexer.k_cache": MLAAttentionSpec(**index, cache_role=SparseCacheRole.INDEXER),
    }


class Side:
    """One engine."""

    def __init__(
        self, model: Path, role: str, *, hisparse: bool = False, layers: Callable[[], dict[str, Any]] = latents_with_indexes, **more: Any
    ) -> None:
        self.hisparse = hisparse
        self.layers = layers()
        self.backends = {name: like(vllm.LAYER, get_attn_backend=lambda: FlashAttentionBackend) for name in self.layers}
        extra: dict[str, Any] = {"beside": [], "prepare": self._with_hisparse} if hisparse else {}
        self.engine = Engine(model, role, layers=self.layers, blocks=BLOCKS, **extra, **more)
        config, caches = self.engine.config, self.engine.caches
        config.compilation_config.static_forward_context = dict(self.backends)
        groups = caches.kv_cache_groups
        self.number = {name: number for number, group in enumerate(groups) for name in group.layer_names}
        sizes = [group.kv_cache_spec.block_size for group in groups]
        if hisparse:
            # vLLM's own pins the memory, which needs a GPU.
            pool = like("vllm.v1.hisparse.runtime:HiSparseHostPool", allocate=lambda size: torch.zeros(size, dtype=torch.int8))
            self.tensors = allocate_hisparse_kv_caches(caches, torch.device("cpu"), KVCacheLayout.BLHNC, sizes, pool)
            self.tensors = {name: tensor for name, tensor in self.tensors.items() if not name.endswith(HISPARSE_HOT_SUFFIX)}
        else:
            self.tensors = allocate_kv_cache(caches, torch.device("cpu"), KVCacheLayout.LBHNC)
        name = {"kv_producer": "prefill", "kv_consumer": "decode"}[role]
        self.agent = kvconn.Agent({"engine_id": f"engine-{name}", "role": name, "peer_timeout_s": 15, **(AT if name == "prefill" else {})})
        self.worker = WorkerSide(lambda: self.agent, 0.001, by_layers=True)
        self.worker.register(self.tensors, config, caches, Heads(1))
        self.failures: list[str] = []
        self.output: Any = None

    def _with_hisparse(self, config: Any, layers: dict[str, Any]) -> dict[str, Any]:
        """What vLLM finds from its own configuration on a GPU; on CPU it refuses that configuration."""
        config.kv_transfer_config.kv_connector_extra_config["connectors"].append(HISPARSE)
        config.attention_config.hisparse_config = HiSparseConfig()
        config.model_config.hf_config.index_topk = TOP
        config.cache_config.kv_cache_layout = "BLHNC"
        return resolve_hisparse_specs(config, layers, self.backends)

    def items(self, name: str) -> torch.Tensor:
        """A layer's cache by blocks, tokens and bytes."""
        tensor = self.tensors[name]
        return (tensor.squeeze(1) if tensor.dim() == 4 else tensor).view(torch.int8)

    def blocks(self, req_id: str, name: str) -> list[int]:
        return list(self.engine.scheduler.kv_cache_manager.get_block_ids(req_id)[self.number[name]])

    def pool(self, name: str) -> Any:
        manager = self.engine.scheduler.kv_cache_manager
        on_host = self.engine.caches.kv_cache_groups[self.number[name]].host_resident
        return get_hisparse_coordinator(manager).get_host_block_pool() if on_host else manager.block_pool

    def begin(self) -> None:
        """A step up to where its tokens are computed."""
        engine, scheduler = self.engine, self.engine.scheduler
        self.output = output = engine.schedule()
        meta = engine.metas[-1]
        self.worker.withdraw(meta)
        for load in meta.loads:  # no other request reads what a load writes to
            for number, ids in zip(transfer_groups(engine.caches), load.block_ids):
                pool = self.pool(engine.caches.kv_cache_groups[number].layer_names[0])
                assert all(pool.blocks[block].block_hash is None for block in ids), f"{load.req_id}: {ids} of group {number}"
        for name in self.layers:
            blocks = self.pool(name).blocks
            free = [each.block_id for each in blocks if each.ref_cnt == 0 and each.block_hash is None and not each.is_null]
            self.items(name)[free] = 0x6E
        self.worker.begin(meta)
        self.copies(output)
        for number, name in enumerate(self.layers):
            items = self.items(name)
            for req_id, scheduled in output.num_scheduled_tokens.items():
                request = scheduler.requests[req_id]
                tokens, end = [*request.all_token_ids, 7, 7], request.num_computed_tokens
                blocks = self.blocks(req_id, name)
                place = torch.arange(end)[:, None]
                sums = torch.tensor(tokens[:end])[:, None] * 7 + place * 13 + number * 29 + torch.arange(items.shape[-1])
                values = (sums % 97).to(torch.int8)
                for at in range(end):
                    row = items[blocks[at // BLOCK], at % BLOCK]
                    if at < end - scheduled:
                        assert torch.equal(row, values[at]), f"{name}: token {at} of {end - scheduled} of {req_id}"
                    else:
                        row[:] = values[at]
            self.worker.layer_written(name)
        self.worker.load(meta)
        self.worker.step_written()

    def copies(self, output: Any) -> None:
        """Plays what HiSparse's worker does: it has written rows to the host by the end of the step, and says so."""
        self.told: Any = None
        metas = getattr(output.kv_connector_metadata, "metadata", ())
        on_host = [self.tensors[name] for name in self.layers if name in host_layers(self.engine.caches)]
        for n, meta in enumerate(metas):
            if not isinstance(meta, HiSparseConnectorMetadata):
                continue
            copy_kv_cache_blocks_inplace(on_host, self.engine.caches.hisparse_host_num_blocks, meta.host_block_copies)
            counts = {each.transfer_id: 1 for each in (meta.command.page_transfers if meta.command else ())}
            copied = tuple(each.dst_block_id for each in meta.host_block_copies)
            if counts or copied:
                theirs = [None] * len(metas)
                theirs[n] = HiSparseConnectorWorkerMetadata(counts, counts, copied)
                self.told = MultiKVConnectorWorkerMetadata(tuple(theirs))

    def end(self) -> None:
        reports = self.worker.collect(False)
        self.failures += sorted(reports.failed)
        self.engine.update(self.output, sent=reports.sent, received=reports.received, failed=reports.failed, worker_meta=self.told)

    def step(self) -> None:
        self.begin()
        self.agent.wait(0.002)
        self.end()


def run(*sides: Side) -> None:
    """Steps of all engines, until none has anything to do."""
    for _ in range(3000):
        if not any(side.engine.scheduler.has_requests() for side in sides):
            break
        for side in sides:
            side.step()
