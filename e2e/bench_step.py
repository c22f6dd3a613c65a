"""The connector's own time on the engines' steps while a hundred requests are on their way through a real pair.

It is read from what an operator sees: vllm:kvconn_step_time_seconds and vllm:kvconn_transfers_in_flight on /metrics.
The requests wait for prefill, and their loads are in flight on decode. With --held decode takes four requests at a time, and
prefill holds the offers of the others. The engine on which the requests are in flight streams answers of its own meanwhile,
so that its steps are those of an engine at work.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
from asking import ServerError, ask, request
from servers import Server
from vllm_pair import Pair

GOAL_S = 1e-4
STEP = re.compile(r'^vllm:kvconn_step_time_seconds_bucket\{.*?\ble="([^"]+)".*?\bpart="(\w+)".*\} ([0-9.e+]+)$', re.MULTILINE)
IN_FLIGHT = r'^vllm:kvconn_transfers_in_flight\{.*\bside="%s".*\} ([0-9.e+]+)$'
# With --held: decode has blocks for four requests, and long answers make it slower than prefill.
HELD_ANSWER = 300
HELD_ARGS = ["--max-num-seqs", "4", "--block-size", "128", "--num-gpu-blocks-override", "48"]

Steps = dict[str, dict[float, float]]  # by part of the connector: steps that took at most so many seconds


def steps(server: Server) -> Steps:
    text, found = request("GET", server.url + "/metrics")[1].decode(), Steps()
    for bound, part, count in STEP.findall(text):
        found.setdefault(part, {})[float(bound)] = float(count)
    return found


def in_flight(server: Server, side: str) -> float:
    text = request("GET", server.url + "/metrics")[1].decode()
    return sum(map(float, re.findall(IN_FLIGHT % side, text, re.MULTILINE)))


def since(after: Steps, before: Steps) -> Steps:
    return {part: {le: count - before.get(part, {}).get(le, 0) for le, count in counts.items()} for part, counts in after.items()}


def quantile(counts: dict[float, float], q: float) -> float:
    """As Prometheus' histogram_quantile: along a straight line in the bucket that holds it."""
    rank, low, below = q * max(counts.values()), 0.0, 0.0
    for bound, count in sorted(counts.items()):
        if count >= rank and count > below:
            return low if bound == float("inf") else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low


def measure(pair: Pair, clients: int, requests: int, tokens: int, held: bool) -> None:
    busy, name, side = (pair.prefill, "prefill", "offer") if held else (pair.decode, "decode", "load")
    words = "the woods are lovely dark and deep "
    numbers = itertools.count(1)

    def body(max_tokens: int) -> dict[str, object]:
        prompt = f"{next(numbers)} of {time.monotonic_ns()}: {words * (tokens // len(words) + 1)}"[:tokens]
        return {"model": pair.served, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}

    stop, seen = threading.Event(), list[float]()

    def own_work() -> None:
        while not stop.is_set():
            ask(busy.url, body(200), timeout_s=300)

    def watch() -> None:
        while not stop.wait(1):
            seen.append(in_flight(busy, side))

    def one(_: int) -> None:
        answer = ask(pair.router.url, body(HELD_ANSWER if held else 16), timeout_s=600)
        if not answer.ok:
            raise ServerError(answer.error)

    engines = [("decode", pair.decode), ("prefill", pair.prefill)]
    with ThreadPoolExecutor(clients + 3) as pool:
        others = [pool.submit(own_work), pool.submit(own_work), pool.submit(watch)]
        try:
            before = {name: steps(server) for name, server in engines}
            began = time.monotonic()
            list(pool.map(one, range(requests)))
            took = time.monotonic() - began
            after = {name: steps(server) for name, server in engines}
        finally:
            stop.set()
        for other in others:
            other.result()
    print(f"{requests} requests of {tokens} tokens, {clients} at a time, in {took:.1f} s; {side}s in flight on {name}, once a second:")
    print(f"  median {statistics.median(seen):.0f}, most {max(seen):.0f}")
    for name, _ in engines:
        for part, counts in sorted(since(after[name], before[name]).items()):
            total = max(counts.values())
            row = "  ".join(f"{100 * q:.0f} % {1e6 * quantile(counts, q):6.1f}" for q in (0.5, 0.9, 0.99))
            print(f"  {name:8} {part:10} {total:6.0f} steps; us: {row}; within 100 us: {counts[GOAL_S] / total:.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=100, metavar="N")
    parser.add_argument("--requests", type=int, default=600, metavar="N")
    parser.add_argument("--tokens", type=int, default=900, metavar="N", help="of a prompt, of 32 KiB of cache each (default 900)")
    parser.add_argument("--dtype", choices=tiny_model.FAT_LAYERS, default="float32", help="(default float32)")
    parser.add_argument("--held", action="store_true", help="decode takes few at a time: prefill holds the offers of the others")
    args = parser.parse_args()
    workdir = Path(tempfile.mkdtemp(prefix="kvconn-step-"))
    room = {"VLLM_CPU_KVCACHE_SPACE": "5"}  # GiB: decode has the blocks of a hundred requests
    few = HELD_ARGS if args.held else []
    pair = Pair(tiny_model.make_32k(workdir / "model-fat", args.dtype), workdir / "logs", dtype=args.dtype, extra_env=room, decode_args=few)
    try:
        with pair:
            measure(pair, args.clients, args.requests, args.tokens, args.held)
    finally:
        left = pair.leftovers()
    if left:
        print("LEFT BEHIND: " + "; ".join(left))
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
