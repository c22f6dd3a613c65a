"""Routers that are not kvconn's, before a pair of test_kinds.py."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from asking import HOST, Answer, ask, metric, wait_until
from asking import request as http_request
from kinds import asked, tries
from servers import Server, free_ports, stop_all
from vllm_pair import Pair


def example_router(name: str) -> str:
    """An example of vLLM's, out of its source distribution."""
    script = Path(__file__).resolve().parent.parent / "scripts" / "vllm-example-router.py"
    found = subprocess.run([sys.executable, str(script), name], capture_output=True, text=True, check=False)
    if found.returncode == 75:
        pytest.skip(f"NOT RUN: {found.stderr.strip()}")
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def by_urls(pair: Pair) -> list[str]:
    return ["--prefill", pair.prefill.url, str(pair.bootstrap_port), "--decode", pair.decode.url]


def push_router(pair: Pair) -> list[str]:
    """Asks both engines at once, and knows of prefill what its command says."""
    if pair._written_for != "NixlPushConnector":
        pytest.skip("of the pair that serves as NixlPushConnector")
    status, text = http_request("GET", f"http://{HOST}:{pair.bootstrap_port}/query")
    assert status == 200, text
    prefill, decode = (server.url.removeprefix("http://") for server in (pair.prefill, pair.decode))
    its = ["--prefill-engine-id", json.loads(text)["0"]["engine_id"], "--prefill-kv-host", HOST]
    its += ["--prefill-side-channel-port", str(pair.bootstrap_port)]
    return [example_router("push"), "--model", pair.served, "--prefill", prefill, "--decode", decode, *its]


# Each router's answer when it is up, and its command.
ROUTERS: dict[str, tuple[str, Callable[[Pair], list[str]]]] = {
    "vllm-example-mooncake": ("/openapi.json", lambda pair: [example_router("mooncake"), *by_urls(pair)]),
    "vllm-example-push": ("/status", push_router),
    "nixl": ("/health", lambda pair: ["-m", "kvconn", "proxy", "--contract", "nixl", *by_urls(pair)]),
}


# What an operator registers of each server in smg, by the contract that smg is to follow. smg does not ask a vLLM that it
# reaches by HTTP for its connector. If nobody names the connector to smg, smg tells neither server of the other.
SMG = {"nixl": ("mla", "NixlConnector"), "mooncake": ("window", "MooncakeConnector"), "passthrough": ("window", "")}


# The pair before which llm-d's sidecar speaks each of its protocols. It looks at no name.
LLMD = {"nixlv2": "llama", "mooncake": "window"}


def smg_workers(pair: Pair, connector: str) -> list[dict[str, Any]]:
    of_prefill: dict[str, Any] = {"bootstrap_port": pair.bootstrap_port}
    of_both: dict[str, Any] = {}
    if connector:
        status, text = http_request("GET", f"http://{HOST}:{pair.bootstrap_port}/query")
        assert status == 200, text
        of_both["kv_connector"] = connector
        of_prefill["kv_engine_id"] = json.loads(text)["0"]["engine_id"]
    return [
        {"url": pair.prefill.url, "worker_type": "prefill", **of_both, **of_prefill},
        {"url": pair.decode.url, "worker_type": "decode", **of_both},
    ]


def computed_alone(pair: Pair) -> float:
    """Tokens of prompts that named no transfer, of a decode server of role kv_consumer."""
    return metric(pair.decode.url, "vllm:kvconn_computed_tokens_total", absent=0, reason="no_transfer")


@contextlib.contextmanager
def router_up(pair: Pair, name: str, argv: list[str], at: str = "/health") -> Iterator[Server]:
    """Another router than the pair's own, as long as it is needed."""
    (port,) = free_ports(1)
    url = f"http://{HOST}:{port}"
    router = Server(name, [pair.python, *argv, "--port", str(port)], pair._env(), pair.workdir / f"{name}.log", url)
    router.start()
    try:
        wait_until(f"{name} is up", lambda: answers(url + at), 60)
        yield router
    finally:
        stop_all([router])


def carried(pair: Pair, router: Server, headers: dict[str, str] | None = None, **more: Any) -> None:
    """A single engine's text comes through the router, and its prompt by a load."""
    for _ in range(tries(pair)):
        request, expected = asked(pair, 700)
        position = pair.decode.log_size()
        answer = when_ready(router.url, {**request, **more}, headers)
        assert answer.ok, (answer, router.log_tail(), pair.decode.log_tail())
        wait_until("the load's line in the decode server's log", lambda position=position: bool(pair.loads(position)))
        if answer.text == expected:
            break
    assert answer.text == expected, router.log_tail()
    assert len(pair.loaded(position)) == 1, pair.loads(position)


def computed(pair: Pair, router: Server) -> None:
    """The decode server computes the prompt itself, and counts that it was told of no transfer."""
    before, position = computed_alone(pair), pair.decode.log_size()
    request, expected = asked(pair, 700)
    answer = when_ready(router.url, request)
    assert answer.ok and answer.text == expected, (answer, expected, router.log_tail())
    assert not pair.loads(position)
    # The single engine's is counted whole. Of this one a disk beside kvconn may have the blocks by then: it looks at no cache_salt.
    least = 1 if pair._beside else 700
    wait_until("the prompt is counted, and the single engine's", lambda: computed_alone(pair) >= before + 700 + least)


def when_ready(url: str, request: dict[str, Any], headers: dict[str, str] | None = None) -> Answer:
    """Its first answers are 503: vLLM's example asks the prefill servers' ports after it has begun to serve."""
    deadline = time.monotonic() + 60
    while (answer := ask(url, request, headers=headers)).status == 503 and time.monotonic() < deadline:
        time.sleep(0.1)
    return answer


def answers(url: str) -> bool:
    try:
        return http_request("GET", url)[0] == 200
    except OSError:
        return False
