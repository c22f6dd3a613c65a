"""Helpers of the tests of a real pair."""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from asking import Answer, ask, metric, wait_idle, wait_until
from asking import request as http_request
from servers import Server
from vllm_pair import Pair

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


def idle(pair: Pair, bound_s: float = 15) -> None:
    for server in (pair.prefill, pair.decode):
        wait_idle(server.name, server.url, bound_s)


def sent(pair: Pair, transport: str) -> float:
    """Bytes that the prefill agent has sent by a transport, as it counts them."""
    return metric(f"http://127.0.0.1:{pair.bootstrap_port}", "kvconn_bytes_total", direction="out", transport=transport)


def went_by(pair: Pair, load: dict[str, Any], transport: str, before: float) -> None:
    """Both engines have counted a load's bytes for a transport."""
    assert load["transport"] == transport, load
    wait_until(f"prefill has sent by {transport}", lambda: sent(pair, transport) == before + load["bytes"])


def failures(server: Server, **labels: str) -> float:
    return metric(server.url, "vllm:kvconn_failed_transfers_total", absent=0, **labels)


def words(tokens: int) -> str:
    """A prompt that no cache has seen."""
    text = f"{next(numbers)} of {time.monotonic_ns()}: whose woods these are I think I know, his house is in the village. "
    return (text * (tokens // len(text) + 1))[:tokens]


def body(pair: Pair, prompt: str, max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    return {"model": pair.served, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}


def alone(pair: Pair, request: dict[str, Any], chat: bool = False) -> Answer:
    """The answer of one engine to this request, without a transfer."""
    answer = ask(pair.decode.url, {**request, "cache_salt": f"alone-{next(numbers)}"}, chat=chat)
    assert answer.ok, answer
    return answer


def new_loads(pair: Pair, position: int, count: int, bound_s: float = 10, met: bool = True) -> list[dict[str, Any]]:
    """The loads since position. If the two engines have met, each goes by the pair's transport."""
    wait_until(f"{count} loads in the decode server's log", lambda: len(pair.loads(position)) >= count, bound_s)
    loads = pair.loaded(position) if met else pair.loads(position)
    assert len(loads) == count, loads
    return loads


def from_prefill(pair: Pair, transfer: str) -> dict[str, Any]:
    """A router's parameters for a decode engine, for a request that the prefill engine has or will have."""
    address = f"http://127.0.0.1:{pair.bootstrap_port}"
    status, answer = http_request("GET", address + "/query")
    assert status == 200
    engine = json.loads(answer)["0"]["engine_id"]
    return {**GOOD, "transfer_id": transfer, "remote_bootstrap_addr": address, "remote_engine_id": engine}


def served_again(pair: Pair) -> None:
    """The router may need a moment to see that an engine is back."""
    request = body(pair, words(20), max_tokens=1)
    wait_until("the router serves again", lambda: ask(pair.router.url, request, timeout_s=20).ok, every_s=0.2)
    serves(pair, met=False)


def serves(pair: Pair, met: bool = True) -> None:
    """A request through the pair, with its transfer, gives the single engine's text."""
    request = body(pair, words(300))
    position = pair.decode.log_size()
    answer = ask(pair.router.url, request)
    assert answer.ok, (answer, pair.decode.log_tail())
    assert answer.text == alone(pair, request).text
    new_loads(pair, position, 1, met=met)


GOOD = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_id": "t",
    "remote_engine_id": "e",
    "remote_bootstrap_addr": "http://127.0.0.1:1",
}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != key}


def reasons(pair: Pair, position: int, said: str) -> str:
    """The decode server's log lines about failed loads. At least one must be there."""
    return "\n".join(line for line in pair.decode.log_since(position).splitlines() if said in line)
