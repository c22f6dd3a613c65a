"""Pairs of real vLLM servers whose models have states (Mamba, short convolutions, gated delta nets): texts must equal a single
engine's. A state that is of one token too many, or not carried, changes every text.

One pair is up at a time. With KVCONN_E2E_STATES="granite mamba2 falcon lfm2 delta" all those are run that vLLM computes on a CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
from asking import ask, metric, open_stream, wait_idle, wait_until
from kinds import BLOCK, alone, body, progress, through, words
from servers import leaving_nothing
from vllm_pair import Pair

KINDS = os.environ.get("KVCONN_E2E_STATES", "granite mamba2").split()
# vLLM's Mamba 2 on CPU has no states at the borders of blocks within a step, so with prefix caching a step must be one block.
ARGS = {
    "granite": ["--max-num-batched-tokens", str(BLOCK), "--max-num-seqs", "16"],
    "falcon": ["--no-enable-prefix-caching"],
}
# vLLM on CPU gives another text to a prompt of these in a batch, or in steps of other lengths, without any transfer too.
UNSTEADY = ("lfm2", "delta")
STEP = ["--max-num-batched-tokens", "512"]  # of prefill: long prompts go in several steps


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    kind = request.param
    workdir = tmp_path_factory.mktemp(f"states-{kind}")
    the_pair = Pair(
        tiny_model.make(workdir / f"model-{kind}", kind=kind),
        workdir / "logs",
        progress=progress,
        dtype="bfloat16" if kind == "delta" else "float32",
        failure_policy="recompute" if kind == "mamba2" else "fail",
        forked=True,
        extra_args=ARGS.get(kind, []),
        prefill_args=[] if kind == "granite" else STEP,
    )
    with leaving_nothing(the_pair):
        yield the_pair


@pytest.fixture(autouse=True)
def nothing_is_held(pair: Pair) -> Iterator[None]:
    yield
    for server in (pair.prefill, pair.decode):
        if server is pair.prefill and not server.alive():
            continue
        server.check_alive()
        wait_idle(server.name, server.url, 15)


def steady(pair: Pair) -> bool:
    return not any(kind in pair.model for kind in UNSTEADY)


def asked(pair: Pair, tokens: int) -> tuple[dict[str, Any], str]:
    """A request with a prompt of so many tokens, and the text of a single engine that decodes the last of them, as a pair does."""
    begin = words(tokens - 1)
    text = alone(pair, body(pair, begin, max_tokens=17)).text
    return body(pair, begin + text[0]), text[1:]


# 2: what is left of it for prefill is one token. The last token opens a block, fills one, and stands before one's end.
LENGTHS = [2, 3, 50, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 300, 512, 513, 514, 900, 8 * BLOCK - 1, 1400, 1900]


@pytest.mark.parametrize("tokens", LENGTHS)
def test_text_equals_a_single_engines(pair: Pair, tokens: int) -> None:
    for _ in range(1 if steady(pair) else 4):  # one text in some ten is another one; with a wrong state all are
        request, expected = asked(pair, tokens)
        answer, load = through(pair, request)
        assert load["blocks"] > 0 and len(answer.text) == 16
        if answer.text == expected:
            break
    assert answer.text == expected


def test_prompt_of_one_token(pair: Pair) -> None:
    """Decode computes it: there is nothing to load."""
    request = body(pair, "x")
    answer = ask(pair.router.url, request)
    assert answer.ok and answer.text == alone(pair, request).text


def test_cached_prefix(pair: Pair) -> None:
    """Decode has a prefix of the prompt in its cache, with the state at the prefix's end."""
    if "granite" not in pair.model:
        pytest.skip("of the pair that has prefix caching")
    prefix = words(5 * BLOCK)
    assert ask(pair.decode.url, body(pair, prefix + "so", max_tokens=1)).ok
    for more in (words(200), words(2 * BLOCK + 1)):
        request = body(pair, prefix + more)
        answer, load = through(pair, request)
        assert answer.text == alone(pair, request).text
        assert max(load["first_block"]) == 5 and min(load["first_block"]) == 0


def test_prefix_that_came_by_a_load(pair: Pair) -> None:
    """Decode has the prefix's attention, but no state of its end. It loads what follows, and the state."""
    if "granite" not in pair.model:
        pytest.skip("of the pair that has prefix caching")
    prefix = words(5 * BLOCK)
    for more, first in ((words(200), 0), (words(210), 5), (words(2 * BLOCK + 1), 5)):
        request = body(pair, prefix + more)
        answer, load = through(pair, request)
        assert answer.text == alone(pair, request).text
        assert max(load["first_block"]) == first and min(load["first_block"]) == 0


def test_many_at_once(pair: Pair) -> None:
    requests, expected = zip(*(asked(pair, 100 + 170 * n) for n in range(8)))
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda request: ask(pair.router.url, {**request, "stream": True}), requests))
    assert [answer.error for answer in answers] == [""] * len(requests)
    if steady(pair):
        assert [answer.text for answer in answers] == list(expected)


def test_clients_that_leave(pair: Pair) -> None:
    """In all phases of a request; what comes after them is right."""
    for n in range(12):
        with open_stream(pair.router.url, body(pair, words(400 + 100 * n), max_tokens=64)) as connection:
            connection.sock.settimeout(0.05 * n)
            try:
                connection.sock.recv(1)
            except TimeoutError:
                continue
            except BlockingIOError:  # it leaves at once
                continue
    request, expected = asked(pair, 700)
    answer, _ = through(pair, request)
    assert answer.text == expected or not steady(pair)


def test_prefill_is_killed(pair: Pair) -> None:
    """The last test of a pair: decode ends the requests that wait, or computes them if its policy says so, and lives."""
    requests = [body(pair, words(1500 + n)) for n in range(4)]
    expected = [alone(pair, request).text for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = [pool.submit(ask, pair.router.url, request) for request in requests]
        wait_until("prefill computes", lambda: metric(pair.prefill.url, "vllm:num_requests_running") > 0, every_s=0.01)
        pair.kill_prefill()
        ended = [answer.result(timeout=60) for answer in answers]
    assert not steady(pair) or all(answer.text == text for answer, text in zip(ended, expected) if answer.ok)
    assert alone(pair, requests[0]).text == expected[0]
