"""SGLang servers that change their roles while they run (--enable-pd-role-switch): a pair, and a third server beside it.

Run with the Python of an environment that has SGLang, kvconn and pytest.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from asking import HOST, metric, wait_until
from servers import Server, free_ports, leaving_nothing, wait_ready
from sglang_servers import Alone, Reply, SGLangPair, generate, post, prompt


@dataclass
class Three:
    pair: SGLangPair
    third: Server
    ports: dict[str, int]  # of each server's bootstrap, by its name

    def ask(self, prefill: Server, decode: Server, ids: list[int], max_tokens: int = 12) -> Reply:
        body = self.pair.body(ids, max_tokens, bootstrap_port=self.ports[prefill.name])
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(post, prefill.url, body)
            reply = post(decode.url, body)
            first.result()
        return reply


def asked_to_turn(server: Server, role: str) -> tuple[int, dict[str, Any]]:
    """The status and SGLang's answer."""
    # SGLang wants to be told what its CUDA graphs would take, also where there are none.
    said = json.dumps({"new_role": role, "decode_cuda_graph_memory_gb": 0.0}).encode()
    request = urllib.request.Request(f"{server.url}/pd_role_switch", said, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def turn(server: Server, role: str) -> None:
    """A server that has answered its last request may not count as idle yet."""
    answers: list[Any] = []

    def idle() -> bool:
        answers.append(asked_to_turn(server, role))
        return "not idle" not in answers[-1][1]["message"]

    wait_until(f"{server.name} is idle", idle, 30)
    status, said = answers[-1]
    assert status == 200 and said["success"], said


@pytest.fixture(scope="module")
def three(sglang_model: Path, sglang_workdir: Path, alone: Alone) -> Iterator[Three]:
    api, *ports = free_ports(3)
    pair = SGLangPair(
        sglang_model,
        sglang_workdir / "logs" / "switch",
        *("--page-size", "16", "--enable-pd-role-switch", "--disable-radix-cache"),  # as docs/sglang.md has it
        decode_args=["--disaggregation-bootstrap-port", str(ports[0])],
    )
    third = pair.engine("third", api, "--disaggregation-mode", "prefill", *pair.shared, "--disaggregation-bootstrap-port", str(ports[1]))
    with leaving_nothing(pair):
        wait_ready(alone.servers)
        yield Three(pair, third, {"prefill": pair.bootstrap_port, "decode": ports[0], "third": ports[1]})


@contextlib.contextmanager
def busy(ask_one: Callable[[list[int]], Reply], prompts: int) -> Iterator[list[Reply]]:
    """One request after the other is answered."""
    replies: list[Reply] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            replies.append(ask_one(prompt(150, len(replies) % prompts)))

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield replies
        finally:
            over.set()
            asking.result()


def same(three: Three, alone: Alone, prefill: Server, decode: Server, ids: list[int]) -> None:
    answer = three.ask(prefill, decode, ids)
    assert answer.ok, (answer, prefill.log_tail(), decode.log_tail())
    assert answer.ids == alone.ask(ids).ids


def test_role_changes_while_the_pair_serves(three: Three, alone: Alone) -> None:
    pair, third = three.pair, three.third
    expected = [alone.ask(prompt(150, seed)).ids for seed in range(4)]
    with busy(lambda ids: three.ask(pair.prefill, pair.decode, ids), len(expected)) as replies:
        for number, role in enumerate(("prefill", "decode", "prefill", "decode", "prefill")):
            if number:
                turn(third, role)
            prefill, decode = (third, pair.decode) if role == "prefill" else (pair.prefill, third)
            same(three, alone, prefill, decode, prompt(300, f"turn {number}"))
            served = len(replies)
            wait_until("the pair serves on", lambda served=served: len(replies) > served, 60)
    for n, reply in enumerate(replies):
        assert reply.ok and reply.ids == expected[n % len(expected)], (n, reply)
    pair.check()


def test_pair_changes_its_roles(three: Three, alone: Alone) -> None:
    pair = three.pair
    for roles in (("decode", "prefill"), ("prefill", "decode")):
        for server, role in zip((pair.prefill, pair.decode), roles):
            turn(server, role)
        prefill, decode = (pair.prefill, pair.decode) if roles[0] == "prefill" else (pair.decode, pair.prefill)
        same(three, alone, prefill, decode, prompt(300, roles))
    pair.check()


def test_role_does_not_change_under_a_request(three: Three, alone: Alone) -> None:
    """SGLang refuses, and the request goes on."""
    pair, third = three.pair, three.third
    turn(third, "decode")
    ids = prompt(100, "long")
    expected = alone.ask(ids, 600)
    with ThreadPoolExecutor(1) as pool:
        position = third.log_size()
        asked = pool.submit(three.ask, pair.prefill, third, ids, 600)
        wait_until("the third server decodes", lambda: "#running-req: 1" in third.log_since(position), 60)
        status, said = asked_to_turn(third, "prefill")
        answer = asked.result()
    assert status == 400 and "not idle" in said["message"], said
    assert answer.ok and answer.ids == expected.ids, answer
    turn(third, "prefill")
    pair.check()


@contextlib.contextmanager
def router(three: Three) -> Iterator[Server]:
    """kvconn's own, which has been given each server in both roles."""
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "kvconn", "proxy", "--contract", "sglang", "--port", str(port)]
    for server in (three.pair.prefill, three.pair.decode, three.third):
        argv += ["--prefill", server.url, "--decode", server.url]
    the_router = Server("router", argv, dict(three.pair.environment), three.pair.workdir / "router.log", f"http://{HOST}:{port}")
    the_router.start()
    try:
        wait_ready([the_router])
        yield the_router
    finally:
        the_router.stop()


def test_router_follows(three: Three, alone: Alone) -> None:
    """In the middle two parts the third server is alone in its role, so that no text comes without it. None is asked while a server turns.

    Each prompt comes twice: with a prefix cache, a server that has turned to decode would lose the pages of the second one.
    """
    pair, third = three.pair, three.third
    roles = {pair.prefill: "prefill", pair.decode: "decode", third: "prefill"}
    with router(three) as the_router:

        def known(server: Server) -> bool:
            return metric(the_router.url, "kvconn_proxy_server_up", absent=0, role=roles[server], url=server.url) == 1

        for number, moves in enumerate(
            (
                [],
                [(third, "decode"), (pair.decode, "prefill")],
                [(pair.decode, "decode"), (third, "prefill"), (pair.prefill, "decode")],
                [(pair.prefill, "prefill")],
            )
        ):
            for server, role in moves:
                turn(server, role)
                roles[server] = role
            wait_until("the router knows the roles", lambda: all(map(known, roles)))
            for each in range(4):
                ids = prompt(150, f"by the router {number} {each}")
                expected = alone.ask(ids).ids
                for _ in range(2):
                    answer = post(the_router.url, generate(ids, 12))
                    assert answer.ok and answer.ids == expected, (answer, the_router.log_tail())
    pair.check()


@pytest.mark.skipif(os.environ.get("KVCONN_E2E_LONG") != "1", reason="half a minute of both processors: docs/sglang.md has the command")
def test_roles_change_while_the_router_gives_all_three_requests(three: Three, alone: Alone) -> None:
    """Four clients ask without a pause. What the third server gets of its former role, the router gives another: no client hears of it.

    A server that always has requests is never idle, and SGLang turns none that is not. So one client alone asks until it has turned.
    """
    pair, third = three.pair, three.third
    asked = [prompt(150, f"load {n}") for n in range(6)]
    expected = [alone.ask(ids).ids for ids in asked]
    replies: list[tuple[int, Reply]] = []
    over, turned = threading.Event(), threading.Event()
    turned.set()
    with router(three) as the_router:

        def client(number: int) -> None:
            first = number == 0
            while not over.is_set():
                if not first:
                    turned.wait()
                number = (number + 1) % len(asked)
                replies.append((number, post(the_router.url, generate(asked[number], 12))))

        def served(role: str) -> int:
            """Requests that the third server has had in a role, as the router's log says."""
            return the_router.log_since(0).count(f'"{role}": "{third.url}"')

        def serves_more(role: str) -> None:
            before = served(role)
            wait_until(f"the third server has requests, to {role}", lambda: served(role) >= before + 3, 60)

        with ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(client, number) for number in range(4)]
            try:
                for role in ("prefill", "decode", "prefill", "decode", "prefill"):
                    if role != "prefill" or served("decode"):
                        turned.clear()
                        turn(third, role)
                        turned.set()
                    serves_more(role)
            finally:
                over.set()
                turned.set()
        for each in clients:
            each.result()
        wrong = [(n, reply) for n, reply in replies if not reply.ok or reply.ids != expected[n]]
        assert not wrong and len(replies) > 20, (len(replies), wrong, the_router.log_tail())
    pair.check()
