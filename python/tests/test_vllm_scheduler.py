"""The connector's scheduler side under vLLM's real scheduler; only the model and the other engine are played.

What vLLM asserts about a connector's reports ends an engine, so it ends these tests too.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm_sides import WatchedRecords

from kvconn import fingerprint
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
    """Of a group: a window of so many tokens, attention in chunks of as many if less than none, all if 0."""
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
    ) -> None:
        one = {**OURS, "kv_role": role, "engine_id": f"engine-{role}"}
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
            enable_prefix_caching=True,
            kv_transfer_config=transfer,
            async_scheduling=async_scheduling,
            # As the engine finds by itself when the connector is one that supports it.
            disable_hybrid_kv_cache_manager=False,
        )
        config = args.create_engine_config()
        spec: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 16, "dtype": torch.bfloat16}
        groups = [KVCacheGroupSpec([f"layer.{n}"], _spec(window, **spec)) for n, window in enumerate(windows or (0, WINDOW)[: 1 + hybrid])]
        page = groups[0].kv_cache_spec.page_size_bytes
        config.cache_config.num_gpu_blocks = blocks
        tensor = KVCacheTensor(size=page * blocks, layers=[f"layer.{n}" for n in range(len(groups))], layer_stride=0, block_stride=page)
        caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[tensor], kv_cache_groups=groups, kv_cache_layout="LBHNC")
        caches.hash_block_size = BLOCK
        caches.cache_hit_alignment_tokens = BLOCK
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = (AsyncScheduler if async_scheduling else Scheduler)(
            config,
            caches,
            StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
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
        **more: Any,
    ) -> Request:
        prompt = tokens if isinstance(tokens, list) else [random.randrange(500) for _ in range(tokens)]
        sampling = SamplingParams(max_tokens=max_tokens, extra_args={"kv_transfer_params": kv} if kv is not None else None, **more)
        embeds: dict[str, Any] = {} if embeds is None else {"prompt_embeds": embeds}
        if mixed:
            embeds["prompt_is_token_ids"] = [n % 2 == 0 for n in range(len(prompt))]
        ids = None if embeds and not mixed else prompt
        request = Request(f"r{next(numbers)}", ids, sampling, None, block_hasher=self.hasher, resumable=resumable, **embeds)
        self.scheduler.add_request(request)
        return request

    def abort(self, *requests: Request) -> None:
        self.scheduler.finish_requests([r.request_id for r in requests], RequestStatus.FINISHED_ABORTED)

    def preempt(self) -> None:
        """The youngest one, as for want of blocks."""
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
        """As the agent does, with all that it relies on looked at."""
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
            computed, first = request.num_computed_tokens, (request.num_computed_tokens - scheduled) // BLOCK
            if computed - scheduled >= request.num_prompt_tokens:  # it decodes, behind the prompt in the prompt's last block
                first = max(first, -(-request.num_prompt_tokens // BLOCK))
            for blocks, all_of_them in zip(written, self.scheduler.kv_cache_manager.get_block_ids(req_id)):
                blocks.update(all_of_them[first : -(-computed // BLOCK)])
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
                assert before <= -(-(computed - scheduled) // BLOCK) and (
                    before * BLOCK <= computed - scheduled or computed - scheduled >= prompt
                )
                assert after * BLOCK <= computed or (computed >= prompt and after == -(-prompt // BLOCK))
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
        made = ModelRunnerOutput(
            ids,
            {r: n for n, r in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=told if sent or received or invalid else None,
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


@pytest.fixture
def make(model: Path) -> Any:
    return lambda role, **more: Engine(model, role, **more)


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


# -- prefill --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hybrid", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("tokens", [1, BLOCK, 100, 300])
def test_chunked_prefill_is_offered_whole(make: Any, tokens: int, hybrid: bool) -> None:
    engine = make("kv_producer", hybrid=hybrid)
    kv = prefill_kv()
    request = engine.add(tokens, kv, max_tokens=1)
    engine.run(lambda: engine.finished(request))
    # All was sent while it was computed; of the window, what is kept of it until the prompt's end.
    total = -(-tokens // BLOCK)
    assert engine.ready[kv["transfer_id"]] == [total] * (1 + hybrid)
    assert engine.first[kv["transfer_id"]] == [0, max(0, tokens - WINDOW) // BLOCK][: 1 + hybrid]
    assert [len(have) for have in engine.given[kv["transfer_id"]]] == [total - first for first in engine.first[kv["transfer_id"]]]
    assert engine.announced == [kv["transfer_id"]]  # with the first chunk, not with each
    answer = engine.outputs[request.request_id].kv_transfer_params
    assert answer["remote_bootstrap_addr"] == "http://p:8998" and answer["remote_engine_id"] == "engine-kv_producer"
    assert (answer["transfer_id"], answer["remote_num_tokens"]) == (kv["transfer_id"], tokens)
    assert engine.scheduler.has_requests()  # an idle engine steps on
    engine.step()
    (offer,) = engine.sending.values()
    assert len(offer.block_ids[0]) == total and offer.first_block[0] == 0
    if hybrid:
        assert offer.first_block[1] == max(0, tokens - WINDOW) // BLOCK
        assert len(offer.block_ids[1]) == total - offer.first_block[1]
    assert engine.blocks_free() < engine.free
    engine.step(sent={request.request_id})
    engine.nothing_is_left()


def test_window_whose_far_end_would_be_lost(make: Any) -> None:
    """The last token of such a prompt is what would cost a block that the decode engine needs."""
    engine = make("kv_producer", hybrid=True)
    tokens = WINDOW - 1 + 5 * BLOCK
    request = engine.add(tokens, prefill_kv(), max_tokens=1)
    engine.run(lambda: engine.finished(request))
    assert engine.outputs[request.request_id].kv_transfer_params["remote_num_tokens"] == tokens
    engine.step()
    (offer,) = engine.sending.values()
    assert offer.first_block[1] == (tokens - WINDOW) // BLOCK == 4
    engine.step(sent={request.request_id})
    engine.nothing_is_left()


@pytest.mark.parametrize("mixed", [False, True])
def test_window_of_a_prompt_that_cannot_be_cut(make: Any, mixed: bool) -> None:
    """Embeddings: its last token costs a block that the decode engine needs, which must not be sent while that is computed."""
    engine = make("kv_producer", hybrid=True)
    tokens, kv = WINDOW - 1 + 5 * BLOCK, prefill_kv()
    request = engine.add(tokens, kv, max_tokens=1, embeds=torch.zeros(tokens, 32), mixed=mixed)
    assert request.num_prompt_tokens == tokens  # not one more of the embeddings than there are tokens
    while not engine.finished(request):
        engine.step()
        assert engine.ready[kv["transfer_id"]][1] == 0 and not engine.given[kv["transfer_id"]][1]
    engine.step()
    assert engine.cancelled == engine.withdrawn == [kv["transfer_id"]] and not engine.sending
    engine.nothing_is_left()


def test_prefill_with_few_blocks(make: Any) -> None:
    engine = make("kv_producer", blocks=21)
    requests = [engine.add(150, prefill_kv(), max_tokens=1) for _ in range(4)]
    for _ in range(200):
        output = engine.step()
        if not output.total_num_scheduled_tokens and engine.sending:
            engine.step(sent={next(iter(engine.sending))})
        if all(map(engine.finished, requests)):
            break
    while engine.sending or engine.ours.has_pending_push_work():
        engine.step(sent=set(list(engine.sending)[:1]))
    assert len(engine.announced) == len(set(engine.announced)) == 4
    engine.nothing_is_left()


def test_preempted_prefill_is_offered_once_with_its_new_blocks(make: Any) -> None:
    engine = make("kv_producer")
    request = engine.add(200, prefill_kv(), max_tokens=1)
    engine.step()
    assert request.status == RequestStatus.RUNNING and engine.given
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.status == RequestStatus.PREEMPTED
    engine.run(lambda: engine.finished(request))
    assert engine.withdrawn == [request.kv_transfer_params["transfer_id"]] and engine.given
    engine.step()
    (offer,) = engine.sending.values()
    assert len(set(offer.block_ids[0])) == 13
    assert engine.announced == [offer.transfer_id] and not engine.cancelled
    engine.step(sent={request.request_id})
    engine.nothing_is_left()


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_prefix_that_the_same_step_computes_is_not_there_before_it(make: Any, async_scheduling: bool) -> None:
    """vLLM counts a prompt's blocks as cached once they are scheduled: another request may have them in that very step."""
    engine = make("kv_producer", async_scheduling=async_scheduling)
    prompt = [n % 500 for n in range(3 * BLOCK)]
    requests = [engine.add([*prompt, *more], prefill_kv(), max_tokens=1) for more in ([1], [2, 3], [4, 5])]
    engine.step()
    first, *others = engine.metas[-1].partials
    assert [work.block_ids[0][:3] for work in others] == [first.block_ids[0][:3]] * 2
    assert first.after == others[0].after == [4]
    engine.run(lambda: len(engine.sending) == 3)
    engine.step(sent={request.request_id for request in requests})
    engine.nothing_is_left()


@pytest.mark.parametrize("hybrid", [False, True])
def test_prompt_is_said_of_each_half(make: Any, hybrid: bool) -> None:
    """The same number by P, which may cut the prompt, and by D; by P also when it begins anew with other blocks."""
    engine, other = make("kv_producer", hybrid=hybrid), make("kv_consumer", hybrid=hybrid)
    for tokens in (WINDOW + BLOCK, MAX_BATCHED * 2 + 1, WINDOW + 2 * BLOCK - 1):
        prompt = [random.randrange(500) for _ in range(tokens)]
        want = fingerprint(prompt)
        request = engine.add(list(prompt), prefill_kv(), max_tokens=1)
        engine.step()
        if not engine.finished(request):
            engine.preempt()
        engine.run(lambda request=request: engine.finished(request))
        engine.step()
        assert {work.prompt for meta in engine.metas for work in [*meta.partials, *meta.offers]} == {want}
        engine.step(sent={request.request_id})
        engine.metas.clear()
        loads = other.add(list(prompt), decode_kv())
        other.step()
        (load,) = other.loading.values()
        assert load.prompt == want
        other.step(received={loads.request_id})
        other.run(lambda loads=loads: other.finished(loads))
    engine.nothing_is_left()
    other.nothing_is_left()


def test_prompt_of_which_tokens_do_not_say_what_it_is(make: Any) -> None:
    engine, other = make("kv_producer"), make("kv_consumer")
    for more in ({"resumable": True}, {"embeds": torch.zeros(2 * BLOCK, 32)}, {"embeds": torch.zeros(2 * BLOCK, 32), "mixed": True}):
        request = engine.add(2 * BLOCK, prefill_kv(), max_tokens=1, **more)
        if "resumable" in more:  # and this was the session's last word
            engine.scheduler.add_request(Request(request.request_id, [], request.sampling_params, None))
        engine.run(lambda request=request: engine.finished(request))
        engine.step()
        assert [work.prompt for work in engine.sending.values()] == [0]
        assert {work.prompt for meta in engine.metas for work in meta.partials} <= {0}
        engine.step(sent={request.request_id})
        engine.metas.clear()
        loads = other.add(2 * BLOCK, decode_kv(), **more)
        other.step()
        (load,) = other.loading.values()
        assert load.prompt == 0
        other.step(received={loads.request_id})
        other.abort(loads)
        other.step()
    engine.nothing_is_left()
    other.nothing_is_left()


def test_session_has_no_partial_offers(make: Any) -> None:
    """Its prompt is what has come of it so far: the last block of that is filled up later."""
    engine = make("kv_producer")
    request = engine.add(BLOCK + 1, prefill_kv(), max_tokens=1, resumable=True)
    engine.step()
    assert request.num_computed_tokens == BLOCK + 1 and not engine.given
    engine.abort(request)
    engine.nothing_is_left()


def test_prefix_that_another_connector_loaded_badly_is_taken_back(make: Any) -> None:
    """It told so when the blocks were being sent already; vLLM computes them in place."""
    engine = make("kv_producer", policy="recompute")
    request = engine.add(200, prefill_kv(), max_tokens=1)
    engine.step()
    output = engine.schedule()
    (held,) = engine.given[request.kv_transfer_params["transfer_id"]]
    engine.update(output, invalid={held[1]})
    assert request.num_computed_tokens == BLOCK
    engine.run(lambda: engine.finished(request))
    assert engine.withdrawn == [request.kv_transfer_params["transfer_id"]]
    engine.step()
    engine.step(sent={request.request_id})
    engine.nothing_is_left()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_prefill_aborted(make: Any, steps: int) -> None:
    """Before admission, and between its chunks: the decode engine is told, and nothing stays."""
    engine = make("kv_producer")
    kv = prefill_kv()
    request = engine.add(300, kv, max_tokens=1)
    for _ in range(steps):
        engine.step()
    engine.abort(request)
    engine.step()
    assert engine.cancelled == [kv["transfer_id"]]
    assert engine.withdrawn == [kv["transfer_id"]] * (steps > 0)
    assert not engine.sending
    engine.nothing_is_left()


def test_prefill_aborted_after_its_end_is_still_sent(make: Any) -> None:
    engine = make("kv_producer")
    request = engine.add(20, prefill_kv(), max_tokens=1)
    engine.run(lambda: engine.finished(request))
    engine.abort(request)
    engine.step()
    engine.step(sent={request.request_id})
    engine.nothing_is_left()


# -- decode ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hybrid", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("tokens", [2, BLOCK, BLOCK + 1, 100, WINDOW - 1 + 5 * BLOCK])
def test_load_then_decode(make: Any, tokens: int, hybrid: bool) -> None:
    engine = make("kv_consumer", hybrid=hybrid)
    kv = decode_kv()
    request = engine.add(tokens, kv)
    engine.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    (load,) = engine.loading.values()
    loaded = tokens - hybrid
    assert load.num_tokens == loaded and load.first_block[0] == 0
    assert len(load.block_ids[0]) == -(-loaded // BLOCK)
    if hybrid:
        assert load.first_block[1] == max(0, loaded - WINDOW + 1) // BLOCK
        assert 0 not in load.block_ids[1]
    engine.step()
    assert len(engine.metas[-1].loads) == 0
    engine.step(received={request.request_id})
    output = engine.step()
    assert output.num_scheduled_tokens == {request.request_id: 1}  # the last token only
    engine.run(lambda: engine.finished(request))
    assert len(engine.texts[request.request_id]) == 4
    engine.nothing_is_left()


def test_cached_prefix_of_a_hybrid_model(make: Any) -> None:
    engine = make("kv_consumer", hybrid=True)
    prompt = [random.randrange(500) for _ in range(200)]
    here = engine.add(prompt, None, max_tokens=1)
    engine.run(lambda: engine.finished(here))
    request = engine.add(prompt + [1] * 40, decode_kv())
    engine.step()
    load = engine.loading[request.request_id]
    assert load.first_block == [12, 12]  # the window begins in the prefix
    assert [len(ids) for ids in load.block_ids] == [3, 3]
    engine.step(received={request.request_id})
    engine.run(lambda: engine.finished(request))
    engine.nothing_is_left()


def test_asking_twice_has_no_effect(make: Any) -> None:
    engine = make("kv_consumer")
    request = engine.add(100, decode_kv())
    before = len(engine.ours._sched._new_claims)
    assert [engine.connector.get_num_new_matched_tokens(request, 16) for _ in range(3)] == [(84, True)] * 3
    assert len(engine.ours._sched._new_claims) == before == 1
    assert request.kv_transfer_params["do_remote_prefill"] is True
    engine.abort(request)
    engine.nothing_is_left()


def test_prompt_logprobs_compute_the_prompt_here(make: Any) -> None:
    """vLLM asks us, and then loads nothing: the prefill engine must hear that it may free. Before 0.31 it loads."""
    engine = make("kv_consumer")
    kv = decode_kv()
    request = engine.add(100, kv, skip_reading_prefix_cache=True)
    engine.step()
    loaded = set(engine.loading)
    engine.step(received=loaded)
    engine.run(lambda: engine.finished(request))
    assert engine.released == ([] if loaded else [kv["transfer_id"]]) and not engine.loading
    engine.nothing_is_left()


def test_decode_preempted_after_its_load_loads_no_more(make: Any) -> None:
    engine = make("kv_consumer")
    request = engine.add(100, decode_kv(), max_tokens=8)
    engine.step()
    engine.step(received={request.request_id})
    engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.status == RequestStatus.PREEMPTED
    engine.run(lambda: engine.finished(request))
    assert len(engine.texts[request.request_id]) == 8
    assert sum(len(meta.loads) for meta in engine.metas) == 1 and not engine.released
    engine.nothing_is_left()


def test_decode_aborted_before_admission(make: Any) -> None:
    engine = make("kv_consumer", seqs=1)
    first, kv = engine.add(40, None, max_tokens=30), decode_kv()
    engine.step()
    queued = engine.add(100, kv)
    engine.step()
    assert engine.claimed == [kv["transfer_id"]]
    engine.abort(queued)
    engine.step()
    assert engine.released == [kv["transfer_id"]] and not engine.loading
    engine.abort(first)
    engine.nothing_is_left()


def test_request_that_vllm_rejects_before_it_begins(make: Any) -> None:
    """vLLM then adds a request of one token and aborts it, so that the connector lets the prefill engine go."""
    engine = make("kv_consumer")
    kv = decode_kv()
    engine.abort(engine.add([0], kv, max_tokens=1))
    engine.step()
    assert engine.released == [kv["transfer_id"]]
    engine.nothing_is_left()


def test_decode_aborted_during_its_load(make: Any) -> None:
    engine = make("kv_consumer")
    kv = decode_kv()
    request = engine.add(100, kv)
    engine.step()
    engine.abort(request)
    assert engine.blocks_free() < engine.free  # bytes may still land
    engine.step()
    assert engine.cancelled == [kv["transfer_id"]]
    engine.step()
    assert engine.blocks_free() < engine.free
    engine.step(received={request.request_id}, failed={request.request_id})
    engine.nothing_is_left()


def test_decode_aborted_in_the_step_that_loads(make: Any) -> None:
    engine = make("kv_consumer")
    request = engine.add(100, decode_kv())
    output = engine.schedule()
    engine.abort(request)
    engine.update(output)
    engine.step()
    engine.step(received={request.request_id}, failed={request.request_id})
    engine.nothing_is_left()


def test_decode_aborted_while_the_report_is_under_way(make: Any) -> None:
    engine = make("kv_consumer")
    request = engine.add(100, decode_kv())
    engine.step()
    output = engine.schedule()
    engine.abort(request)
    engine.update(output, received={request.request_id})
    engine.step()  # the cancel of a load that has ended
    engine.nothing_is_left()


def test_decode_aborted_between_its_report_and_its_first_token(make: Any) -> None:
    engine = make("kv_consumer")
    request = engine.add(100, decode_kv())
    engine.step()
    engine.step(received={request.request_id})
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.abort(request)
    engine.step()
    assert not engine.cancelled
    engine.nothing_is_left()


@pytest.mark.parametrize("hybrid", [False, True], ids=["one group", "two groups"])
def test_failed_load_by_the_policy_fail(make: Any, hybrid: bool) -> None:
    engine = make("kv_consumer", hybrid=hybrid)
    bad, good = engine.add(100, decode_kv()), engine.add(100, decode_kv())
    engine.step()
    engine.step(received={bad.request_id}, failed={bad.request_id})
    assert bad.status == RequestStatus.FINISHED_ERROR
    assert str(engine.outputs[bad.request_id].finish_reason) == "error"
    engine.step(received={good.request_id})
    engine.run(lambda: engine.finished(good))
    engine.nothing_is_left()


@pytest.mark.parametrize("hybrid", [False, True], ids=["one group", "two groups"])
def test_failed_load_by_the_policy_recompute(make: Any, hybrid: bool) -> None:
    engine = make("kv_consumer", policy="recompute", hybrid=hybrid)
    request = engine.add(100, decode_kv())
    engine.step()
    engine.step(received={request.request_id}, failed={request.request_id})
    engine.run(lambda: engine.finished(request))
    assert len(engine.texts[request.request_id]) == 4
    assert sum(len(meta.loads) for meta in engine.metas) == 1
    engine.nothing_is_left()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("hybrid", [False, True], ids=["one group", "two groups"])
def test_params_without_sense_end_by_the_policy(make: Any, policy: str, hybrid: bool) -> None:
    engine = make("kv_consumer", policy=policy, hybrid=hybrid)
    request = engine.add(100, {"do_remote_prefill": True})
    engine.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.step(received={request.request_id}, failed={request.request_id})
    engine.run(lambda: engine.finished(request))
    assert (request.status == RequestStatus.FINISHED_ERROR) == (policy == "fail")
    engine.nothing_is_left()


def test_worker_aggregation_reports_each_request_once() -> None:
    """Every rank's worker reports each request; vLLM counts to the number of workers, which is what None stands for."""
    aggregate = KVOutputAggregator(2).aggregate

    def said(received: set[str], failed: set[str]) -> Any:
        return ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(finished_recving=received, failed_recving=failed))

    assert aggregate([said({"a"}, {"a"}), said(set(), set())]).kv_connector_output.finished_recving is None
    told = aggregate([said(set(), set()), said({"a"}, set())]).kv_connector_output
    assert told.finished_recving == {"a"} and told.failed_recving == {"a"}


# -- both roles, and beside another connector ---------------------------------------------------------------------------


def test_one_engine_of_both_roles(make: Any) -> None:
    engine = make("kv_both")
    one, two = engine.add(50, prefill_kv(), max_tokens=1), engine.add(90, decode_kv())
    engine.step()
    assert list(engine.loading) == [two.request_id]
    engine.run(lambda: engine.finished(one))
    engine.step()
    engine.step(sent={one.request_id}, received={two.request_id})
    engine.run(lambda: engine.finished(two))
    engine.nothing_is_left()


def test_engine_that_loads_from_itself(make: Any) -> None:
    """A router may pick the same engine for both halves; they share a transfer id."""
    engine = make("kv_both")
    kv = prefill_kv()
    one = engine.add(100, kv, max_tokens=1)
    two = engine.add(100, {**decode_kv(), "transfer_id": kv["transfer_id"]})
    engine.run(lambda: engine.finished(one))
    engine.step()
    assert set(engine.sending) == {one.request_id} and set(engine.loading) == {two.request_id}
    engine.step(sent={one.request_id}, received={two.request_id})
    engine.run(lambda: engine.finished(two))
    engine.nothing_is_left()


def test_reset_cache_says_what_is_under_way(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = make("kv_consumer")
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    request = engine.add(100, decode_kv())
    engine.step()
    assert not engine.scheduler.reset_connector_cache()
    engine.step(received={request.request_id})
    engine.run(lambda: engine.finished(request))
    assert engine.scheduler.reset_connector_cache()
    engine.nothing_is_left()


def test_beside_another_connector(make: Any) -> None:
    """The first that has the tokens loads them; the other hears of the blocks and must not load as well."""
    engine = make("kv_consumer", beside=[OFFLOADING])
    request = engine.add(100, decode_kv())
    engine.step()
    assert list(engine.loading) == [request.request_id]
    engine.step(received={request.request_id})
    engine.run(lambda: engine.finished(request))
    assert len(engine.texts[request.request_id]) == 4
    assert engine.scheduler.reset_connector_cache()
    nothing_of_ours_is_left(engine, request)


def test_prefill_beside_another_connector(make: Any) -> None:
    engine = make("kv_producer", beside=[OFFLOADING])
    request = engine.add(100, prefill_kv(), max_tokens=1)
    engine.run(lambda: engine.finished(request))
    assert engine.outputs[request.request_id].kv_transfer_params["remote_bootstrap_addr"] == "http://p:8998"
    engine.step()
    assert list(engine.sending) == [request.request_id]
    engine.step(sent={request.request_id})
    nothing_of_ours_is_left(engine, request)


def nothing_of_ours_is_left(engine: Engine, request: Request) -> None:
    """What the other one stores has no worker here that ends it."""
    assert request.request_id not in engine.scheduler.requests and engine.blocks_free() == engine.free
    assert engine.ours._sched.in_flight() == (0, 0) and not engine.ours._sched.has_unsaid()


# -- anything at any time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("windows", [(0, WINDOW), (0, -3 * BLOCK)], ids=["window", "chunks"])
def test_a_step_ahead(make: Any, windows: tuple[int, ...], seed: int) -> None:
    """vLLM schedules a step before the one before it has ended: also then no block of a partial offer is another request's."""
    dice = random.Random(seed)
    engine = make("kv_producer", windows=windows, blocks=40, seqs=6, async_scheduling=True)
    requests: list[Request] = []
    under_way: list[Any] = []
    whole = 0
    for number in range(250):
        if number < 150 and dice.random() < 0.3:
            tokens = dice.choice([dice.randrange(1, 250), WINDOW - 1 + dice.randrange(1, 6) * BLOCK])
            requests.append(engine.add(tokens, dice.choice([None, prefill_kv()]), max_tokens=dice.choice([1, 1, 5])))
        under_way.append(engine.schedule())
        if dice.random() < 0.05 and engine.scheduler.running:
            engine.abort(dice.choice(engine.scheduler.running))
        if len(under_way) > 1 or dice.random() < 0.2:
            sent = {each for each in engine.sending if dice.random() < 0.3}
            whole += sum(all(engine.ready.get(engine.sending[each].transfer_id, [0])) for each in sent)
            engine.update(under_way.pop(0), sent=sent)
        if dice.random() < 0.05 and engine.scheduler.running:
            engine.preempt()
    for output in under_way:
        engine.update(output)
    engine.run(lambda: all(map(engine.finished, requests)))
    engine.step()
    engine.step(sent=set(engine.sending))
    engine.nothing_is_left()
    assert whole and engine.withdrawn  # windows among them


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("hybrid", [False, True], ids=["one group", "two groups"])
def test_any_order(make: Any, seed: int, hybrid: bool) -> None:
    """Requests of all kinds come, are aborted, preempted, loaded and sent in any order; in the end nothing is left."""
    dice = random.Random(seed)
    engine = make("kv_both", hybrid=hybrid, blocks=dice.choice([40, 64]), seqs=6, policy=dice.choice(["fail", "recompute"]))
    alive: list[Request] = []
    kinds = [prefill_kv, decode_kv, lambda: None, lambda: {"do_remote_prefill": True}, lambda: {"do_remote_decode": True}]

    def some(of: Any) -> set[str]:
        return {each for each in of if dice.random() < 0.3}

    for number in range(300):
        if number < 200 and dice.random() < 0.3:
            kv = dice.choice(kinds)()
            alive.append(engine.add(dice.randrange(1, 250), kv, max_tokens=1 if (kv or {}).get("do_remote_decode") else 5))
        output = engine.schedule()
        if dice.random() < 0.1 and alive:
            engine.abort(dice.choice(alive))
        received = some(engine.loading)
        engine.update(output, sent=some(engine.sending), received=received, failed=some(received))
        if dice.random() < 0.1 and engine.scheduler.running:
            engine.preempt()
        alive = [request for request in alive if not engine.finished(request)]
    for _ in range(400):
        if not engine.scheduler.has_requests():
            break
        output = engine.schedule()
        engine.update(output, sent=set(engine.sending), received=set(engine.loading))
    assert not alive or all(map(engine.finished, alive))
    engine.nothing_is_left()
