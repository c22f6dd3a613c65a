"""A third SGLang server beside a pair: it changes its role while the pair serves (SGLang's --enable-pd-role-switch).

Run with the Python of an environment that has SGLang, kvconn and pytest.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from asking import wait_until
from servers import Server, free_ports, leaving_nothing, wait_ready
from sglang_servers import Alone, Reply, SGLangPair, post, prompt


@dataclass
class Three:
    pair: SGLangPair
    third: Server
    port: int  # of the third server's bootstrap

    def ask(self, prefill: Server, decode: Server, ids: list[int], max_tokens: int = 12) -> Reply:
        body = self.pair.body(ids, max_tokens, bootstrap_port=self.port if prefill is self.third else self.pair.bootstrap_port)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(post, prefill.url, body)
            reply = post(decode.url, body)
            first.result()
        return reply

    def turn(self, role: str) -> tuple[int, dict[str, Any]]:
        """Asks the third server for another role: the status and SGLang's answer."""
        # SGLang wants to be told what its CUDA graphs would take, also where there are none.
        said = json.dumps({"new_role": role, "decode_cuda_graph_memory_gb": 0.0}).encode()
        request = urllib.request.Request(f"{self.third.url}/pd_role_switch", said, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


@pytest.fixture(scope="module")
def three(sglang_model: Path, sglang_workdir: Path, alone: Alone) -> Iterator[Three]:
    pair = SGLangPair(sglang_model, sglang_workdir / "logs" / "switch", "--page-size", "16")
    api, port = free_ports(2)
    mode = ["--disaggregation-mode", "prefill", *pair.shared, "--disaggregation-bootstrap-port", str(port), "--enable-pd-role-switch"]
    third = pair.engine("third", api, *mode)
    with leaving_nothing(pair):
        wait_ready(alone.servers)
        yield Three(pair, third, port)


@contextlib.contextmanager
def busy(three: Three, expected: dict[int, list[int]]) -> Iterator[list[Reply]]:
    """The pair answers one request after the other, by the seed of its prompt."""
    replies: list[Reply] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            seed = len(replies) % len(expected)
            replies.append(three.ask(three.pair.prefill, three.pair.decode, prompt(150, seed)))

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield replies
        finally:
            over.set()
            asking.result()


def test_role_changes_while_the_pair_serves(three: Three, alone: Alone) -> None:
    pair, third = three.pair, three.third
    expected = {seed: alone.ask(prompt(150, seed)).ids for seed in range(4)}
    with busy(three, expected) as replies:
        for turn, role in enumerate(("prefill", "decode", "prefill", "decode", "prefill")):
            if turn:
                status, said = three.turn(role)
                assert status == 200 and said["success"], said
            ids = prompt(300, f"turn {turn}")
            prefill, decode = (third, pair.decode) if role == "prefill" else (pair.prefill, third)
            answer = three.ask(prefill, decode, ids)
            assert answer.ok, (turn, answer, third.log_tail())
            assert answer.ids == alone.ask(ids).ids, turn
            served = len(replies)
            wait_until("the pair serves on", lambda served=served: len(replies) > served, 60)
    for n, reply in enumerate(replies):
        assert reply.ok and reply.ids == expected[n % len(expected)], (n, reply)
    pair.check()


def test_role_does_not_change_under_a_request(three: Three, alone: Alone) -> None:
    """SGLang refuses, and the request goes on."""
    pair, third = three.pair, three.third
    assert three.turn("decode")[0] == 200
    ids = prompt(100, "long")
    expected = alone.ask(ids, 600)
    with ThreadPoolExecutor(1) as pool:
        position = third.log_size()
        asked = pool.submit(three.ask, pair.prefill, third, ids, 600)
        wait_until("the third server decodes", lambda: "#running-req: 1" in third.log_since(position), 60)
        status, said = three.turn("prefill")
        answer = asked.result()
    assert status == 400 and "not idle" in said["message"], said
    assert answer.ok and answer.ids == expected.ids, answer
    assert three.turn("prefill")[0] == 200
    pair.check()
