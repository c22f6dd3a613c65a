"""Both roles under vLLM's real scheduler, beside another connector, and anything at any time."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

from vllm.v1.request import Request
from vllm_engine import BLOCK, OFFLOADING, WINDOW, Engine, decode_kv, prefill_kv


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
    """The first connector that has the tokens loads them. The other hears of the blocks and must not load as well."""
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
    """Looks at our connector only: no worker here ends the stores of the other one."""
    assert request.request_id not in engine.scheduler.requests and engine.blocks_free() == engine.free
    assert engine.ours._sched.in_flight() == (0, 0) and not engine.ours._sched.has_unsaid()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("windows", [(0, WINDOW), (0, -3 * BLOCK)], ids=["window", "chunks"])
def test_a_step_ahead(make: Any, windows: tuple[int, ...], seed: int) -> None:
    """vLLM schedules a step before the former step has ended. Then too no block of a partial offer may be another request's."""
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
