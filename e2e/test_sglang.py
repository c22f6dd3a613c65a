"""A real pair of SGLang servers with pages of 16 tokens and a small --chunked-prefill-size, with failures.

Run with the Python of an environment that has SGLang, kvconn and pytest. SGLang looks for leaks itself whenever it is
idle, and ends when a page or a request's slot is missing: so a server that lives has none left.
"""

from __future__ import annotations

import json
import random
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from asking import request, wait_until
from servers import Server, leaving_nothing, wait_ready
from sglang_servers import POOL, Alone, Reply, SGLangPair, post, prompt

CHUNK = 256
STORM = 500


@pytest.fixture(scope="module")
def pair(sglang_model: Path, sglang_workdir: Path, alone: Alone) -> Iterator[SGLangPair]:
    the_pair = SGLangPair(
        sglang_model,
        sglang_workdir / "logs" / "pages16",
        "--page-size",
        "16",
        prefill_args=["--chunked-prefill-size", str(CHUNK)],
        forked=False,
    )
    with leaving_nothing(the_pair):
        wait_ready(alone.servers)
        yield the_pair


@pytest.fixture(autouse=True)
def servers_live(pair: SGLangPair) -> Iterator[None]:
    """What a test kills and, when it fails, does not start again costs the other tests nothing."""
    yield
    try:
        pair.check()
    finally:
        dead = [server for server in pair.servers if not server.alive()]
        for server in dead:
            server.start()
        if dead:
            wait_ready(dead)


def same(pair: SGLangPair, alone: Alone, ids: list[int]) -> None:
    expected, answer = alone.ask(ids), pair.ask(ids)
    assert expected.ok, expected
    assert answer.ok, (answer, pair.decode.log_tail(), pair.prefill.log_tail())
    assert answer.ids == expected.ids != []


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 900, 1900])
def test_text_equals_single_server(pair: SGLangPair, alone: Alone, tokens: int) -> None:
    same(pair, alone, prompt(tokens, "text"))
    assert pair.ways() == {"local"}


def test_eight_at_once(pair: SGLangPair, alone: Alone) -> None:
    prompts = [prompt(tokens, "eight") for tokens in (3, 16, 40, 100, 280, 300, 530, 700)]
    expected = [alone.ask(ids) for ids in prompts]
    answers = pair.ask_many(prompts)
    assert [answer.error for answer in answers] == [""] * len(prompts)
    assert [answer.ids for answer in answers] == [answer.ids for answer in expected]


def test_streamed(pair: SGLangPair, alone: Alone) -> None:
    ids = prompt(200, "streamed")
    _, answer = pair.ask_both(pair.body(ids, stream=True))
    assert answer.ok and answer.ids == alone.ask(ids).ids and 0 < answer.ttft_s < answer.total_s, answer


def test_prefix_that_prefill_has_cached(pair: SGLangPair, alone: Alone) -> None:
    """The prefill engine sends cached pages before it computes the others."""
    ids = prompt(400, "cached")
    same(pair, alone, ids)
    same(pair, alone, ids + prompt(70, "more"))


def test_pages_are_given_back(pair: SGLangPair, alone: Alone) -> None:
    """Each side has pages for two of these requests only; the others wait until pages are given back."""
    prompts = [prompt(1900, f"pool {n}") for n in range(3)]
    assert 2 * 1900 < POOL < 3 * 1900
    answers = pair.ask_many(prompts, max_tokens=2)
    assert [answer.error for answer in answers] == [""] * 3
    assert answers[0].ids == alone.ask(prompts[0], 2).ids


def test_client_goes_in_mid_transfer(pair: SGLangPair, alone: Alone) -> None:
    """At any moment of a request's life, on one side or on both. A client that stays gets an answer: the text, or the reason."""
    whole = max(pair.ask(prompt(900, "whole"), 1).total_s, 0.05)
    chosen = random.Random("mid transfer")
    for n in range(15):
        after, who = chosen.uniform(0.05, 1.0) * whole, n % 3
        times = (None if who == 0 else after, None if who == 1 else after)
        replies = pair.ask_both(pair.body(prompt(900, f"goes {n}"), 1), hang_up_s=times)
        for reply, hang_up in zip(replies, times):
            assert reply.ok or hang_up is not None or "room" in reply.error, reply
    same(pair, alone, prompt(300, "after mid transfer"))
    test_pages_are_given_back(pair, alone)


def test_abort_storm(pair: SGLangPair, alone: Alone) -> None:
    """Many clients that go away at once, some before their request is heard of."""
    chosen = random.Random("storm")
    bodies = [(pair.body(prompt(chosen.choice((5, 40, 300)), f"storm {n}"), 4), chosen.uniform(0, 0.3)) for n in range(STORM)]
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda work: pair.ask_both(work[0], hang_up_s=(work[1], work[1])), bodies))
    pair.check()
    same(pair, alone, prompt(300, "after the storm"))
    test_pages_are_given_back(pair, alone)


def test_prefill_killed_and_restarted(pair: SGLangPair, alone: Alone) -> None:
    """Transfers under way fail with the reason. Decode ends the requests whose caches it has, and then serves new ones."""
    ids = prompt(200, "killed")
    expected = alone.ask(ids, 400)
    with ThreadPoolExecutor(8) as pool:
        position = pair.decode.log_size()
        decoding = pool.submit(pair.ask_both, pair.body(ids, 400, stream=True))
        wait_until("the decode server decodes", lambda: "Decode batch" in pair.decode.log_since(position), 120)
        position = pair.prefill.log_size()
        under_way = [pool.submit(pair.ask_both, pair.body(prompt(1900, f"mid {n}"), 1)) for n in range(4)]
        wait_until("the prefill server computes", lambda: "Prefill batch" in pair.prefill.log_since(position), 120)
        pair.prefill.kill()
        replies = [work.result()[1] for work in under_way]
        assert not all(reply.ok for reply in replies), "all were served before the server was killed"
        for n in range(3):
            replies.append(post(pair.decode.url, pair.body(prompt(100, f"dead {n}"))))
            assert f"127.0.0.1:{pair.bootstrap_port}" in replies[-1].error, replies
        for reply in replies:
            assert reply.ok or ("timed out" not in reply.error and "room" in reply.error), reply
        answer = decoding.result()[1]
    assert answer.ok and answer.ids == expected.ids, answer
    pair.check_decode()
    pair.prefill.start()
    wait_ready([pair.prefill])
    same(pair, alone, prompt(300, "back"))
    test_pages_are_given_back(pair, alone)


def test_prefill_killed_while_requests_queue_on_decode(pair: SGLangPair, alone: Alone) -> None:
    """Decode has pages for two, which it decodes to the end; the others wait for pages there, and hear why they get none.

    They hear it as claims: none of them had pages, and so a load, before its prefill server was gone.
    """
    long, limit = prompt(1200, "long"), 700
    with ThreadPoolExecutor(8) as pool:
        position = pair.decode.log_size()
        decoding = [pool.submit(pair.ask_both, pair.body(long, limit, stream=True)) for _ in range(2)]
        wait_until("the decode server decodes both", lambda: "#running-req: 2" in pair.decode.log_since(position), 120)
        prompts = [prompt(1900, f"queued {n}") for n in range(4)]
        position = pair.decode.log_size()
        queued = [pool.submit(pair.ask_both, pair.body(ids, 1)) for ids in prompts]
        wait_until("all of them queue there", lambda: "#prealloc-req: 4" in pair.decode.log_since(position), 120)
        assert not any(work.done() for work in decoding)
        pair.prefill.kill()
        replies = [work.result()[1] for work in queued]
        ended = re.findall(r"transfer ended transfer_id=\S+ side=(\w+) code=(\S+)", pair.decode.log_since(position))
        assert ended == [("claim", "peer-lost")] * len(prompts), ended
        answers = [work.result()[1] for work in decoding]
    for reply in replies:
        assert not reply.ok and "decode dp0 tp0 pp0, room" in reply.error and "is gone" in reply.error, replies
    expected = alone.ask(long, limit)
    assert [answer.ids for answer in answers] == [expected.ids] * 2, answers
    pair.check_decode()
    pair.prefill.start()
    wait_ready([pair.prefill])
    same(pair, alone, prompt(300, "back again"))
    test_pages_are_given_back(pair, alone)


def test_decode_killed_and_restarted(pair: SGLangPair, alone: Alone) -> None:
    """The prefill server's pages come back, and its clients get an answer."""
    body = pair.body(prompt(1900, "decode dies"), 1)
    replies: list[Reply] = []
    waiting = threading.Thread(target=lambda: replies.append(post(pair.prefill.url, body, timeout_s=60)))
    position = pair.prefill.log_size()
    lost = threading.Thread(target=lambda: post(pair.decode.url, body, timeout_s=60))
    waiting.start()
    lost.start()
    wait_until("the prefill server works on it", lambda: "Prefill batch" in pair.prefill.log_since(position), 60)
    pair.decode.kill()
    waiting.join()
    lost.join()
    assert replies[0].ok or "room" in replies[0].error, replies
    pair.decode.start()
    wait_ready([pair.decode])
    same(pair, alone, prompt(300, "decode is back"))
    test_pages_are_given_back(pair, alone)


def test_unwanted_request_at_prefill_only(pair: SGLangPair, alone: Alone) -> None:
    """A request that no decode engine asks for holds no page of the prefill engine, and ends with its client."""
    answers = [post(pair.prefill.url, pair.body(prompt(1900, f"unwanted {n}")), hang_up_s=0.5) for n in range(4)]
    assert not any(answer.ok for answer in answers)
    same(pair, alone, prompt(300, "after the unwanted"))


def test_weights_that_are_replaced(pair: SGLangPair, alone: Alone) -> None:
    """While only one server of the pair has replaced its weights, a request fails with the reason. When both servers have, the text
    is the single server's again."""

    def replace(server: Server) -> None:
        # A server that still computes for an earlier test replaces its weights and says that it has not: its cache cannot be flushed.
        wait_until("the server is idle", lambda: request("POST", server.url + "/flush_cache", {}, timeout_s=30)[0] == 200, 60)
        status, answer = request("POST", server.url + "/update_weights_from_disk", {"model_path": pair.model}, timeout_s=120)
        assert status == 200 and json.loads(answer)["success"], answer

    for first, second in ((pair.decode, pair.prefill), (pair.prefill, pair.decode)):
        replace(first)
        reply = pair.ask(prompt(300, f"only {first.name}"))
        assert not reply.ok and "and weights replaced as often" in reply.error, reply
        replace(second)
        same(pair, alone, prompt(300, f"{second.name} too"))
