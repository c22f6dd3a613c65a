"""A real pair of vLLM servers, with failures. Run with the Python of an environment that has vLLM, kvconn and pytest.

Nothing sleeps to let something happen: every wait polls for what it waits for, up to a bound.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from asking import ask, metric, wait_until
from asking import request as http_request
from pair_tests import (
    BLOCK,
    CHUNK,
    GOOD,
    TOKEN_BYTES,
    USAGE,
    alone,
    body,
    from_prefill,
    idle,
    new_loads,
    numbers,
    progress,
    reasons,
    sent,
    serves,
    went_by,
    without,
    words,
)
from servers import Server, wait_ready
from vllm_pair import Pair

pytestmark = pytest.mark.usefixtures("servers_live")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("tokens", [2, BLOCK - 1, BLOCK, BLOCK + 1, 900, 2200])
def test_completion_equals_single_engine(pair: Pair, tokens: int, stream: bool) -> None:
    request = body(pair, words(tokens), stream=stream)
    expected = alone(pair, request)
    position, before = pair.decode.log_size(), sent(pair, "local")
    answer = ask(pair.router.url, request)
    assert answer.ok, answer
    assert (answer.text, answer.finish_reason) == (expected.text, expected.finish_reason)
    assert len(answer.text) == 16
    (load,) = new_loads(pair, position, 1)
    went_by(pair, load, "local", before)
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
    assert not answer.ok and answer.total_s < 30, answer  # it waits for nobody
    wait_until(f"{said!r} in the log", lambda: said in pair.decode.log_since(position))
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
    wait_until("the reason in the log", lambda: "the prefill engine says: transfer_id is 7" in pair.decode.log_since(position))


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "nonsense", "http://", "http://[::1", "ftp://127.0.0.1:1"])
def test_unreachable_prefill_engine(pair: Pair, address: str) -> None:
    """By the policy (fail) the request ends, in seconds."""
    params = {**GOOD, "transfer_id": f"unreachable-{next(numbers)}", "remote_bootstrap_addr": address}
    answer = ask(pair.decode.url, {**body(pair, words(200)), "kv_transfer_params": params}, timeout_s=30)
    assert not answer.ok
    assert answer.total_s < 25, answer
    serves(pair)


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
    wait_until(f"{said!r} in the log", lambda: "was not loaded" in reasons(pair, position, said))
    serves(pair)


@pytest.mark.parametrize("theirs", ["shorter", "another"])
def test_prompts_that_differ(pair: Pair, theirs: str) -> None:
    """Under one transfer id the prefill engine has a shorter prompt, or another of that length: a reason, and no wrong text."""
    transfer, text = f"{theirs}-{next(numbers)}", words(1200)
    params = from_prefill(pair, transfer)
    to_offer = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
    there = text[:200] if theirs == "shorter" else text[:-1] + "#"
    assert ask(pair.prefill.url, {**body(pair, there, max_tokens=1), "kv_transfer_params": to_offer}).ok
    position = pair.decode.log_size()
    answer = ask(pair.decode.url, {**body(pair, text), "kv_transfer_params": params}, timeout_s=30)
    assert not answer.ok, answer
    wait_until("the reason in the log", lambda: "was not loaded" in reasons(pair, position, "another prompt"))
    serves(pair)


def count(pair: Pair, name: str) -> float:
    return metric(f"http://127.0.0.1:{pair.bootstrap_port}", name)


@pytest.mark.parametrize("tokens", [100, CHUNK, 2300])
def test_prompts_with_partial_offers(pair: Pair, tokens: int) -> None:
    before = count(pair, "kvconn_partial_offers_total")
    request = body(pair, words(tokens))
    answer = ask(pair.router.url, request)
    assert answer.ok and answer.text == alone(pair, request).text
    if tokens > CHUNK:  # decode has asked long before the last chunk
        assert count(pair, "kvconn_partial_offers_total") == before + 1


def test_eight_prompts_with_partial_offers_at_once(pair: Pair) -> None:
    requests = [body(pair, words(700 + 150 * n)) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda request: ask(pair.router.url, request, timeout_s=120), requests))
    for request, answer in zip(requests, answers):
        assert answer.ok and answer.text == alone(pair, request).text


def test_preempted_after_partial_offers(pair: Pair) -> None:
    """vLLM gives the blocks to others at once, and computes the prompts again, in other blocks."""
    withdrawn = count(pair, "kvconn_withdrawn_total")
    for attempt in range(10):
        requests = [body(pair, words(3000)) for _ in range(2)]
        moved = count(pair, "kvconn_partial_offers_total")
        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(ask, pair.router.url, request, timeout_s=120) for request in requests]
            wait_until("one moves", lambda g=moved: count(pair, "kvconn_partial_offers_total") > g, 60, every_s=0.005)
            status, answer = http_request("POST", pair.prefill.url + "/reset_prefix_cache?reset_running_requests=true", timeout_s=60)
            assert status == 200, answer
            texts = [each.result() for each in answers]
        for request, answer in zip(requests, texts):
            assert answer.ok, (attempt, answer, pair.prefill.log_tail())
            assert answer.text == alone(pair, request).text
        if count(pair, "kvconn_withdrawn_total") > withdrawn:
            return
    raise AssertionError("nothing was taken back in 10 attempts")


def test_engine_that_does_not_fit(pair: Pair, tmp_path: Path) -> None:
    """The request fails with both values in the log, and both engines live. (What else need not fit, and what ends a start:
    python/tests/test_vllm_connector.py.)"""
    other = Pair(Path(pair.model), tmp_path, dtype="bfloat16", forked=True, progress=progress)
    try:
        other.decode.start()
        wait_ready([other.decode], progress=progress)
        other.warm(other.decode)
        position = other.decode.log_size()
        params = from_prefill(pair, f"unfit-{next(numbers)}")
        answer = ask(other.decode.url, {**body(pair, words(300)), "kv_transfer_params": params}, timeout_s=30)
        assert not answer.ok, answer
        both = ("float32", "bfloat16")
        wait_until("both values in the log", lambda: all(value in reasons(other, position, "was not loaded") for value in both))
        assert ask(other.decode.url, body(pair, words(200))).ok
        wait_until("no block in use", lambda: metric(other.decode.url, USAGE) == 0)
    finally:
        other.stop()
    assert not other.leftovers()


def test_weights_that_are_replaced(pair: Pair) -> None:
    """While one engine has replaced them, a load ends by the policy (fail), with the reason in the log. When both have, it goes well."""

    def replace(server: Server) -> None:
        status, answer = http_request("POST", server.url + "/collective_rpc", {"method": "reload_weights"}, timeout_s=120)
        assert status == 200, answer

    for first, second in ((pair.decode, pair.prefill), (pair.prefill, pair.decode)):
        replace(first)
        position = pair.decode.log_size()
        answer = ask(pair.router.url, body(pair, words(300)), timeout_s=30)
        assert not answer.ok and pair.loads(position) == [], answer
        wait_until("the reason in the log", lambda at=position: "weights replaced as often" in reasons(pair, at, "was not loaded"))
        assert alone(pair, body(pair, words(200))).ok
        replace(second)
        serves(pair)
