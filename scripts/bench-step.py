"""The connector's own time on an engine's step, with many transfers in flight.

Run it with the Python of an environment that has vLLM and kvconn (e2e/setup_vllm.py prints one):
    PYTHON scripts/bench-step.py [--in-flight 100] [--steps 2000] [--asleep] [--own-core]

The decode engine's two sides of the connector and a real agent are in this process. The prefill engine's agent is in a
process of its own. The figures are the connector's own (vllm:kvconn_step_time_seconds), for steps in which nothing happens
and for steps in which one request comes and one load ends. Before each step the engine's thread works through 32 MB, as a
forward pass does, and then for a millisecond in Python, as vLLM's scheduler does before it asks its connector. So the
connector's own code and data are in no near cache, but the interpreter's are. With --asleep the thread sleeps instead until
a load has ended, as an engine with nothing to compute does. Everything is slow for a while then, most of all in a virtual
machine whose processor the host has given to another. With --own-core nothing else runs on the core of the engine's thread,
as where there are more cores than work. The last line is the cost, on that core, of any Python that has not run for a step.
"""

from __future__ import annotations

import argparse
import fractions
import ipaddress
import json
import logging
import os
import posixpath
import statistics
import subprocess
import sys
import threading
import time
import urllib.parse
from types import SimpleNamespace
from typing import Any

import numpy as np

import kvconn

LAYERS, BLOCKS, BLOCK_BYTES, TOKENS, PER_REQUEST = 32, 8192, 4096, 16, 64


def register(agent: kvconn.Agent) -> np.ndarray[Any, Any]:
    cache = np.zeros((LAYERS, BLOCKS, BLOCK_BYTES), np.uint8)
    agent.register_kv_caches([r for n, layer in enumerate(cache) for r in kvconn.regions_from_tensor(f"layer.{n}", layer, block_dim=0)])
    return cache


def prefill() -> None:
    """Announces or offers what it is told on its standard input."""
    with kvconn.Agent(
        {"engine_id": "p", "role": "prefill", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0, "max_transfers": 4096}
    ) as agent:
        cache = register(agent)
        print(agent.bootstrap_address, flush=True)
        for line in sys.stdin:
            what, transfer_id, first = line.split()
            if what == "announce":
                agent.announce([transfer_id])
            else:
                agent.offer([kvconn.Offer(transfer_id, [list(range(int(first), int(first) + PER_REQUEST))])])
            agent.get_finished()
        del cache


class Decode:
    def __init__(self, address: str) -> None:
        from kvconn.vllm.groups import Group
        from kvconn.vllm.scheduler import SchedulerSide
        from kvconn.vllm.worker import WorkerSide

        self.address = address
        agent = kvconn.Agent({"engine_id": "d", "role": "decode", "max_transfers": 4096})
        self.cache = register(agent)
        self.worker = WorkerSide(lambda: agent, 0.0)
        self.agent = agent
        self.scheduler = SchedulerSide("kv_consumer", [Group(0, TOKENS)])
        self.free = [list(range(n, n + PER_REQUEST)) for n in range(0, BLOCKS, PER_REQUEST)]
        self.under_way: dict[str, Any] = {}

    def request(self, transfer_id: str) -> Any:
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": self.address,
            "remote_engine_id": "p",
        }
        tokens = [1000 + n for n in range(TOKENS * PER_REQUEST)]
        return SimpleNamespace(
            request_id=f"cmpl-{transfer_id}",
            kv_transfer_params=params,
            prompt_token_ids=tokens,
            num_prompt_tokens=len(tokens),
            status="FINISHED_STOPPED",
            blocks=None,
        )

    def step(self, new: list[Any]) -> tuple[float, int]:
        """How long the connector took, and how many loads ended."""
        began = time.perf_counter()
        for request in new:
            self.scheduler.on_new_request(request)
            tokens, _ = self.scheduler.matched_tokens(request, 0)
            request.blocks = self.free.pop()
            self.scheduler.after_alloc(request, [request.blocks], tokens)
            self.under_way[request.request_id] = request
        meta = self.scheduler.build_meta(1)
        spent = time.perf_counter() - began
        self.worker.begin(meta)
        self.worker.load(meta)
        reports = self.worker.collect(False)
        began = time.perf_counter()
        self.scheduler.worker_reported(reports.sent, reports.received)
        for req_id in reports.received:
            request = self.under_way.pop(req_id)
            self.scheduler.request_finished(request, [request.blocks])
            self.free.append(request.blocks)
        spent += time.perf_counter() - began
        assert not reports.failed, reports
        steps = self.worker._recorder._steps
        spent += steps.pop()
        return spent, len(reports.received)


def forward(scratch: np.ndarray[Any, Any], until: Any) -> None:
    """A step's other work. It runs once at least, until something has happened, and for a second at most."""
    began = time.monotonic()
    while True:
        scratch += 1
        if until() or time.monotonic() - began > 1:
            break
    began = time.monotonic()
    while time.monotonic() - began < 1e-3:
        rows = [{"id": f"request-{n}", "blocks": list(range(n, n + 64)), "done": n % 3 == 0} for n in range(16)]
        json.loads(json.dumps(sorted((row for row in rows if not row["done"]), key=lambda row: row["id"])))


def plain(number: int) -> float:
    """The time of some Python of the standard library that runs straight on, as the connector's does."""
    began = time.perf_counter()
    ipaddress.ip_address(f"10.1.2.{number % 200}")
    fractions.Fraction(number + 1, 12) + fractions.Fraction(3, 7)
    posixpath.normpath(f"/a/b/../c/{number}")
    urllib.parse.parse_qsl(f"a=1&b={number}")
    posixpath.relpath(f"/x/y/{number}", "/x/z")
    return time.perf_counter() - began


def keep_a_core(child: int) -> None:
    """Keeps a core for this thread. All other threads, those of the prefill engine too, get the other cores."""
    first, *rest = sorted(os.sched_getaffinity(0))
    tasks = [int(tid) for pid in ("self", child) for tid in os.listdir(f"/proc/{pid}/task")]
    for tid in tasks:
        os.sched_setaffinity(tid, rest)
    os.sched_setaffinity(threading.get_native_id(), {first})


def run(in_flight: int, count: int, asleep: bool, own_core: bool) -> None:
    child = subprocess.Popen([sys.executable, __file__, "--prefill"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    try:
        decode = Decode(child.stdout.readline().strip())

        def tell(what: str, number: int) -> None:
            child.stdin.write(f"{what} t{number} {number % (BLOCKS // PER_REQUEST) * PER_REQUEST}\n")
            child.stdin.flush()

        for number in range(in_flight):
            tell("announce", number)
            decode.step([decode.request(f"t{number}")])
        if own_core:
            keep_a_core(child.pid)
        idle, busy, cold = [], [], []
        scratch = np.zeros(8 << 20, np.uint32)
        begun, done, asked = in_flight, 0, 0
        while done < count:
            while asked < done + 4:  # a few are being moved at any time, the others wait for their prefill
                tell("offer", asked)
                asked += 1
            if asleep:
                decode.agent.wait(5)
            else:
                forward(scratch, lambda: decode.agent._count.value)
            new = []
            if begun - done < in_flight:
                tell("announce", begun)
                new.append(decode.request(f"t{begun}"))
                begun += 1
            other = begun % 4 == 0  # in the connector's place, which is then not what it was
            if other:
                cold.append(plain(done))
            spent, ended = decode.step(new)
            done += ended
            if ended == 1 and len(new) == 1 and not other:
                busy.append(spent)
            spent, ended = decode.step([])
            done += ended
            if not ended:
                idle.append(spent)
        for name, values in (("nothing new", idle), ("one request comes, one load ends", busy)):
            values.sort()
            print(
                f"{in_flight} in flight, {'after a sleep, ' * asleep}{name}: median {statistics.median(values) * 1e6:.1f} µs, "
                f"99th percentile {values[len(values) * 99 // 100] * 1e6:.1f} µs ({len(values)} steps)"
            )
        warm = statistics.median([plain(n) for n in range(2000)][1000:])
        print(f"other Python, which takes {warm * 1e6:.1f} µs when run again and again: median {statistics.median(cold) * 1e6:.1f} µs")
        decode.worker.close()
    finally:
        child.stdin.close()
        child.wait(20)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--in-flight", type=int, default=100)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--asleep", action="store_true", help="sleep before each step instead of working")
    parser.add_argument("--own-core", action="store_true", help="nothing else runs on the core of the engine's thread")
    parser.add_argument("--prefill", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    # As in an engine, each load costs a line of the log.
    logging.basicConfig(level=logging.INFO, filename=os.devnull, format="%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s")
    if args.prefill:
        prefill()
    else:
        run(args.in_flight, args.steps, args.asleep, args.own_core)


if __name__ == "__main__":
    main()
