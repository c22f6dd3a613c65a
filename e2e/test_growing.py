"""Prompts that are sent while they are computed, on a real pair: layers of each chunk, and what vLLM takes back of them."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
from servers import Answer, Pair, ask, metric, wait_until
from servers import request as http_request

CHUNK = 512  # tokens of a step
numbers = itertools.count(1)


def progress(name: str, seconds: float, text: str) -> None:
    print(f"  [{seconds:4.0f} s] {name}: {text}", file=sys.stderr, flush=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    workdir = tmp_path_factory.mktemp("growing")
    model = tiny_model.make(workdir / "model-fat", fat=True)
    the_pair = Pair(
        model,
        workdir / "logs",
        prefill_args=["--max-num-batched-tokens", str(CHUNK)],
        extra_env={"VLLM_SERVER_DEV_MODE": "1"},  # has a call that preempts all that runs
        progress=progress,
    )
    try:
        with the_pair:
            yield the_pair
    finally:
        left = the_pair.leftovers()
    assert not left, f"left behind: {left}"


@pytest.fixture(autouse=True)
def nothing_is_left(pair: Pair) -> Iterator[None]:
    yield
    for server in pair.servers:
        server.check_alive()
    for server in (pair.prefill, pair.decode):
        wait_until(f"{server.name}: no block in use", lambda s=server: metric(s.url, "vllm:kv_cache_usage_perc") == 0, 30)


def body(pair: Pair, tokens: int) -> dict[str, Any]:
    text = f"{next(numbers)} of {time.monotonic_ns()}: the woods are lovely, dark and deep, but I have promises to keep. "
    return {"model": pair.served, "prompt": (text * (tokens // len(text) + 1))[:tokens], "max_tokens": 12, "temperature": 0}


def alone(pair: Pair, request: dict[str, Any]) -> Answer:
    answer = ask(pair.decode.url, {**request, "cache_salt": f"alone-{next(numbers)}"})
    assert answer.ok, answer
    return answer


def count(pair: Pair, name: str) -> float:
    return metric(f"http://127.0.0.1:{pair.bootstrap_port}", name)


@pytest.mark.parametrize("tokens", [100, CHUNK, 1000, 2300])
def test_prompts_that_grow(pair: Pair, tokens: int) -> None:
    before = count(pair, "kvconn_grown_total")
    request = body(pair, tokens)
    answer = ask(pair.router.url, request)
    assert answer.ok and answer.text == alone(pair, request).text
    if tokens > CHUNK:  # decode has asked long before the last chunk
        assert count(pair, "kvconn_grown_total") == before + 1


def test_eight_that_grow_at_once(pair: Pair) -> None:
    requests = [body(pair, 700 + 150 * n) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda request: ask(pair.router.url, request, timeout_s=120), requests))
    for request, answer in zip(requests, answers):
        assert answer.ok and answer.text == alone(pair, request).text


def test_preempted_while_they_grow(pair: Pair) -> None:
    """vLLM gives the blocks to others at once, and computes the prompts again, in other blocks."""
    taken_back = count(pair, "kvconn_retracted_total")
    for attempt in range(10):
        requests = [body(pair, 3000) for _ in range(2)]
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
        if count(pair, "kvconn_retracted_total") > taken_back:
            return
    raise AssertionError("nothing was taken back in 20 attempts")
