"""Real SGLang servers of several ranks: tensor parallel ones, pipeline stages, data parallel ones. Texts must equal the single
server's. A request that fails on one rank fails on all ranks.

Run with the Python of an environment that has SGLang, kvconn and pytest. Two servers are up at a time: each test says which
ranks it needs on either side, and a server that has others is replaced at its ports.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from asking import wait_until
from sglang_servers import Alone, Reply, SGLangPair, post, prompt
from test_sglang import same

Up = Callable[[str, str], None]
ONE, TWO = "--tp-size 1", "--tp-size 2"
STAGES, DATA_PARALLEL = "--pp-size 2", "--dp-size 2"
CHUNK = 256


@pytest.fixture(scope="module")
def pair(sglang_model: Path, sglang_workdir: Path) -> Iterator[SGLangPair]:
    """The pair is not started: each test says what it needs."""
    args = ("--page-size", "16", "--chunked-prefill-size", str(CHUNK))
    the_pair = SGLangPair(sglang_model, sglang_workdir / "logs" / "ranks", *args)
    try:
        yield the_pair
    finally:
        the_pair.stop()
    left = the_pair.leftovers()
    assert not left, f"left behind: {left}"


@pytest.fixture
def up(pair: SGLangPair, alone: Alone) -> Up:
    return lambda prefill, decode: pair.up(prefill, decode, *alone.servers)


def texts(pair: SGLangPair, alone: Alone, what: str) -> None:
    """The shortest and the longest alone, the others at once: of one request at a time the servers' steps cost minutes in all."""
    for tokens in (1, 1900):
        same(pair, alone, prompt(tokens, what))
    prompts = [prompt(tokens, f"many {what}") for tokens in (3, 16, 17, 40, 100, CHUNK + 1, 280, 300, 530, 700)]
    with ThreadPoolExecutor(1) as pool:  # the single server has them one by one, beside the pair
        expected = pool.map(alone.ask, prompts)
        answers = pair.ask_many(prompts, at_once=len(prompts))
    assert [answer.error for answer in answers] == [""] * len(prompts)
    assert [answer.ids for answer in answers] == [answer.ids for answer in expected]
    assert all(len(answer.ids) == 12 for answer in answers)


def aborts(pair: SGLangPair, alone: Alone, what: str) -> None:
    """Clients that go away at any moment. A server that has lost a page ends by itself when it is idle."""
    length = 2 * CHUNK + 100  # three chunks
    whole = max(pair.ask(prompt(length, f"whole {what}"), 1).total_s, 0.05)
    for n in range(6):
        after = (n + 1) / 7 * whole
        times = (None if n % 3 == 0 else after, None if n % 3 == 1 else after)
        for reply, hang_up in zip(pair.ask_both(pair.body(prompt(length, f"goes {n} {what}"), 1), hang_up_s=times), times):
            assert reply.ok or hang_up is not None or "room" in reply.error, reply
    same(pair, alone, prompt(300, f"after aborts {what}"))
    pair.check()


def begin(pool: ThreadPoolExecutor, pair: SGLangPair, what: str) -> list[Future[tuple[Reply, Reply]]]:
    """Four long requests, of which the prefill server has begun to compute one."""
    position = pair.prefill.log_size()
    under_way = [pool.submit(pair.ask_both, pair.body(prompt(1900, f"{what} {n}"), 1)) for n in range(4)]
    wait_until("the prefill server computes", lambda: "Prefill batch" in pair.prefill.log_since(position), 120)
    return under_way


def without_prefill(pair: SGLangPair, under_way: list[Future[tuple[Reply, Reply]]]) -> None:
    """The decode server says of each request why it failed, and lives."""
    replies = [work.result()[1] for work in under_way]
    assert not all(reply.ok for reply in replies), "all were served before the server was killed"
    replies.append(post(pair.decode.url, pair.body(prompt(100, "dead")), timeout_s=60))
    assert f"127.0.0.1:{pair.bootstrap_port}" in replies[-1].error, replies[-1]
    for reply in replies:
        # The reason, and not only that another rank has one.
        assert reply.ok or ("room" in reply.error and "timed out" not in reply.error and "another rank" not in reply.error), reply
    pair.check_decode()


def test_stages_to_two(pair: SGLangPair, alone: Alone, up: Up) -> None:
    """Each decode rank takes its heads of one half of the layers from one pipeline stage, those of the other from the other."""
    up(STAGES, TWO)
    texts(pair, alone, "stages to two")
    aborts(pair, alone, "stages to two")


def test_prefill_killed_and_back_with_other_ranks(pair: SGLangPair, alone: Alone, up: Up) -> None:
    up(STAGES, TWO)
    ids = prompt(200, "killed")
    expected = alone.ask(ids, 120)
    with ThreadPoolExecutor(8) as pool:
        position = pair.decode.log_size()
        decoding = pool.submit(pair.ask_both, pair.body(ids, 120))
        wait_until("the decode server decodes", lambda: "Decode batch" in pair.decode.log_since(position), 120)
        under_way = begin(pool, pair, "prefill killed")
        pair.prefill.kill()
        without_prefill(pair, under_way)
        answer = decoding.result()[1]
    assert answer.ok and answer.ids == expected.ids, answer
    up(TWO, TWO)
    same(pair, alone, prompt(300, "back"))


def test_two_to_two(pair: SGLangPair, alone: Alone, up: Up) -> None:
    up(TWO, TWO)
    texts(pair, alone, "two to two")
    aborts(pair, alone, "two to two")


def test_a_rank_of_decode_killed(pair: SGLangPair, alone: Alone, up: Up) -> None:
    """SGLang ends the whole server then: the prefill server gives the pages back, and serves the next one."""
    up(TWO, TWO)
    with ThreadPoolExecutor(8) as pool:
        under_way = begin(pool, pair, "decode killed")
        pair.decode.kill_one("sglang::scheduler_TP1")
        for work in under_way:
            reply = work.result()[0]
            assert reply.ok or "room" in reply.error, reply
    wait_until("the decode server has ended", lambda: not pair.decode.alive(), 60)
    pair.check([pair.prefill])
    up(TWO, ONE)
    same(pair, alone, prompt(300, "decode is back"))


def test_two_to_one(pair: SGLangPair, alone: Alone, up: Up) -> None:
    up(TWO, ONE)
    texts(pair, alone, "two to one")
    aborts(pair, alone, "two to one")


def test_a_rank_of_prefill_killed(pair: SGLangPair, alone: Alone, up: Up) -> None:
    up(TWO, ONE)
    with ThreadPoolExecutor(8) as pool:
        under_way = begin(pool, pair, "rank killed")
        pair.prefill.kill_one("sglang::scheduler_TP1")
        without_prefill(pair, under_way)


def test_data_parallel_ranks(pair: SGLangPair, alone: Alone, up: Up) -> None:
    """SGLang deals the requests out by their rooms. Before, the decode server has met servers of one such rank at this port."""
    up(DATA_PARALLEL, ONE)
    texts(pair, alone, "data parallel")
