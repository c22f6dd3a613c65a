"""vLLM's real scheduler with the connector's scheduler side, as tests drive it; only the model and the other engine are played.

What vLLM asserts about a connector's reports ends an engine, so it ends these tests too.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm_sides import WatchedRecords

from kvconn.vllm.metadata import KVConnHandshake, KVConnMetadata

BLOCK, WINDOW, MAX_BATCHED = 16, 40, 64
numbers = itertools.count()
OURS = {"kv_connector": "KVConnConnector", "kv_connector_module_path": "kvconn.vllm"}
# It keeps what it has seen in host memory, and loads from there.
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20, "block_size": BLOCK},
}


def _spec(window: int, **spec: Any) -> Any:
    """The spec of a group: above 0 a window of so many tokens, below 0 attention in chunks of as many, 0 full attention."""
    if window < 0:
        return ChunkedLocalAttentionSpec(**spec, attention_chunk_size=-window)
    return SlidingWindowSpec(**spec, sliding_window=window) if window else FullAttentionSpec(**spec)


class Engine:
    """vLLM's scheduler and, for the worker, a list of what it has been told and has still to report."""

    def __init__(
        self,
        model: Path,
        role: str,
        *,
        policy: str = "fail",
        blocks: int = 64,
        hybrid: bool = False,
        windows: Sequence[int] = (),
        beside: list[dict[str, Any]] | None = None,
        seqs: int = 16,
        async_scheduling: bool = False,
        layers: dict[str, Any] | None = None,
        prefixes: bool = True,
        extra: dict[str, Any] | None = None,
        parallel: dict[str, int] | None = None,
        prepare: Callable[[Any, dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        """layers: of the model, with their specs; vLLM then makes the groups and the tensors. extra: kv_connector_extra_config.

        parallel: vLLM's options for the engine's sizes. prepare: changes the configuration before groups are made, and gives the layers.
        """
        one = {**OURS, "kv_role": role, "engine_id": f"engine-{role}", "kv_connector_extra_config": extra or {}}
        if beside is None:
            transfer = KVTransferConfig(**one, kv_load_failure_policy=policy)
        else:
            transfer = KVTransferConfig(
                kv_connector="MultiConnector",
                kv_role=role,
                engine_id=f"engine-{role}",
                kv_load_failure_policy=policy,
                kv_connector_extra_config={"connectors": [{k: v for k, v in one.items() if k != "engine_id"}, *beside]},
            )
        args = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=1024,
            max_num_batched_tokens=MAX_BATCHED,
            max_num_seqs=seqs,
            block_size=BLOCK,
            enable_prefix_caching=prefixes,
            kv_transfer_config=transfer,
            async_scheduling=async_scheduling,
            **(parallel or {}),
            # As the engine finds by itself when the connector is one that supports it.
            disable_hybrid_kv_cache_manager=False,
        )
        config = args.create_engine_config()
        self.block = BLOCK * config.parallel_config.decode_context_parallel_size  # tokens of the scheduler's blocks
        config.scheduler_config.async_scheduling = async_scheduling  # which the CPU's platform turns off
        if layers is None:
            caches = self._caches(config, blocks, windows or (0, WINDOW)[: 1 + hybrid])
        else:
            if any(isinstance(spec, MambaSpec) for spec in layers.values()):
                config.cache_config.mamba_cache_mode = "align" if prefixes else "none"
            config.cache_config.num_gpu_blocks_override, config.cache_config.kv_cache_layout = blocks, "LBHNC"
            caches = self._planned(config, prepare(config, layers) if prepare else layers)
            config.cache_config.num_gpu_blocks = blocks
            config.cache_config.block_size = min(group.kv_cache_spec.block_size for group in caches.kv_cache_groups)
        planned = kv_cache_utils.generate_scheduler_kv_cache_config([caches])  # the caches are a worker's
        whole, hashed = resolve_kv_cache_block_sizes(planned, config) if layers else (BLOCK, BLOCK)
        aligned = getattr(kv_cache_utils, "resolve_cache_hit_alignment_tokens", None)  # from 0.32 on
        hit = aligned(planned, config, whole, hashed) if layers and aligned else BLOCK
        for each in (caches, planned):
            each.hash_block_size, each.cache_hit_alignment_tokens = hashed, hit
        self.config, self.caches = config, caches
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(hashed, sha256)
        self.scheduler = (AsyncScheduler if async_scheduling else Scheduler)(
            config,
            planned,
            StructuredOutputManager(config),
            block_size=whole,
            hash_block_size=hashed,
            log_stats=True,
        )
        self.connector = self.scheduler.get_kv_connector()
        self.ours = self.connector if beside is None else self.connector.sub_connectors[0]
        self.ours._sched._requests = WatchedRecords()
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): KVConnHandshake("http://p:8998")})
        self.free = self.blocks_free()
        self.metas: list[KVConnMetadata] = []
        self.loading: dict[str, Any] = {}  # by request, until it is reported
        self.sending: dict[str, Any] = {}
        self.cancelled: list[str] = []
        self.announced: list[str] = []
        self.claimed: list[str] = []
        self.released: list[str] = []  # loads of nothing
        self.given: dict[str, list[list[int]]] = {}  # what the agent reads, or may read, of requests that are computed
        self.first: dict[str, list[int]] = {}  # per group, where in the prompt that begins
        self.ready: dict[str, list[int]] = {}  # of it, what is there
        self.withdrawn: list[str] = []
        self.outputs: dict[str, Any] = {}  # the last of each request
        self.texts: dict[str, list[int]] = {}

    @staticmethod
    def _planned(config: Any, layers: dict[str, Any]) -> KVCacheConfig:
        try:  # from 0.33 on the groups are planned first
            from vllm.v1.core import kv_cache_planning as planning

            more = [planning.get_global_kv_cache_groups(config, [layers])]
        except ImportError:
            planning, more = kv_cache_utils, []
        return planning.get_kv_cache_configs(config, [layers], [1 << 30], *more)[0]

    @staticmethod
    def _caches(config: Any, blocks: int, windows: Sequence[int]) -> KVCacheConfig:
        spec: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 16, "dtype": torch.bfloat16}
        groups = [KVCacheGroupSpec([f"layer.{n}"], _spec(window, **spec)) for n, window in enumerate(windows)]
        page = groups[0].kv_cache_spec.page_size_bytes
        config.cache_config.num_gpu_blocks = blocks
        tensor = KVCacheTensor(size=page * blocks, layers=[f"layer.{n}" for n in range(len(groups))], layer_stride=0, block_stride=page)
        return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[tensor], kv_cache_groups=groups, kv_cache_layout="LBHNC")

    def blocks_free(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(
        self,
        tokens: int | list[int],
        kv: dict[str, Any] | None,
        max_tokens: int = 4,
        resumable: bool = False,
        embeds: Any = None,
        mixed: bool = False,
        req_id: str = "",
        **more: Any,
    ) -> Request:
        prompt = tokens if isinstance(tokens, list) else [random.randrange(500) for _ in range(tokens)]
        sampling = SamplingParams(max_tokens=max_tokens, extra_args={"kv_transfer_params": kv} if kv is not None else None, **more)
        embeds: dict[str, Any] = {} if embeds is None else {"prompt_embeds": embeds}
        if mixed:
            embeds["prompt_is_token_ids"] = [n % 2 == 0 for n in range(len(prompt))]
        ids = None if embeds and not mixed else prompt
        request = Request(req_id or f"r{next(numbers)}", ids, sampling, None, block_hasher=self.hasher, resumable=resumable, **embeds)
        self.scheduler.add_request(request)
        return request

    def abort(self, *requests: Request) -> None:
        self.scheduler.finish_requests([r.request_id for r in requests], RequestStatus.FINISHED_ABORTED)

    def preempt(self) -> None:
        """Preempts the youngest request, as vLLM does for want of blocks."""
        request = self.scheduler.running.pop()
        self.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        self.scheduler._preempt_request(request, 0.0, drop_stale_output=True)

    def schedule(self) -> Any:
        output = self.scheduler.schedule()
        metas = getattr(output.kv_connector_metadata, "metadata", None) or [output.kv_connector_metadata]
        (meta,) = [each for each in metas if isinstance(each, KVConnMetadata)]
        self.metas.append(meta)
        self._give(output, meta)
        self.announced += meta.announces
        self.claimed += [work.transfer_id for work in meta.claims]
        self.released += [work.transfer_id for work in meta.loads if work.silent]
        self.loading |= {work.req_id: work for work in [*meta.loads, *meta.refusals] if getattr(work, "silent", False) is False}
        self.sending |= {work.req_id: work for work in meta.offers}
        self.cancelled += [work.transfer_id for work in meta.cancels]
        # Said now: another step may be scheduled before this one's tokens come.
        output.sampled = {req_id for req_id in output.num_scheduled_tokens if self._complete(req_id)}
        return output

    def _give(self, output: Any, meta: KVConnMetadata) -> None:
        """Takes partial offers as the agent does, and checks all that the agent relies on."""
        for transfer_id in meta.withdrawals:
            del self.given[transfer_id], self.ready[transfer_id], self.first[transfer_id]
            self.withdrawn.append(transfer_id)
        ids = {
            r.kv_transfer_params["transfer_id"]: r
            for r in self.scheduler.requests.values()
            if r.kv_transfer_params and r.kv_transfer_params.get("do_remote_decode") and "transfer_id" in r.kv_transfer_params
        }
        written = [set() for _ in self.scheduler.kv_cache_config.kv_cache_groups]  # by this step
        for req_id, scheduled in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[req_id]
            computed, first = request.num_computed_tokens, (request.num_computed_tokens - scheduled) // self.block
            if computed - scheduled >= request.num_prompt_tokens:  # it decodes, behind the prompt in the prompt's last block
                first = max(first, -(-request.num_prompt_tokens // self.block))
            for blocks, all_of_them in zip(written, self.scheduler.kv_cache_manager.get_block_ids(req_id)):
                blocks.update(all_of_them[first : -(-computed // self.block)])
        anybodys = set().union(*written)  # the groups have their blocks from one pool
        for transfer_id, held in self.given.items():  # what the agent reads
            for first, have, ready in zip(self.first[transfer_id], held, self.ready[transfer_id]):
                assert not anybodys & set(have[: max(0, ready - first)])
        for work in meta.partials:
            held = self.given.setdefault(work.transfer_id, [[] for _ in work.block_ids])
            firsts = self.first.setdefault(work.transfer_id, list(work.first_block))
            assert firsts == list(work.first_block)
            for have, more in zip(held, work.block_ids):
                have += more
            request = ids[work.transfer_id]
            computed = request.num_computed_tokens  # the step's counted already
            scheduled = output.num_scheduled_tokens[request.request_id]
            for first, have, before, after in zip(firsts, held, work.before, work.after):
                prompt = request.num_prompt_tokens
                assert not anybodys & set(have[: max(0, before - first)])
                assert before <= after <= first + len(have)
                assert before <= -(-(computed - scheduled) // self.block) and (
                    before * self.block <= computed - scheduled or computed - scheduled >= prompt
                )
                assert after * self.block <= computed or (computed >= prompt and after == -(-prompt // self.block))
                assert 0 not in have  # vLLM's null block
            self.ready[work.transfer_id] = list(work.after)
        offers = {work.transfer_id: work for work in meta.offers}
        for transfer_id in [*self.given]:
            if work := offers.get(transfer_id):
                for begin, have, first, all_of_them in zip(
                    self.first.pop(transfer_id), self.given.pop(transfer_id), work.first_block, work.block_ids
                ):
                    assert not have or (first == begin and all_of_them[: len(have)] == have)
                continue
            # It is still the request's own: in this step nobody else writes to it.
            owned = self.scheduler.kv_cache_manager.get_block_ids(ids[transfer_id].request_id)
            for first, have, blocks in zip(self.first[transfer_id], self.given[transfer_id], owned):
                assert list(blocks[first : first + len(have)]) == have

    def update(
        self,
        output: Any,
        sent: set[str] = frozenset(),
        received: set[str] = frozenset(),
        failed: set[str] = frozenset(),
        invalid: set[int] = frozenset(),
        worker_meta: Any = None,
    ) -> None:
        """Every request gets a token as soon as its whole prompt is computed."""
        ids = list(output.num_scheduled_tokens)
        sampled = [[7] if r in output.sampled else [] for r in ids]
        for req_id in sent:
            del self.sending[req_id]
        for req_id in received:
            del self.loading[req_id]
        told = KVConnectorOutput(
            finished_sending=set(sent), finished_recving=set(received), failed_recving=set(failed), invalid_block_ids=set(invalid)
        )
        told.kv_connector_worker_meta = worker_meta
        made = ModelRunnerOutput(
            ids,
            {r: n for n, r in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=told if sent or received or invalid or worker_meta else None,
        )
        for client in self.scheduler.update_from_output(output, made).values():
            for each in client.outputs:
                self.outputs[each.request_id] = each
                self.texts.setdefault(each.request_id, []).extend(each.new_token_ids)

    def _complete(self, req_id: str) -> bool:
        request = self.scheduler.requests.get(req_id)
        return request is not None and request.num_computed_tokens >= request.num_prompt_tokens

    def step(self, sent: set[str] = frozenset(), received: set[str] = frozenset(), failed: set[str] = frozenset()) -> Any:
        output = self.schedule()
        self.update(output, sent, received, failed)
        return output

    def run(self, until: Callable[[], bool], bound: int = 100) -> None:
        for _ in range(bound):
            if until():
                return
            self.step()
        raise AssertionError("not so after many steps")

    def finished(self, request: Request) -> bool:
        return request.is_finished()

    def nothing_is_left(self) -> None:
        """Every block is back, no request is known, and the engine may sleep."""
        self.run(lambda: not self.scheduler.finished_req_ids and not self.ours.has_pending_push_work(), 5)
        assert not self.scheduler.has_requests()
        assert not self.scheduler.requests
        assert self.blocks_free() == self.free
        assert self.ours._sched.in_flight() == (0, 0)
        assert not self.given and not self.ours._sched._partials.count
        assert not self.ours._sched._requests


def until(what: str, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline, f"not so: {what}"
        time.sleep(0.001)


def prefill_kv() -> dict[str, Any]:
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"t{next(numbers)}"}


def decode_kv() -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": f"t{next(numbers)}",
        "remote_bootstrap_addr": "http://p:8998",
        "remote_engine_id": "engine-p",
    }
