"""Prefill requests under vLLM's real scheduler."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

import torch
from vllm.v1.request import Request, RequestStatus
from vllm_engine import BLOCK, MAX_BATCHED, WINDOW, decode_kv, prefill_kv

from kvconn import fingerprint


@pytest.mark.parametrize("hybrid", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("tokens", [1, BLOCK, 100, 300])
def test_chunked_prefill_is_offered_whole(make: Any, tokens: int, hybrid: bool) -> None:
    engine = make("kv_producer", hybrid=hybrid)
    kv = prefill_kv()
    request = engine.add(tokens, kv, max_tokens=1)
    engine.run(lambda: engine.finished(request))
    # The whole prompt was sent while it was computed; of the window only the blocks that are kept until the prompt's end.
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
    """The last token of such a prompt would cost a block that the decode engine needs."""
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
    """A prompt of embeddings: its last token costs a block that decode needs. While that token is computed the block must not go."""
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
    """P, which may cut the prompt, and D say the same number. P says it also when it begins anew with other blocks."""
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
    """A session's prompt is what has come so far: the next part fills its last block up."""
    engine = make("kv_producer")
    request = engine.add(BLOCK + 1, prefill_kv(), max_tokens=1, resumable=True)
    engine.step()
    assert request.num_computed_tokens == BLOCK + 1 and not engine.given
    engine.abort(request)
    engine.nothing_is_left()


def test_prefix_that_another_connector_loaded_badly_is_taken_back(make: Any) -> None:
    """The other connector reports the failure when the blocks are being sent already. vLLM computes them in place."""
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
    """If a prompt is aborted, before admission or between its chunks, the connector tells the decode engine, and nothing stays."""
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
