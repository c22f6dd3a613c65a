"""A real pair of vLLM servers, with failures. Run with the Python of an environment that has vLLM, kvconn and pytest.

Nothing sleeps to let something happen: every wait polls for what it waits for, up to a bound.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import select
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
from servers import FORKED, Answer, Pair, Server, ask, leaving_nothing, metric, open_stream, wait_ready, wait_until
from servers import request as http_request

BLOCK = 128  # tokens, vLLM's on CPU
TOKEN_BYTES = 8 * 8 * 128 * 2 * 4  # layers, KV heads, head size, K and V, float32
LEASE_S = 5
CHUNK = 512  # tokens that prefill computes in a step
USAGE = "vllm:kv_cache_usage_perc"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
GENERATED = "vllm:generation_tokens_total"
IN_FLIGHT = "vllm:kvconn_transfers_in_flight"
STEPS = "vllm:kvconn_step_time_seconds_count"
EXPIRED = "vllm:kvconn_expired_offers_total"
numbers = itertools.count(1)


def progress(name: str, seconds: float, text: str) -> None:
    print(f"  [{seconds:4.0f} s] {name}: {text}", file=sys.stderr, flush=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    workdir = Path(os.environ.get("KVCONN_E2E_WORKDIR") or tmp_path_factory.mktemp("pair"))
    router = os.environ.get("KVCONN_E2E_ROUTER")
    model = tiny_model.make(workdir / "model-fat", fat=True)
    # The fat cache: a transfer that takes long enough to be interrupted.
    the_pair = Pair(
        model,
        workdir / "logs",
        executor=os.environ.get("KVCONN_E2E_EXECUTOR", "uni"),
        prefill_config={"lease_s": LEASE_S},
        prefill_args=["--max-num-batched-tokens", str(CHUNK)],
        extra_env={"VLLM_SERVER_DEV_MODE": "1"},  # has a call that preempts all that runs
        progress=progress,
        router_argv=router.split() if router else None,
    )
    with leaving_nothing(the_pair):
        yield the_pair


@pytest.fixture(autouse=True)
def servers_live(pair: Pair) -> Iterator[None]:
    """Whatever a test did: the engines live on, serve, and hold no block of a request that is over."""
    yield
    for server in pair.servers:
        server.check_alive()
    idle(pair)


def idle(pair: Pair, bound_s: float = 15) -> None:
    for server in (pair.prefill, pair.decode):
        wait_until(
            f"{server.name}: no request and no block in use",
            lambda server=server: all(metric(server.url, name) == 0 for name in (RUNNING, WAITING, USAGE)),
            bound_s,
        )


def failures(server: Server, **labels: str) -> float:
    return metric(server.url, "vllm:kvconn_failed_transfers_total", absent=0, **labels)


def words(tokens: int) -> str:
    """A prompt that no cache has seen."""
    text = f"{next(numbers)} of {time.monotonic_ns()}: whose woods these are I think I know, his house is in the village. "
    return (text * (tokens // len(text) + 1))[:tokens]


def body(pair: Pair, prompt: str, max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    return {"model": pair.served, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}


def alone(pair: Pair, request: dict[str, Any], chat: bool = False) -> Answer:
    """The same, from one engine, without a transfer."""
    answer = ask(pair.decode.url, {**request, "cache_salt": f"alone-{next(numbers)}"}, chat=chat)
    assert answer.ok, answer
    return answer


def new_loads(pair: Pair, position: int, count: int, bound_s: float = 10) -> list[dict[str, Any]]:
    wait_until(f"{count} loads in the decode server's log", lambda: len(pair.loads(position)) >= count, bound_s)
    loads = pair.loads(position)
    assert len(loads) == count, loads
    return loads


def from_prefill(pair: Pair, transfer: str) -> dict[str, Any]:
    """What a router tells a decode engine about a request that the prefill engine has, or will have."""
    address = f"http://127.0.0.1:{pair.bootstrap_port}"
    status, answer = http_request("GET", address + "/query")
    assert status == 200
    engine = json.loads(answer)["0"]["engine_id"]
    return {**GOOD, "transfer_id": transfer, "remote_bootstrap_addr": address, "remote_engine_id": engine}


def served_again(pair: Pair) -> None:
    """The router may need a moment to see that an engine is back."""
    request = body(pair, words(20), max_tokens=1)
    wait_until("the router serves again", lambda: ask(pair.router.url, request, timeout_s=20).ok, 20, every_s=0.2)
    serves(pair)


def serves(pair: Pair) -> None:
    """A request through the pair, with its transfer, gives the single engine's text."""
    request = body(pair, words(300))
    position = pair.decode.log_size()
    answer = ask(pair.router.url, request)
    assert answer.ok, (answer, pair.decode.log_tail())
    assert answer.text == alone(pair, request).text
    new_loads(pair, position, 1)


# -- texts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("tokens", [2, BLOCK - 1, BLOCK, BLOCK + 1, 900, 2200])
def test_completion_equals_single_engine(pair: Pair, tokens: int, stream: bool) -> None:
    request = body(pair, words(tokens), stream=stream)
    expected = alone(pair, request)
    position = pair.decode.log_size()
    answer = ask(pair.router.url, request)
    assert answer.ok, answer
    assert (answer.text, answer.finish_reason) == (expected.text, expected.finish_reason)
    assert len(answer.text) == 16
    (load,) = new_loads(pair, position, 1)
    assert load["blocks"] == -(-tokens // BLOCK)
    assert load["bytes"] == load["blocks"] * BLOCK * TOKEN_BYTES
    assert load["first_block"] == [0]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_chat_equals_single_engine(pair: Pair, stream: bool) -> None:
    request = {
        "model": pair.served,
        "messages": [{"role": "user", "content": words(500)}],
        "max_tokens": 16,
        "temperature": 0,
        "stream": stream,
    }
    expected = alone(pair, request, chat=True)
    position = pair.decode.log_size()
    answer = ask(pair.router.url, request, chat=True)
    assert answer.ok, answer
    assert answer.text == expected.text != ""
    new_loads(pair, position, 1)


def test_first_token_ends_the_text(pair: Pair) -> None:
    """The prefill request then stops before its length does; the decode engine needs the cache all the same."""
    request = body(pair, words(400), logit_bias={"1": 100})
    expected = alone(pair, request)
    assert expected.finish_reason == "stop"
    position = pair.decode.log_size()
    answer = ask(pair.router.url, request)
    assert answer.ok, answer
    assert (answer.text, answer.finish_reason) == (expected.text, "stop")
    new_loads(pair, position, 1)


def test_concurrent_requests(pair: Pair) -> None:
    requests = [body(pair, words(100 + 150 * n), stream=bool(n % 2)) for n in range(12)]
    expected = [alone(pair, request).text for request in requests]
    position = pair.decode.log_size()
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda request: ask(pair.router.url, request), requests))
    assert [answer.error for answer in answers] == [""] * len(requests)
    assert [answer.text for answer in answers] == expected
    new_loads(pair, position, len(requests))


def test_several_samples_of_one_prompt(pair: Pair) -> None:
    """n > 1 makes several requests with one transfer id: one is loaded, the others are computed."""
    request = {**body(pair, words(300), n=2, seed=1), "temperature": 1}
    position = pair.decode.log_size()
    answer = ask(pair.router.url, request)
    assert answer.ok, answer
    assert (answer.chunks, answer.finish_reason) == (2, "length")
    new_loads(pair, position, 1)


# -- the decode engine's own cache ------------------------------------------------------------------------------------


def test_cached_prefix_is_not_loaded_again(pair: Pair) -> None:
    prefix = words(5 * BLOCK)
    first, second = body(pair, prefix + words(200)), body(pair, prefix + words(2 * BLOCK))
    expected = [alone(pair, request).text for request in (first, second)]
    texts, loads = [], []
    for request in (first, second):
        position = pair.decode.log_size()
        answer = ask(pair.router.url, request)
        assert answer.ok, answer
        texts.append(answer.text)
        loads += new_loads(pair, position, 1)
    assert texts == expected
    assert (loads[0]["first_block"], loads[0]["blocks"]) == ([0], 7)
    assert (loads[1]["first_block"], loads[1]["blocks"]) == ([5], 2)


def test_whole_prompt_cached(pair: Pair) -> None:
    """Nothing is loaded, and the prefill engine frees (servers_live looks)."""
    request = body(pair, words(3 * BLOCK + 1))
    first = ask(pair.router.url, request)
    position = pair.decode.log_size()
    again = ask(pair.router.url, request)
    assert first.ok and again.ok, (first, again)
    assert first.text == again.text
    idle(pair)
    assert pair.loads(position) == []


# -- requests that make no sense ------------------------------------------------------------------------------------

GOOD = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_id": "t",
    "remote_engine_id": "e",
    "remote_bootstrap_addr": "http://127.0.0.1:1",
}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != key}


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (without("transfer_id"), "transfer_id is missing"),
        (without("remote_bootstrap_addr"), "remote_bootstrap_addr is missing"),
        (without("remote_engine_id"), "remote_engine_id is missing"),
        ({**GOOD, "transfer_id": 7}, "transfer_id is 7"),
        ({**GOOD, "transfer_id": ""}, "transfer_id is empty"),
        ({**GOOD, "remote_bootstrap_addr": ["x"]}, "remote_bootstrap_addr is ['x']"),
        ({**GOOD, "do_remote_prefill": "yes"}, "do_remote_prefill is 'yes'"),
        ({**GOOD, "do_remote_decode": True}, "both true"),
        ({**GOOD, "kvconn_error": "no room"}, "the prefill engine says: no room"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_params_end_by_the_policy(pair: Pair, params: dict[str, Any], said: str) -> None:
    """By the policy (fail) the request ends at once, with the reason in the log; by the other see test_recompute_policy."""
    position = pair.decode.log_size()
    answer = ask(pair.decode.url, {**body(pair, words(200)), "kv_transfer_params": params})
    assert not answer.ok and answer.total_s < 8, answer
    wait_until(f"{said!r} in the log", lambda: said in pair.decode.log_since(position), 5)
    assert pair.loads(position) == []
    assert alone(pair, body(pair, words(200))).ok


def test_prefill_request_at_the_decode_engine(pair: Pair) -> None:
    """It is computed like any other, and the answer says why nobody can load it."""
    request = body(pair, words(200), max_tokens=1)
    status, text = http_request(
        "POST", pair.decode.url + "/v1/completions", {**request, "kv_transfer_params": {"do_remote_decode": True, "transfer_id": "t"}}
    )
    answer = json.loads(text)
    assert status == 200 and "kv_role is kv_consumer" in answer["kv_transfer_params"]["kvconn_error"]
    assert answer["choices"][0]["text"] == alone(pair, request).text


def test_bad_params_at_the_prefill_engine(pair: Pair) -> None:
    request = body(pair, words(200), max_tokens=1)
    status, text = http_request(
        "POST", pair.prefill.url + "/v1/completions", {**request, "kv_transfer_params": {"do_remote_decode": True, "transfer_id": 7}}
    )
    relayed = json.loads(text)["kv_transfer_params"]
    assert status == 200 and "transfer_id is 7" in relayed["kvconn_error"]
    # A router hands it to the decode engine, whose log then has the reason.
    position = pair.decode.log_size()
    assert not ask(pair.decode.url, {**request, "kv_transfer_params": relayed}).ok
    wait_until("the reason in the log", lambda: "the prefill engine says: transfer_id is 7" in pair.decode.log_since(position), 5)


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "nonsense", "http://", "http://[::1", "ftp://127.0.0.1:1"])
def test_unreachable_prefill_engine(pair: Pair, address: str) -> None:
    """By the policy (fail) the request ends, in seconds."""
    params = {**GOOD, "transfer_id": f"unreachable-{next(numbers)}", "remote_bootstrap_addr": address}
    answer = ask(pair.decode.url, {**body(pair, words(200)), "kv_transfer_params": params}, timeout_s=30)
    assert not answer.ok
    assert answer.total_s < 8, answer
    serves(pair)


def reasons(pair: Pair, position: int, said: str) -> str:
    """What the decode server's log says of loads that failed, of which one says so."""
    return "\n".join(line for line in pair.decode.log_since(position).splitlines() if said in line)


@pytest.mark.parametrize(
    ("elsewhere", "said"),
    [
        ({"remote_engine_id": "nobody"}, "nobody"),
        ({"remote_bootstrap_addr": "http://169.254.169.254"}, "169.254.169.254"),  # a cloud's metadata: refused without a list
    ],
    ids=["unknown engine", "refused host"],
)
def test_load_from_elsewhere(pair: Pair, elsewhere: dict[str, Any], said: str) -> None:
    """The prefill engine lives and serves, but the request names another engine, or a host that may not be contacted."""
    position = pair.decode.log_size()
    params = {**from_prefill(pair, f"elsewhere-{next(numbers)}"), **elsewhere}
    answer = ask(pair.decode.url, {**body(pair, words(200)), "kv_transfer_params": params}, timeout_s=30)
    assert not answer.ok, answer
    wait_until(f"{said!r} in the log", lambda: "was not loaded" in reasons(pair, position, said), 5)
    serves(pair)


@pytest.mark.parametrize("theirs", ["shorter", "another"])
def test_prompts_that_differ(pair: Pair, theirs: str) -> None:
    """Of one transfer id the prefill engine has a shorter prompt, or another of that length: a reason, and no wrong text."""
    transfer, text = f"{theirs}-{next(numbers)}", words(1200)
    params = from_prefill(pair, transfer)
    to_offer = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
    there = text[:200] if theirs == "shorter" else text[:-1] + "#"
    assert ask(pair.prefill.url, {**body(pair, there, max_tokens=1), "kv_transfer_params": to_offer}).ok
    position = pair.decode.log_size()
    answer = ask(pair.decode.url, {**body(pair, text), "kv_transfer_params": params}, timeout_s=30)
    assert not answer.ok, answer
    wait_until("the reason in the log", lambda: "was not loaded" in reasons(pair, position, "another prompt"), 5)
    serves(pair)


# -- clients that go away -------------------------------------------------------------------------------------------


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
    assert metric(pair.prefill.url, EXPIRED) == expired  # nor what was for it
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
        wait_until("the load holds its blocks", lambda: metric(pair.decode.url, USAGE) > 0, 5, every_s=0.02)
    idle(pair, bound_s=5)
    serves(pair)


def test_offer_whose_decode_request_never_comes(pair: Pair) -> None:
    """The lease ends, and the prefill engine frees; no decode engine is needed for that."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"unloved-{next(numbers)}"}
    request = {**body(pair, words(600), max_tokens=1), "kv_transfer_params": params}
    expired, failed = metric(pair.prefill.url, EXPIRED), failures(pair.prefill, side="offer", reason="expired")
    assert ask(pair.prefill.url, request).ok
    assert metric(pair.prefill.url, USAGE) > 0
    idle(pair, bound_s=LEASE_S + 10)
    wait_until("it is counted", lambda: metric(pair.prefill.url, EXPIRED) > expired, 5)
    assert metric(pair.prefill.url, EXPIRED) == expired + 1
    assert failures(pair.prefill, side="offer", reason="expired") == failed + 1


# -- the prefill engine dies ----------------------------------------------------------------------------------------


def test_prefill_killed_during_loads_and_restarted(pair: Pair) -> None:
    """Requests under way end by the policy, and how soon is printed; the decode engine serves on and finds the new prefill engine."""
    answers: list[Answer] = []
    requests = [body(pair, words(2200), max_tokens=64, stream=True) for _ in range(4)]
    threads = [
        threading.Thread(target=lambda request=request: answers.append(ask(pair.router.url, request, timeout_s=60))) for request in requests
    ]
    for thread in threads:
        thread.start()
    wait_until("the decode engine waits", lambda: metric(pair.decode.url, USAGE) > 0, 10, every_s=0.01)
    killed = time.monotonic()
    pair.kill_prefill()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    progress("prefill killed", time.monotonic() - killed, "all requests under way have ended")
    assert any(not answer.ok for answer in answers), answers
    # The decode engine serves what needs no prefill engine, and holds nothing of the rest.
    assert alone(pair, body(pair, words(200))).ok
    wait_until("no block in use", lambda: metric(pair.decode.url, USAGE) == 0, 5)

    pair.restart_prefill()
    serves(pair)


@contextlib.contextmanager
def traffic(pair: Pair, tokens: int = 24) -> Iterator[list[Answer]]:
    """Requests that need no prefill engine, streamed one after the other until the end; those that have ended so far."""
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
    """A prefill engine that hangs costs the requests that need it, and no other; when it goes on it is used again."""
    serves(pair)  # the engines know each other: it is this connection that is lost
    lost = {**body(pair, words(600)), "kv_transfer_params": from_prefill(pair, f"stopped-{next(numbers)}")}
    failed, of_lost = failures(pair.decode), failures(pair.decode, side="load", reason="peer_lost")
    wait_until("no load", lambda: metric(pair.decode.url, IN_FLIGHT, side="load") == 0, 5)
    with traffic(pair) as others, ThreadPoolExecutor(1) as pool:
        wait_until("others are measured", lambda: len(others) >= 6, 120)
        with pair.prefill.stopped():
            stopped = time.monotonic()
            waits = pool.submit(ask, pair.decode.url, lost, 30)
            wait_until("the load waits", lambda: metric(pair.decode.url, IN_FLIGHT, side="load") > 0 or waits.done(), 20, every_s=0.02)
            assert not waits.done(), waits.result()
            held = time.monotonic()  # not from the question on: a step that waited would only make that longer
            steps = {part: metric(pair.decode.url, STEPS, part=part) for part in ("worker", "scheduler")}
            assert not waits.result(60).ok
            ended = time.monotonic()
            so_far = len(others)
            wait_until("the next have ended", lambda: len(others) >= so_far + 2, 60)
            wait_until(
                "the steps of both are told",
                lambda: all(metric(pair.decode.url, STEPS, part=part) > told for part, told in steps.items()),
                10,
            )
    # A step that waits for the stopped engine is one long gap between two tokens of others, or makes all of them longer.
    came = [at for answer in others for at in answer.came]
    gaps = list(zip(came, came[1:]))
    before = [end - begin for begin, end in gaps if end <= stopped]
    during = [end - begin for begin, end in gaps if end > stopped and begin < ended]
    usual, then, longest = statistics.median(before), statistics.median(during), max(during)
    said = f"others' tokens every {then * 1e3:.0f} ms, before {usual * 1e3:.0f}; the longest gap was {longest:.2f} s, {max(before):.2f}"
    progress("prefill stopped", ended - stopped, f"its request has ended; {said}")
    assert then <= 3 * usual + 0.02, said
    assert longest < (ended - held) / 2, said
    wait_until("its failure is counted", lambda: failures(pair.decode, side="load", reason="peer_lost") > of_lost, 5)
    assert failures(pair.decode) == failed + 1
    wait_until("no load is under way", lambda: metric(pair.decode.url, IN_FLIGHT, side="load") == 0, 5)
    wait_until("the prefill engine answers again", pair.prefill.healthy, 10)
    idle(pair)
    served_again(pair)


# -- the decode engine dies -----------------------------------------------------------------------------------------


def test_decode_killed_during_loads_and_restarted(pair: Pair) -> None:
    """The prefill engine frees what was for it, long before the lease ends, and serves the next decode engine."""
    requests = [body(pair, words(2200), max_tokens=64) for _ in range(4)]
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = [pool.submit(ask, pair.router.url, request, 60) for request in requests]
        wait_until("the decode engine waits", lambda: metric(pair.decode.url, USAGE) > 0, 10, every_s=0.01)
        killed = time.monotonic()
        pair.decode.kill()
        assert not any(answer.result().ok for answer in answers)
    wait_until(
        "the prefill engine has freed",
        lambda: all(metric(pair.prefill.url, name) == 0 for name in (RUNNING, WAITING, USAGE)),
        20,
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


# -- another decode engine, that takes one request at a time -----------------------------------------------------------


@pytest.fixture(scope="module")
def narrow(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    other = Pair(
        Path(pair.model),
        tmp_path_factory.mktemp("narrow"),
        failure_policy="recompute",
        decode_args=["--max-num-seqs", "1"],
        decode_config={"bootstrap_allow": ["127.0.0.1"]},
        extra_env=FORKED,
        progress=progress,
    )
    try:
        other.decode.start()
        wait_ready([other.decode], progress=progress)
        other.warm(other.decode)
        yield other
    finally:
        other.stop()
    assert not other.leftovers()


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
    position = narrow.decode.log_size()
    answer = ask(narrow.decode.url, {**request, "kv_transfer_params": params})
    assert answer.ok, answer
    assert answer.text == alone(pair, request).text
    wait_until(f"{said!r} in the log", lambda: said in narrow.decode.log_since(position), 5)
    wait_until("no block in use", lambda: metric(narrow.decode.url, USAGE) == 0, 5)


def test_recompute_when_prefill_stops(pair: Pair, narrow: Pair) -> None:
    request = body(pair, words(300))
    expected = alone(pair, request)
    params = from_prefill(pair, f"stopped-{next(numbers)}")
    with pair.prefill.stopped():
        answer = ask(narrow.decode.url, {**request, "kv_transfer_params": params}, timeout_s=30)
    assert answer.ok, answer
    assert answer.text == expected.text
    wait_until("the prefill engine answers again", pair.prefill.healthy, 10)
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
    wait_until("no block in use", lambda: metric(narrow.decode.url, USAGE) == 0, 5)


def test_queue_longer_than_the_lease(pair: Pair, narrow: Pair) -> None:
    """A request that waits on decode for a place is claimed: what prefill has for it outlives the lease."""
    transfer = f"queued-{next(numbers)}"
    to_load = from_prefill(pair, transfer)
    request = body(pair, words(600))
    expected = alone(pair, request)
    position = narrow.decode.log_size()
    answers: list[Answer] = []
    queued = threading.Thread(target=lambda: answers.append(ask(narrow.decode.url, {**request, "kv_transfer_params": to_load})))
    with open_stream(narrow.decode.url, body(pair, words(20), max_tokens=4000, ignore_eos=True)):
        wait_until("decode works", lambda: metric(narrow.decode.url, RUNNING) == 1, 10, every_s=0.02)
        queued.start()
        wait_until("one queues", lambda: metric(narrow.decode.url, WAITING) == 1, 10, every_s=0.02)
        for name in (transfer, f"unloved-{next(numbers)}"):
            to_offer = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
            assert ask(pair.prefill.url, {**request, "max_tokens": 1, "cache_salt": name, "kv_transfer_params": to_offer}).ok
        both = metric(pair.prefill.url, USAGE)
        wait_until("the other offer has expired", lambda: metric(pair.prefill.url, USAGE) < both, LEASE_S + 10)
        assert metric(pair.prefill.url, USAGE) > 0  # the one that is claimed
        assert metric(narrow.decode.url, WAITING) == 1
    queued.join(30)
    assert not queued.is_alive()
    assert answers[0].ok and answers[0].text == expected.text
    (load,) = new_loads(narrow, position, 1)
    assert load["transfer_id"] == transfer


# -- prompts that are sent while they are computed ------------------------------------------------------------------------


def count(pair: Pair, name: str) -> float:
    return metric(f"http://127.0.0.1:{pair.bootstrap_port}", name)


@pytest.mark.parametrize("tokens", [100, CHUNK, 2300])
def test_prompts_with_partial_offers(pair: Pair, tokens: int) -> None:
    before = count(pair, "kvconn_grown_total")
    request = body(pair, words(tokens))
    answer = ask(pair.router.url, request)
    assert answer.ok and answer.text == alone(pair, request).text
    if tokens > CHUNK:  # decode has asked long before the last chunk
        assert count(pair, "kvconn_grown_total") == before + 1


def test_eight_prompts_with_partial_offers_at_once(pair: Pair) -> None:
    requests = [body(pair, words(700 + 150 * n)) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda request: ask(pair.router.url, request, timeout_s=120), requests))
    for request, answer in zip(requests, answers):
        assert answer.ok and answer.text == alone(pair, request).text


def test_preempted_after_partial_offers(pair: Pair) -> None:
    """vLLM gives the blocks to others at once, and computes the prompts again, in other blocks."""
    withdrawn = count(pair, "kvconn_retracted_total")
    for attempt in range(10):
        requests = [body(pair, words(3000)) for _ in range(2)]
        grown = count(pair, "kvconn_grown_total")
        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(ask, pair.router.url, request, timeout_s=120) for request in requests]
            wait_until("one grows", lambda g=grown: count(pair, "kvconn_grown_total") > g, 60, every_s=0.005)
            status, answer = http_request("POST", pair.prefill.url + "/reset_prefix_cache?reset_running_requests=true", timeout_s=60)
            assert status == 200, answer
            texts = [each.result() for each in answers]
        for request, answer in zip(requests, texts):
            assert answer.ok, (attempt, answer, pair.prefill.log_tail())
            assert answer.text == alone(pair, request).text
        if count(pair, "kvconn_retracted_total") > withdrawn:
            return
    raise AssertionError("nothing was taken back in 10 attempts")


# -- a decode engine that is set up otherwise -----------------------------------------------------------------------------


def test_engine_that_does_not_fit(pair: Pair, tmp_path: Path) -> None:
    """The request fails with both values in the log, and both engines live. (What else need not fit, and what ends a start:
    python/tests/test_vllm_connector.py.)"""
    other = Pair(Path(pair.model), tmp_path, dtype="bfloat16", extra_env=FORKED, progress=progress)
    try:
        other.decode.start()
        wait_ready([other.decode], progress=progress)
        other.warm(other.decode)
        position = other.decode.log_size()
        params = from_prefill(pair, f"unfit-{next(numbers)}")
        answer = ask(other.decode.url, {**body(pair, words(300)), "kv_transfer_params": params}, timeout_s=30)
        assert not answer.ok, answer
        both = ("float32", "bfloat16")
        wait_until("both values in the log", lambda: all(value in reasons(other, position, "was not loaded") for value in both), 5)
        assert ask(other.decode.url, body(pair, words(200))).ok
        wait_until("no block in use", lambda: metric(other.decode.url, USAGE) == 0, 5)
    finally:
        other.stop()
    assert not other.leftovers()
