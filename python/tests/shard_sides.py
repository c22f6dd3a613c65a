"""Engines with decode context parallelism: vLLM's own scheduler, its slot mapping and its aggregation of the ranks' reports; for
each rank the connector's worker side with an agent. Only the model is played: on each rank it leaves in each layer's cache what
the rank's slots are for, and checks what it finds there before it goes on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import like as vllm
import torch
import triton.language
from like import like
from triton.runtime.interpreter import InterpretedFunction
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker import block_table
from vllm.v1.worker.utils import allocate_kv_cache, copy_kv_cache_blocks_inplace
from vllm_engine import BLOCK, Engine

import kvconn
from kvconn.vllm.groups import is_dealt, layer_specs
from kvconn.vllm.layout import Heads, make_regions, regions_by_layer
from kvconn.vllm.params import Rank, agent_config
from kvconn.vllm.shards import Shard
from kvconn.vllm.worker import WorkerSide

BLOCKS, NOTHING = 96, -1  # NOTHING: vLLM's slot of a token that another rank has
AT = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 0, "tcp_listen_host": "127.0.0.1"}
FREE = {"prefill": 0x70, "decode": 0x6E}  # in blocks that are no request's

# vLLM's CPU build runs another kernel in this one's place, which knows no DCP. Triton's interpreter needs no GPU.
block_table.tl = triton.language
_slot_mapping = InterpretedFunction(getattr(block_table.ComputeSlotMappingKernel.kernel, "fn", block_table.ComputeSlotMappingKernel.kernel))


def model_of(where: Path, kv_heads: int) -> Path:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": kv_heads, "vocab_size": 512}
    (where / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096, "torch_dtype": "bfloat16"}))
    return where


def layers_of(kv_heads: int) -> dict[str, Any]:
    """Of a rank: two layers of one of the model's heads; of a model of one head, two of latents."""
    if kv_heads > 1:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)
        return {"model.layers.0.self_attn": spec, "model.layers.1.self_attn": spec}
    latent = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    return {"model.layers.0.self_attn": latent, "model.layers.1.self_attn": latent}


class OfRank:
    """One rank's caches, agent and worker side."""

    def __init__(self, side: Side, tp_rank: int, tp_size: int, interleave: int, kv_heads: int, join: str | None) -> None:
        engine, caches = side.engine, side.engine.caches
        dcp = engine.config.parallel_config.decode_context_parallel_size
        self.interleave, self.dcp = interleave, dcp
        self.rank = tp_rank % dcp  # vLLM's groups are of ranks that come one after the other; another test compares that
        self.head = tp_rank // (tp_size // kv_heads) if tp_size > kv_heads else 0  # as QKVParallelLinear deals heads out
        self.tensors = allocate_kv_cache(caches, torch.device("cpu"), KVCacheLayout.LBHNC)
        blocks = tuple(group.kv_cache_spec.block_size if is_dealt(group.kv_cache_spec) else 0 for group in caches.kv_cache_groups)
        shard = Shard(self.rank, dcp, interleave, blocks) if dcp > 1 else Shard()
        self.agent = kvconn.Agent(
            {
                **agent_config(engine.config, caches, Rank(tp_rank, tp_size), shard=shard),
                **{"engine_id": f"engine-{side.name}", "peer_timeout_s": 15},
                **({} if side.name == "decode" else {"tcp_listen_host": "127.0.0.1", "bootstrap_join": join} if join else AT),
            }
        )
        heads = Heads(kv_heads, tp_rank, tp_size)
        regions = make_regions(self.tensors, engine.config, caches, kvconn.regions_from_tensor, heads, shard)
        self.names = [region.name for region in regions]
        self.agent.register_kv_caches(regions)
        self.worker = WorkerSide(lambda: self.agent, 0.001, by_layers=True, shard=shard)
        self.worker.follow_layers(regions_by_layer(self.tensors, regions))

    def items(self, name: str) -> torch.Tensor:
        """A layer's cache by blocks, tokens and bytes; a rank has one head."""
        tensor = self.tensors[name]
        return (tensor.squeeze(1) if tensor.dim() == 4 else tensor).view(torch.int8)

    def slots(self, blocks: list[int], begin: int, end: int) -> list[int]:
        """Where vLLM has these tokens of a request with these blocks."""
        table, out = torch.tensor([blocks], dtype=torch.int32), torch.full((2048,), -7, dtype=torch.int64)
        count = end - begin
        _slot_mapping[(2,)](
            *(count, len(out), torch.tensor([0, count], dtype=torch.int32), torch.arange(begin, end), table, table.stride(0), out),
            **{"KV_CACHE_BLOCK_SIZE": BLOCK, "TOTAL_CP_WORLD_SIZE": self.dcp, "TOTAL_CP_RANK": self.rank},
            **{"CP_KV_CACHE_INTERLEAVE_SIZE": self.interleave, "PAD_ID": NOTHING, "BLOCK_SIZE": 1024},
        )
        return out[:count].tolist()


class Side:
    """One engine."""

    def __init__(self, model: Path, role: str, *, tp: int, dcp: int, interleave: int, kv_heads: int, **more: Any) -> None:
        parallel = {"tensor_parallel_size": tp, "decode_context_parallel_size": dcp, "cp_kv_cache_interleave_size": interleave}
        named = {"model": "without weights"}  # by which agents compare what has no fingerprint
        self.engine = Engine(model, role, layers=layers_of(kv_heads), blocks=BLOCKS, parallel=parallel, extra=named, **more)
        self.name = {"kv_producer": "prefill", "kv_consumer": "decode"}[role]
        layer = like(vllm.LAYER, get_attn_backend=lambda: FlashAttentionBackend)
        self.layers = {name: place for name, place, _ in layer_specs(self.engine.caches)}
        self.engine.config.compilation_config.static_forward_context = dict.fromkeys(self.layers, layer)
        self.ranks: list[OfRank] = []
        for rank in range(tp):
            join = self.ranks[0].agent.bootstrap_address if self.ranks and self.name == "prefill" else None
            self.ranks.append(OfRank(self, rank, tp, interleave, kv_heads, join))
        self.reports = KVOutputAggregator(tp)
        self.output: Any = None
        self.failures: list[str] = []
        self.loaded: set[str] = set()  # requests whose first step is still to come
        self._overwrite_free()

    @staticmethod
    def values(layer: int, head: int, tokens: list[int], size: int) -> torch.Tensor:
        place = torch.arange(len(tokens))[:, None]
        return ((torch.tensor(tokens)[:, None] * 7 + place * 13 + layer * 29 + head * 31 + torch.arange(size)) % 97).to(torch.int8)

    def begin(self) -> None:
        """A step up to where its tokens are computed."""
        engine, scheduler = self.engine, self.engine.scheduler
        self.output = output = engine.schedule()
        meta = engine.metas[-1]
        for rank in self.ranks:
            rank.worker.withdraw(meta)
        self._overwrite_free()
        for rank in self.ranks:
            rank.worker.begin(meta)
            copy_kv_cache_blocks_inplace(rank.tensors.values(), engine.caches.num_blocks, output.kv_cache_block_copies or ())
            for number, (name, place) in enumerate(self.layers.items()):
                for req_id, scheduled in output.num_scheduled_tokens.items():
                    request = scheduler.requests[req_id]
                    self._layer(rank, number, name, scheduler.kv_cache_manager.get_block_ids(req_id)[place], request, scheduled)
                rank.worker.layer_written(name)
            rank.worker.load(meta)
            rank.worker.step_written()
        self.loaded -= output.num_scheduled_tokens.keys()

    def _overwrite_free(self) -> None:
        """What no request has, and no prefix that vLLM may find again."""
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        free = [block.block_id for block in pool.blocks if block.ref_cnt == 0 and block.block_hash is None and not block.is_null]
        for rank in self.ranks:
            for name in self.layers:
                rank.items(name)[free] = FREE[self.name]

    def _layer(self, rank: OfRank, number: int, name: str, blocks: list[int], request: Any, scheduled: int) -> None:
        end = request.num_computed_tokens
        begin = end - scheduled
        items = rank.items(name)
        values = self.values(number, rank.head, [*request.all_token_ids, 7, 7][:end], items.shape[-1])
        mine = [(at, slot) for at, slot in enumerate(rank.slots(blocks, 0, end)) if slot != NOTHING]
        for at, slot in mine:
            block, offset = divmod(slot, BLOCK)
            if at < begin:
                assert torch.equal(items[block, offset], values[at]), f"{name}: token {at} of {begin} on rank {rank.rank} of {rank.dcp}"
            else:
                items[block, offset] = values[at]
        if request.request_id in self.loaded and not any(slot // BLOCK == blocks[-1] for _, slot in mine):
            assert (items[blocks[-1]] == FREE[self.name]).all(), f"{name}: rank {rank.rank} has none of the tokens of block {blocks[-1]}"

    def end(self) -> None:
        told = []
        for rank in self.ranks:
            report = rank.worker.collect(False)
            output = KVConnectorOutput(finished_sending=report.sent, finished_recving=report.received, failed_recving=report.failed)
            told.append(ModelRunnerOutput([], {}, kv_connector_output=output))
        one = self.reports.aggregate(told).kv_connector_output
        sent, received, failed = (set(each or ()) for each in (one.finished_sending, one.finished_recving, one.failed_recving))
        self.failures += sorted(failed)
        self.loaded |= received - failed
        self.engine.update(self.output, sent=sent, received=received, failed=failed)
        self.output = None
        self._overwrite_free()

    def step(self) -> None:
        self.begin()
        self.ranks[0].agent.wait(0.002)
        self.end()

    def close(self) -> None:
        for rank in reversed(self.ranks):
            rank.agent.close()


def run(*sides: Side) -> None:
    """Steps of all engines, until none has anything to do."""
    for _ in range(3000):
        if not any(side.engine.scheduler.has_requests() for side in sides):
            break
        for side in sides:
            side.step()
    for side in sides:
        side.engine.nothing_is_left()
