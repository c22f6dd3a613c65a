"""A real pair of vLLM servers whose clients go away, and whose engines die, stop or queue."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from asking import Answer, ask, metric, open_stream, wait_until
from pair_tests import (
    BLOCK,
    EXPIRED,
    GENERATED,
    GOOD,
    IN_FLIGHT,
    RUNNING,
    STEPS,
    TOKEN_BYTES,
    USAGE,
    WAITING,
    alone,
    body,
    failures,
    from_prefill,
    idle,
    new_loads,
    numbers,
    progress,
    sent,
    served_again,
    serves,
    went_by,
    without,
    words,
)
from servers import wait_ready
from vllm_pair import Pair

pytestmark = pytest.mark.usefixtures("servers_live")


def test_client_disconnects(pair: Pair) -> None:
    """At any time of a request; idle() then finds no block in use on either side."""
    for delay_s in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4):
        with open_stream(pair.router.url, body(pair, words(2200), max_tokens=200)) as connection:
            # A bound on how long the client stays: it leaves then, or with the first bytes of the answer.
            connection.sock.settimeout(max(delay_s, 0.001))
            with contextlib.suppress(TimeoutError):
                connection.sock.recv(1)
    idle(pair)
    serves(pair)


def in_prefill(pair: Pair, connection: http.client.HTTPConnection) -> bool:
    """Waits until the prefill engine runs the request; False when the look came too late, and the answer has begun."""

    def answering() -> bool:
        return bool(select.select([connection.sock], [], [], 0)[0])

    wait_until("prefill works", lambda: metric(pair.prefill.url, RUNNING) > 0 or answering(), 60, every_s=0.005)
    return not answering()


def test_client_disconnects_during_prefill(pair: Pair) -> None:
    made, expired = metric(pair.decode.url, GENERATED), metric(pair.prefill.url, EXPIRED)
    for _ in range(10):
        with open_stream(pair.router.url, body(pair, words(3800), max_tokens=200, ignore_eos=True)) as connection:
            if in_prefill(pair, connection):
                break
        idle(pair)
        made = metric(pair.decode.url, GENERATED)
    else:
        raise AssertionError("no client left during prefill in 10 attempts")
    idle(pair)
    assert metric(pair.decode.url, GENERATED) - made < 200  # it did not end by itself,
    assert metric(pair.prefill.url, EXPIRED) == expired  # nor did an offer for it expire
    serves(pair)


def test_client_disconnects_after_the_first_event(pair: Pair) -> None:
    length = 3500
    made, expired = metric(pair.decode.url, GENERATED), metric(pair.prefill.url, EXPIRED)
    with open_stream(pair.router.url, body(pair, words(500), max_tokens=length, ignore_eos=True), timeout_s=60) as connection:
        response = connection.getresponse()
        assert response.status == 200
        event = next(line for line in response if line.startswith(b"data: "))
        assert json.loads(event[6:])["choices"][0]["finish_reason"] is None, event
    idle(pair)
    assert 0 < metric(pair.decode.url, GENERATED) - made < length
    assert metric(pair.prefill.url, EXPIRED) == expired
    serves(pair)


def test_storm_of_disconnects(pair: Pair) -> None:
    def client(number: int) -> None:
        with open_stream(pair.router.url, body(pair, words(700), max_tokens=100)) as connection:
            connection.sock.settimeout(0.01 + 0.03 * (number % 10))
            with contextlib.suppress(TimeoutError):
                connection.sock.recv(1)

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(client, range(40)))
    idle(pair, bound_s=40)
    serves(pair)


def test_decode_request_that_nobody_prefills(pair: Pair) -> None:
    """Its client gives up: the load is cancelled and its blocks come back, long before the load would end by itself."""
    whole = {**body(pair, words(600)), "kv_transfer_params": from_prefill(pair, f"nobody-{next(numbers)}")}
    with open_stream(pair.decode.url, whole):
        wait_until("the load holds its blocks", lambda: metric(pair.decode.url, USAGE) > 0, every_s=0.02)
    idle(pair)
    serves(pair)


def test_offer_whose_decode_request_never_comes(pair: Pair) -> None:
    """The lease ends, and the prefill engine frees; no decode engine is needed for that."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"unloved-{next(numbers)}"}
    request = {**body(pair, words(600), max_tokens=1), "kv_transfer_params": params}
    expired, failed = metric(pair.prefill.url, EXPIRED), failures(pair.prefill, side="offer", reason="expired")
    assert ask(pair.prefill.url, request).ok
    assert metric(pair.prefill.url, USAGE) > 0
    idle(pair, bound_s=60)
    wait_until("it is counted", lambda: metric(pair.prefill.url, EXPIRED) > expired)
    assert metric(pair.prefill.url, EXPIRED) == expired + 1
    assert failures(pair.prefill, side="offer", reason="expired") == failed + 1


def test_prefill_killed_during_loads_and_restarted(pair: Pair) -> None:
    """Requests under way end by the policy (the test prints how soon); the decode engine serves on and finds the new prefill engine."""
    answers: list[Answer] = []
    requests = [body(pair, words(2200), max_tokens=64, stream=True) for _ in range(4)]
    threads = [
        threading.Thread(target=lambda request=request: answers.append(ask(pair.router.url, request, timeout_s=60))) for request in requests
    ]
    for thread in threads:
        thread.start()
    wait_until("the decode engine waits", lambda: metric(pair.decode.url, USAGE) > 0, every_s=0.01)
    killed = time.monotonic()
    pair.kill_prefill()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    progress("prefill killed", time.monotonic() - killed, "all requests under way have ended")
    assert any(not answer.ok for answer in answers), answers
    # The decode engine serves requests that need no prefill engine, and holds no block of the others.
    assert alone(pair, body(pair, words(200))).ok
    wait_until("no block in use", lambda: metric(pair.decode.url, USAGE) == 0)

    pair.restart_prefill()
    serves(pair, met=False)


@contextlib.contextmanager
def traffic(pair: Pair, tokens: int = 24) -> Iterator[list[Answer]]:
    """Streams requests that need no prefill engine, one after the other until the end. Gives the answers that have ended so far."""
    answers: list[Answer] = []
    over = threading.Event()

    def client() -> None:
        while not over.is_set():
            request = body(pair, words(100), max_tokens=tokens, ignore_eos=True, stream=True)
            answers.append(ask(pair.decode.url, request, timeout_s=30))

    thread = threading.Thread(target=client)
    thread.start()
    try:
        yield answers
    finally:
        over.set()
        thread.join(60)
    assert not thread.is_alive()
    assert all(answer.ok and len(answer.text) == tokens for answer in answers), answers


def test_prefill_stopped(pair: Pair) -> None:
    """A prefill engine that hangs costs the requests that need it, and no other; when it goes on it is used again.

    A step that waited for the stopped engine would end when its request does: each time, others would have two tokens at most until then,
    of the step before it. A machine that made no more in that time, peer_timeout_s, shows nothing, and the engine is stopped again.
    How much longer a step takes, scripts/bench-step-pair.sh says.
    """
    meanwhile = [others_beside_stopped(pair)]
    while meanwhile[-1] <= 3 and len(meanwhile) < 5:
        meanwhile.append(others_beside_stopped(pair))
    assert meanwhile[-1] > 3, meanwhile


def others_beside_stopped(pair: Pair) -> float:
    """How many tokens the decode engine counts for other requests while one waits for a stopped prefill engine."""
    serves(pair)  # the engines know each other: it is this connection that is lost
    lost = {**body(pair, words(600)), "kv_transfer_params": from_prefill(pair, f"stopped-{next(numbers)}")}
    failed, of_lost = failures(pair.decode), failures(pair.decode, side="load", reason="peer_lost")
    wait_until("no load", lambda: metric(pair.decode.url, IN_FLIGHT, side="load") == 0)
    with traffic(pair) as others, ThreadPoolExecutor(1) as pool:
        wait_until("others are measured", lambda: len(others) >= 6, 120)
        with pair.prefill.stopped():
            stopped = time.monotonic()
            waits = pool.submit(ask, pair.decode.url, lost, 30)
            wait_until("the load waits", lambda: metric(pair.decode.url, IN_FLIGHT, side="load") > 0 or waits.done(), every_s=0.02)
            assert not waits.done(), waits.result()
            # Not from the question on: the step before it may take until then.
            steps = {part: metric(pair.decode.url, STEPS, part=part) for part in ("worker", "scheduler")}
            held = made = metric(pair.decode.url, GENERATED)
            while not waits.done():
                seen = metric(pair.decode.url, GENERATED)
                if metric(pair.decode.url, IN_FLIGHT, side="load") > 0:
                    made = seen  # the load was under way when these were counted
                time.sleep(0.05)
            assert not waits.result().ok
            ended = time.monotonic()
            so_far = len(others)
            wait_until("the next have ended", lambda: len(others) >= so_far + 2, 60)
            wait_until(
                "the steps of both are told",
                lambda: all(metric(pair.decode.url, STEPS, part=part) > told for part, told in steps.items()),
            )
    progress("prefill stopped", ended - stopped, f"its request has ended; others had {made - held:.0f} tokens before it did")
    wait_until("its failure is counted", lambda: failures(pair.decode, side="load", reason="peer_lost") > of_lost)
    assert failures(pair.decode) == failed + 1
    wait_until("no load is under way", lambda: metric(pair.decode.url, IN_FLIGHT, side="load") == 0)
    wait_until("the prefill engine answers again", pair.prefill.healthy)
    idle(pair)
    served_again(pair)
    return made - held


def test_decode_killed_during_loads_and_restarted(pair: Pair) -> None:
    """The prefill engine frees the blocks that were for it, long before the lease ends, and serves the next decode engine."""
    requests = [body(pair, words(2200), max_tokens=64) for _ in range(4)]
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = [pool.submit(ask, pair.router.url, request, 60) for request in requests]
        wait_until("the decode engine waits", lambda: metric(pair.decode.url, USAGE) > 0, every_s=0.01)
        killed = time.monotonic()
        pair.decode.kill()
        assert not any(answer.result().ok for answer in answers)
    wait_until(
        "the prefill engine has freed",
        lambda: all(metric(pair.prefill.url, name) == 0 for name in (RUNNING, WAITING, USAGE)),
    )
    progress("decode killed", time.monotonic() - killed, "the prefill engine holds nothing")
    pair.decode.start()
    wait_ready([pair.decode], progress=progress)
    pair.warm(pair.decode)
    served_again(pair)


def test_two_hundred_requests_aborted_at_once(pair: Pair) -> None:
    with contextlib.ExitStack() as clients:
        streams = [clients.enter_context(open_stream(pair.router.url, body(pair, words(150), max_tokens=200))) for _ in range(200)]
        wait_until("both work", lambda: all(metric(server.url, RUNNING) > 0 for server in (pair.prefill, pair.decode)), 30, every_s=0.05)
        assert len(streams) == 200
    idle(pair, bound_s=60)
    serves(pair)


def computed(pair: Pair, reason: str) -> float:
    """Tokens of prompts that the decode engine was to load and has computed."""
    return metric(pair.decode.url, "vllm:kvconn_computed_tokens_total", reason=reason)


def test_prompts_that_name_no_transfer_are_counted(pair: Pair, narrow: Pair) -> None:
    """A router that knows of no pair: each answer is right, and nothing moves. The log says it at once, or within half a minute."""
    before = computed(narrow, "no_transfer")
    for tokens in (300, 20):
        assert ask(narrow.decode.url, body(pair, words(tokens))).ok
    wait_until("both prompts are counted", lambda: computed(narrow, "no_transfer") == before + 320)
    assert "they named no transfer: the router, or the client, sent no kv_transfer_params" in narrow.decode.log_since(0)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({**GOOD, "transfer_id": "recompute"}, "cannot be reached"),
        (without("transfer_id"), "transfer_id is missing"),
        ({**GOOD, "transfer_id": "not-on-the-list", "remote_bootstrap_addr": "http://192.0.2.7:8998"}, "bootstrap_allow says"),
    ],
    ids=["unreachable", "bad params", "not allowed"],
)
def test_recompute_policy(pair: Pair, narrow: Pair, params: dict[str, Any], said: str) -> None:
    """With kv_load_failure_policy recompute a failed load costs time, and no text."""
    request = body(pair, words(300))
    position, reason = narrow.decode.log_size(), "bad_params" if said.endswith("missing") else "failed_load"
    before = computed(narrow, reason)
    answer = ask(narrow.decode.url, {**request, "kv_transfer_params": params})
    assert answer.ok, answer
    assert answer.text == alone(pair, request).text
    wait_until("the prompt is counted as computed by decode", lambda: computed(narrow, reason) == before + 300)
    wait_until(f"{said!r} in the log", lambda: said in narrow.decode.log_since(position))
    wait_until("no block in use", lambda: metric(narrow.decode.url, USAGE) == 0)


@pytest.mark.parametrize("tokens", [2, BLOCK, 900, 2200])
def test_completion_by_tcp(pair: Pair, narrow: Pair, tokens: int) -> None:
    """The pair's main test with tcp forced, where auto takes local."""
    request = body(pair, words(tokens))
    expected = alone(pair, request)
    to_load = from_prefill(pair, f"tcp-{next(numbers)}")
    to_offer = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": to_load["transfer_id"]}
    position, before = narrow.decode.log_size(), sent(pair, "tcp")
    assert ask(pair.prefill.url, {**request, "max_tokens": 1, "kv_transfer_params": to_offer}).ok
    answer = ask(narrow.decode.url, {**request, "kv_transfer_params": to_load})
    assert answer.ok, answer
    assert (answer.text, answer.finish_reason) == (expected.text, expected.finish_reason)
    (load,) = new_loads(narrow, position, 1)
    assert load["bytes"] == -(-tokens // BLOCK) * BLOCK * TOKEN_BYTES
    went_by(pair, load, "tcp", before)
    wait_until("no block in use", lambda: metric(narrow.decode.url, USAGE) == 0)


def test_recompute_when_prefill_stops(pair: Pair, narrow: Pair) -> None:
    request = body(pair, words(300))
    expected = alone(pair, request)
    params = from_prefill(pair, f"stopped-{next(numbers)}")
    with pair.prefill.stopped():
        answer = ask(narrow.decode.url, {**request, "kv_transfer_params": params}, timeout_s=30)
    assert answer.ok, answer
    assert answer.text == expected.text
    wait_until("the prefill engine answers again", pair.prefill.healthy)
    served_again(pair)


def test_two_decode_engines_ask_for_one_transfer(pair: Pair, narrow: Pair) -> None:
    """One of them gets it; the other's request ends by its policy. No text is ever wrong."""
    for _ in range(4):
        request = body(pair, words(600))
        expected = alone(pair, request).text
        params = from_prefill(pair, f"twice-{next(numbers)}")
        positions = [each.decode.log_size() for each in (pair, narrow)]
        to_offer = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": params["transfer_id"]}
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(ask, each.decode.url, {**request, "kv_transfer_params": params}, 40) for each in (pair, narrow)]
            offered = pool.submit(ask, pair.prefill.url, {**request, "max_tokens": 1, "kv_transfer_params": to_offer})
            assert offered.result().ok
            fails, recomputes = (each.result() for each in asked)
        loads = [each.loads(position) for each, position in zip((pair, narrow), positions)]
        assert sum(map(len, loads)) == 1, loads
        assert recomputes.ok and recomputes.text == expected
        assert fails.ok == bool(loads[0])
        assert not fails.ok or fails.text == expected
    wait_until("no block in use", lambda: metric(narrow.decode.url, USAGE) == 0)


def test_queue_longer_than_the_lease(pair: Pair, narrow: Pair) -> None:
    """A request that waits on decode for a place is claimed: its blocks on prefill outlive the lease."""
    transfer = f"queued-{next(numbers)}"
    to_load = from_prefill(pair, transfer)
    request = body(pair, words(600))
    expected = alone(pair, request)
    position = narrow.decode.log_size()
    answers: list[Answer] = []
    queued = threading.Thread(target=lambda: answers.append(ask(narrow.decode.url, {**request, "kv_transfer_params": to_load})))
    with open_stream(narrow.decode.url, body(pair, words(20), max_tokens=4000, ignore_eos=True)):
        wait_until("decode works", lambda: metric(narrow.decode.url, RUNNING) == 1, every_s=0.02)
        queued.start()
        wait_until("one queues", lambda: metric(narrow.decode.url, WAITING) == 1, every_s=0.02)
        for name in (transfer, f"unloved-{next(numbers)}"):
            to_offer = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
            assert ask(pair.prefill.url, {**request, "max_tokens": 1, "cache_salt": name, "kv_transfer_params": to_offer}).ok
        both = metric(pair.prefill.url, USAGE)
        wait_until("the other offer has expired", lambda: metric(pair.prefill.url, USAGE) < both)
        assert metric(pair.prefill.url, USAGE) > 0  # the one that is claimed
        assert metric(narrow.decode.url, WAITING) == 1
    queued.join(30)
    assert not queued.is_alive()
    assert answers[0].ok and answers[0].text == expected.text
    (load,) = new_loads(narrow, position, 1)
    assert load["transfer_id"] == transfer
