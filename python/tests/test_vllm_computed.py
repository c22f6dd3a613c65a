"""Prompts that an engine computed though the other engine of its pair was to, as vLLM's real scheduler has them come."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

from vllm_engine import BLOCK, OFFLOADING, Engine, decode_kv, prefill_kv
from vllm_sides import BLOCK as SIDES_BLOCK
from vllm_sides import first_step, ids
from vllm_sides import request as made_request

from kvconn.vllm import computed as computed_module
from kvconn.vllm.computed import REASONS, Computed, Timer
from kvconn.vllm.records import Record, State
from kvconn.vllm.stats import KVConnStats


@pytest.fixture
def make(make: Any) -> Any:
    """Makes engines that keep what vLLM takes of them as statistics, in each step."""

    def watched(role: str, **more: Any) -> Engine:
        engine = make(role, **more)
        engine.told = KVConnStats()
        engine.take = engine.ours.get_kv_connector_stats

        def taken() -> KVConnStats | None:
            if (stats := engine.take()) is not None:
                engine.told.aggregate(stats)
            return stats

        engine.ours.get_kv_connector_stats = taken
        return engine

    return watched


def counted(engine: Engine) -> dict[str, list[int]]:
    """Prompts and tokens by reason, since the last call."""
    engine.ours.get_kv_connector_stats()
    counts, engine.told = engine.told.data["computed"], KVConnStats()
    return counts


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What computed.py logs, whatever vLLM does with the loggers above."""
    ours = logging.getLogger("kvconn.vllm")
    propagates, ours.propagate = ours.propagate, False
    ours.addHandler(caplog.handler)
    yield caplog
    ours.removeHandler(caplog.handler)
    ours.propagate = propagates


class Clock:
    """Time, and the timers that end in it."""

    now = 100.0

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        entry = (self.now + seconds, call)
        self.timers.append(entry)
        clock = self

        class Entry:
            def cancel(self) -> None:
                clock.timers.remove(entry)

        return Entry()

    def passes(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [entry for entry in self.timers if entry[0] <= end]:
            entry = min(due, key=lambda entry: entry[0])
            self.timers.remove(entry)
            self.now = max(self.now, entry[0])
            entry[1]()
        self.now = end


def of_both_roles(make: Any, clock: Clock, **more: Any) -> Engine:
    engine = make("kv_both", **more)
    engine.ours._sched.computed = Computed("kv_both", clock, clock.later)
    return engine


def ends(engine: Engine, request: Any) -> None:
    engine.run(lambda: engine.finished(request))
    engine.nothing_is_left()


@pytest.mark.parametrize("tokens", [2, BLOCK, BLOCK + 1, 100])
@pytest.mark.parametrize("hybrid", [False, True], ids=["one group", "two groups"])
def test_what_was_loaded_is_not_counted(make: Any, tokens: int, hybrid: bool) -> None:
    engine = make("kv_consumer", hybrid=hybrid)
    request = engine.add(tokens, decode_kv())
    engine.step()
    engine.step(received={request.request_id})
    ends(engine, request)
    assert counted(engine) == {}


def test_prefix_that_decode_has_is_not_counted(make: Any) -> None:
    engine = make("kv_consumer")
    prompt = list(range(100))
    first = engine.add(prompt, None, max_tokens=1)
    ends(engine, first)
    assert counted(engine) == {"no_transfer": [1, 100]}
    again = engine.add(prompt, decode_kv())
    engine.step()
    engine.step(received={again.request_id})
    ends(engine, again)
    assert counted(engine) == {}


@pytest.mark.parametrize(
    ("role", "expected"),
    [("kv_consumer", {"no_transfer": [1, 150]}), ("kv_producer", {"no_transfer": [1, 150]}), ("kv_both", {})],
)
def test_request_that_names_no_transfer(make: Any, role: str, expected: Any) -> None:
    """In chunks too: it is counted when it begins. An engine of both roles serves requests of its own; see below."""
    engine = make(role)
    ends(engine, engine.add(150, None))
    assert counted(engine) == expected and counted(engine) == {}


def test_request_that_the_router_gives_to_decode_alone(make: Any) -> None:
    engine = make("kv_consumer")
    ends(engine, engine.add(30, {"kvconn_alone": True}))
    assert counted(engine) == {"below_threshold": [1, 30]}


def test_prompts_that_prefill_is_there_for_are_not_counted(make: Any) -> None:
    engine = make("kv_producer")
    request = engine.add(150, prefill_kv(), max_tokens=1)
    engine.run(lambda: engine.finished(request))
    engine.step()
    engine.step(sent={request.request_id})
    engine.nothing_is_left()
    assert counted(engine) == {}


SAID = "this engine computed prompts"


def test_pair_of_both_roles_that_moves_nothing(make: Any, log: pytest.LogCaptureFixture) -> None:
    """As NIXL's documentation configures it, behind a router that is not for pairs: nobody names a transfer."""
    clock = Clock()
    engine = of_both_roles(make, clock)
    clock.passes(1000.0)  # it starts, and waits for its first request
    ends(engine, engine.add(150, None))
    clock.passes(24.0)
    last = engine.add(50, None)
    ends(engine, last)
    assert counted(engine) == {} and SAID not in log.text
    clock.passes(1.0)
    assert counted(engine) == {"nothing_moved": [2, 200]}
    (line,) = [message for message in log.messages if SAID in message]
    assert f"{REASONS['nothing_moved']} (2 prompts, 200 tokens); one of the last is request {last.request_id}." in line
    ends(engine, engine.add(20, None))
    assert counted(engine) == {"nothing_moved": [1, 20]}
    clock.passes(29.0)
    assert sum(SAID in message for message in log.messages) == 1, "at most one each half minute"
    clock.passes(1.0)
    assert sum(SAID in message for message in log.messages) == 2
    assert not clock.timers, "all is said"


@pytest.mark.parametrize("idle", [True, False], ids=["no further step", "it generates"])
def test_pair_that_moves_nothing_is_seen_within_a_minute(make: Any, idle: bool, log: pytest.LogCaptureFixture) -> None:
    """Whether a further request comes or not. The latest moment: a line was written just before the prompts were due to be counted."""
    clock = Clock()
    engine = of_both_roles(make, clock, policy="recompute")

    def bad() -> str:
        request = engine.add(30, {"do_remote_prefill": True})
        engine.step()
        engine.step(received={request.request_id}, failed={request.request_id})
        engine.run(lambda: engine.finished(request))
        return request.request_id

    def lines() -> list[str]:
        return [message for message in log.messages if SAID in message]

    bad()
    clock.passes(29.9)
    second = bad()
    request = engine.add(50, None, max_tokens=1000)
    engine.step()
    began = clock.now
    if idle:
        engine.abort(request)
    passed = 0.0
    while passed < 60.0:
        clock.passes(0.1)
        passed = clock.now - began
        if not idle:
            engine.step()
        if abs(passed - 1.0) < 0.01:
            assert len(lines()) == 2
            assert f"one of the last is request {second}." in lines()[1], "the request that may be its own is not named"
        if abs(passed - 24.0) < 0.01 or abs(passed - 29.0) < 0.01:
            assert len(lines()) == 2, "at most one each half minute"
        if abs(passed - 31.0) < 0.01:
            assert len(lines()) == 3
    assert REASONS["nothing_moved"] in lines()[2] and counted(engine)["nothing_moved"] == [1, 50]
    if not idle:
        engine.abort(request)


def test_no_thread_for_the_timer(make: Any, log: pytest.LogCaptureFixture) -> None:
    """As at a limit of processes. It costs the line its time, and the engine nothing."""
    clock = Clock()

    def refuses(seconds: float, call: Callable[[], None]) -> Timer:
        raise RuntimeError("can't start new thread")

    engine = make("kv_both")
    engine.ours._sched.computed = Computed("kv_both", clock, refuses)
    ends(engine, engine.add(50, None))
    clock.passes(25.0)
    engine.step()
    assert counted(engine) == {"nothing_moved": [1, 50]} and SAID in log.text


def test_a_timer_s_thread_says_it(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    """With the real clock, and no step after the one in which the request came."""
    monkeypatch.setattr(computed_module, "_WITHOUT_S", 0.01)
    said = threading.Event()
    computed = Computed("kv_both")
    heard = lambda record: said.set() or True  # noqa: E731
    log.handler.addFilter(heard)
    request = made_request(50, None)
    record = Record(request.request_id, None, State.ASIDE, 50)
    try:
        computed.step(first_step(request, ids(-(-50 // SIDES_BLOCK)), 0, 50), {record.req_id: record})
        assert said.wait(60)  # a bound that ends a hang
        assert computed.take() == {"nothing_moved": [1, 50]}
    finally:
        log.handler.removeFilter(heard)
        computed.close()


def test_no_timer_outlives_the_connector(make: Any) -> None:
    clock = Clock()
    engine = of_both_roles(make, clock)
    ends(engine, engine.add(50, None))
    assert len(clock.timers) == 1
    engine.ours.shutdown()
    assert not clock.timers
    ends(engine, engine.add(50, None))
    assert not clock.timers


def test_engine_of_both_roles_that_takes_part_serves_prompts_of_its_own(make: Any) -> None:
    clock = Clock()
    engine = of_both_roles(make, clock)
    for _ in range(3):
        ends(engine, engine.add(50, None))
        clock.passes(24.0)
        request = engine.add(100, decode_kv())
        engine.step()
        engine.step(received={request.request_id})
        ends(engine, request)
        clock.passes(24.0)
    ends(engine, engine.add(30, {"kvconn_alone": True}))
    assert counted(engine) == {"below_threshold": [1, 30]}


def test_requests_whose_loads_fail_have_named_a_transfer(make: Any) -> None:
    """They fail too, and so are in no step of vLLM's. While one is under way, nothing is said."""
    clock = Clock()
    engine = of_both_roles(make, clock)
    for _ in range(3):
        ends(engine, engine.add(50, None))
        clock.passes(20.0)
        request = engine.add(100, decode_kv())
        engine.step()
        engine.step(received={request.request_id}, failed={request.request_id})
        ends(engine, request)
    clock.passes(20.0)
    waits = engine.add(100, decode_kv())
    engine.step()
    for _ in range(2):
        own = engine.add(50, None)
        engine.run(lambda own=own: engine.finished(own))
        clock.passes(61.0)
    assert counted(engine) == {}
    engine.step(received={waits.request_id}, failed={waits.request_id})
    ends(engine, engine.add(50, None))
    clock.passes(5.0)  # to the next look
    assert counted(engine) == {"nothing_moved": [3, 150]}


@pytest.mark.parametrize("kv", [decode_kv, prefill_kv])
def test_engine_of_both_roles_that_has_moved_something_is_not_warned_of(make: Any, kv: Any, log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    engine = of_both_roles(make, clock)
    request = engine.add(100, kv(), max_tokens=1)
    engine.step()
    if kv is decode_kv:
        engine.step(received={request.request_id})
    engine.run(lambda: engine.finished(request))
    if kv is prefill_kv:
        engine.step()
        engine.step(sent={request.request_id})
    engine.nothing_is_left()
    for _ in range(2):
        ends(engine, engine.add(50, None))
        clock.passes(60.0)
    assert counted(engine) == {"nothing_moved": [2, 100]} and "this engine computed prompts" not in log.text


@pytest.mark.parametrize("hybrid", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_load_that_failed(make: Any, policy: str, hybrid: bool) -> None:
    """A request that fails is not computed."""
    engine = make("kv_consumer", policy=policy, hybrid=hybrid)
    request = engine.add(100, decode_kv())
    engine.step()
    engine.step(received={request.request_id}, failed={request.request_id})
    ends(engine, request)
    assert counted(engine) == ({} if policy == "fail" else {"failed_load": [1, 100]})


def test_params_that_were_refused(make: Any) -> None:
    engine = make("kv_consumer", policy="recompute")
    load = engine.add(100, {"do_remote_prefill": True})
    engine.step()
    engine.step(received={load.request_id}, failed={load.request_id})
    ends(engine, load)
    ends(engine, engine.add(30, prefill_kv()))  # at the wrong engine
    assert counted(engine) == {"bad_params": [2, 130]}


def test_request_that_vllm_loads_nothing_for(make: Any) -> None:
    engine = make("kv_consumer")
    request = engine.add(100, decode_kv(), skip_reading_prefix_cache=True)
    engine.step()
    if engine.loading:
        pytest.skip("this vLLM, older than 0.31, loads it")
    ends(engine, request)
    assert counted(engine) == {"not_taken": [1, 100]}


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
@pytest.mark.parametrize("hybrid", [False, True], ids=["one group", "two groups"])
def test_prompt_below_the_threshold(make: Any, hybrid: bool, role: str) -> None:
    """What decode lacks counts, not the prompt. Prefill hears that it may free. A request with bad params fails as such."""
    engine = make(role, policy="recompute", hybrid=hybrid, extra={"kv_recompute_threshold": 64})
    prompt, kv = list(range(63 + hybrid)), decode_kv()
    ends(engine, engine.add(prompt, kv))
    assert engine.released == [kv["transfer_id"]] and counted(engine) == {"below_threshold": [1, len(prompt)]}
    long = engine.add([*range(400, 464), *([5] * hybrid)], decode_kv())
    engine.step()
    engine.step(received={long.request_id})
    ends(engine, long)
    assert counted(engine) == {}
    kv = decode_kv()
    ends(engine, engine.add([*prompt, *range(300, 320)], kv))  # it has the first 48 or 64 tokens
    assert engine.released[1:] == [kv["transfer_id"]]
    ((reason, (prompts, tokens)),) = counted(engine).items()
    assert reason == "below_threshold" and prompts == 1 and tokens < 64
    bad = engine.add(30, {"do_remote_prefill": True})
    engine.step()
    engine.step(received={bad.request_id}, failed={bad.request_id})
    ends(engine, bad)
    assert counted(engine) == {"bad_params": [1, 30]}


def test_preempted(make: Any) -> None:
    engine = make("kv_consumer")
    request = engine.add(100, decode_kv(), max_tokens=8)
    engine.step()
    engine.step(received={request.request_id})
    engine.step()
    assert counted(engine) == {}
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    ends(engine, request)
    assert counted(engine) == {"preempted": [1, 100]}


@pytest.mark.parametrize("failed", [False, True])
def test_preempted_without_a_load(make: Any, failed: bool) -> None:
    """It was counted when it came."""
    engine = make("kv_consumer", policy="recompute")
    request = engine.add(100, decode_kv() if failed else {"do_remote_prefill": True}, max_tokens=8)
    engine.step()
    engine.step(received={request.request_id}, failed={request.request_id})
    engine.run(lambda: request.num_output_tokens > 0)
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    ends(engine, request)
    assert counted(engine) == {"failed_load" if failed else "bad_params": [1, 100]}


def test_second_sample_of_a_request(make: Any) -> None:
    engine = make("kv_consumer")
    kv = decode_kv()
    one, other = (engine.add(tokens, dict(kv), req_id=f"{n}_cmpl-x-0-1a2b3c4d") for n, tokens in enumerate((100, 60)))
    engine.step()
    engine.step(received={one.request_id})
    engine.run(lambda: engine.finished(one) and engine.finished(other))
    assert counted(engine) == {"sibling": [1, 60]}


def test_what_another_connector_loaded_is_not_counted(make: Any) -> None:
    engine = make("kv_consumer", beside=[OFFLOADING])
    request = engine.add(100, None)
    output = engine.schedule()
    (new,) = output.scheduled_new_reqs
    assert counted(engine) == {"no_transfer": [1, 100]}  # the other one had nothing yet
    new.num_computed_tokens = 96
    engine.ours._sched.computed.step(output, engine.ours._sched._requests)
    assert counted(engine) == {"no_transfer": [1, 4]}
    engine.abort(request)


def test_the_log_says_it_at_once_and_then_each_half_minute(log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    computed = Computed("kv_consumer", clock, clock.later)

    def comes(state: State, tokens: int = 50, there: int = 0, loaded: bool = False) -> str:
        request = made_request(tokens, None)
        record = Record(request.request_id, None, state, tokens)
        record.loaded = loaded
        computed.step(first_step(request, ids(-(-tokens // SIDES_BLOCK)), there, tokens - there), {record.req_id: record})
        return record.req_id

    first = comes(State.ASIDE)
    (line,) = log.messages
    assert f"{REASONS['no_transfer']} (1 prompts, 50 tokens); one of the last is request {first}." in line
    assert line.endswith("0 prompts were loaded")
    log.clear()
    for _ in range(1000):
        comes(State.ASIDE)
    comes(State.SETTLED)
    comes(State.SETTLED, there=49, loaded=True)
    comes(State.SETTLED, there=49)  # it was in decode's own cache
    clock.passes(29.0)
    comes(State.ASIDE)
    assert not log.messages
    comes(State.ASIDE)
    clock.passes(1.0)
    (line,) = log.messages
    assert "(1002 prompts, 50100 tokens)" in line and f"{REASONS['not_taken']} (1 prompts, 50 tokens)" in line
    assert line.endswith("1 prompts were loaded")
    assert log.records[0].levelno == logging.WARNING
    assert computed.take() == {"no_transfer": [1003, 50150], "not_taken": [1, 50]}
