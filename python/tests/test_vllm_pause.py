"""A pause of vLLM that keeps its requests, and a sleep after it, by vLLM's own scheduler: the cache is thrown away then."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

from vllm.v1.core.sched.interface import PauseState
from vllm_engine import prefill_kv


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("begun_anew", [False, True], ids=["goes on", "begun anew"])
def test_pause_waits_until_nothing_is_read(make: Any, async_scheduling: bool, begun_anew: bool) -> None:
    """The agent reads what partial offers have given. vLLM takes the engine for idle when no request is ready to run."""
    engine = make("kv_producer", async_scheduling=async_scheduling)
    kv = prefill_kv()
    request = engine.add(200, kv, max_tokens=1)  # four steps
    engine.step()
    assert engine.given
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert engine.scheduler.has_requests()
    engine.run(lambda: not engine.scheduler.has_requests(), 5)  # in bounded time
    assert engine.withdrawn == [kv["transfer_id"]] and not engine.given
    if begun_anew:  # as a sleep does
        engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.step()
    assert engine.given
    engine.run(lambda: request.request_id in engine.sending)
    offer = engine.sending[request.request_id]
    assert len(offer.block_ids[0]) == 13 and offer.first_block == [0]
    engine.step(sent={request.request_id})
    engine.nothing_is_left()


def test_steps_that_wait_for_a_batch_take_nothing_back(make: Any) -> None:
    """A step that is scheduled while the last chunk runs has no tokens, but the request still has its blocks."""
    engine = make("kv_producer", async_scheduling=True)
    request = engine.add(60, prefill_kv(), max_tokens=1)
    last = engine.schedule()
    ahead = engine.schedule()
    assert not ahead.total_num_scheduled_tokens and engine.given and not engine.metas[-1].empty_step
    engine.update(last)
    engine.update(ahead)
    engine.run(lambda: request.request_id in engine.sending)
    assert not engine.withdrawn
    engine.step(sent={request.request_id})
    engine.nothing_is_left()


@pytest.mark.parametrize(("async_scheduling", "told"), [(False, [True, True, True]), (True, [False, True, True])])
def test_worker_waits_only_when_no_batch_is_under_way(make: Any, async_scheduling: bool, told: list[bool]) -> None:
    """A step without tokens waits for completions in the worker. A batch after it would find the worker busy."""
    engine = make("kv_producer", async_scheduling=async_scheduling)
    request = engine.add(60, prefill_kv(), max_tokens=1)
    engine.run(lambda: request.request_id in engine.sending)
    engine.add(20, None, max_tokens=1)
    engine.step()
    assert not engine.metas[-1].empty_step
    for _ in told:
        engine.step()
    assert [meta.empty_step for meta in engine.metas[-len(told) :]] == told
    engine.step(sent={request.request_id})
    engine.nothing_is_left()
