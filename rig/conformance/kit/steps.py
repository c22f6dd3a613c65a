"""What a decode step costs beside loads into the same GPU. The step is a CUDA graph of matrix products, replayed while loads go on.

Prints JSON. It needs PyTorch with CUDA. While loads go on, other graphs are captured too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from caches import Cache, cache_of
from offers import AHEAD, BYTE
from transfers import SECONDS, Size, agent_of, large

import kvconn

AT_ONCE, GRAPHS, KEPT = 4, 10, 300  # loads that are under way; graphs that are captured beside loads; loads that are kept for that
LEAST_FREE = 14 << 30  # bytes of the GPU's memory
ALONE, BESIDE = 600, 2.5  # steps; seconds


class Step:
    """80 products of bfloat16: as much memory is read as by a model of 10 GB."""

    def __init__(self) -> None:
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.weights = [torch.randn(8192, 8192, **options) * 0.01 for _ in range(80)]
        self.x = torch.randn(32, 8192, **options)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            self.forward()
        torch.cuda.synchronize()
        self.graph = self.capture()
        for _ in range(50):
            self.run()

    def forward(self) -> torch.Tensor:
        y = self.x
        for w in self.weights:
            y = y @ w
        return y

    def capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.forward()
        return graph

    def run(self) -> None:
        self.graph.replay()
        torch.cuda.current_stream().synchronize()


class Loads:
    """Some loads are always under way: each step asks for what is done, as an engine does."""

    def __init__(self, agent: kvconn.Agent, address: str, of: Size) -> None:
        self.agent, self.address, self.ids = agent, address, list(range(0, of.blocks, 2))
        self.started, self.done, self.bytes = 0, 0, 0
        self.reasons: list[str] = []
        self.by: set[str] = set()

    def go_on(self) -> None:
        for done in self.agent.get_finished():
            self.done, self.bytes = self.done + 1, self.bytes + done.bytes
            self.by.add(done.transport)
            if not done.ok:
                self.reasons.append(done.reason)
        while self.started < AHEAD and self.started - self.done < AT_ONCE:
            self.agent.start_load([kvconn.Load(f"t{self.started}", self.address, "kit-prefill", [self.ids])])
            self.started += 1


def quantiles(took: list[float]) -> dict[str, float]:
    took = sorted(took)
    return {f"p{q}_ms": round(took[min(len(took) - 1, len(took) * q // 100)] * 1e3, 3) for q in (50, 99)}


def steps(step: Step, between: Any, more: Any) -> list[float]:
    took: list[float] = []
    while more(len(took)):
        begin = time.perf_counter()
        between()
        step.run()
        took.append(time.perf_counter() - begin)
    return took


def captured(step: Step, loads: Loads) -> dict[str, int]:
    """Graphs that were captured and replayed while loads went on."""
    good = beside = 0
    for _ in range(GRAPHS):
        loads.go_on()
        beside += loads.started > loads.done
        try:
            step.capture().replay()
            torch.cuda.synchronize()
            good += 1
        except RuntimeError as e:
            print(e, file=sys.stderr)
    return {"captured": good, "beside_loads": beside, "tried": GRAPHS}


def drain(loads: Loads) -> None:
    """Until nothing is under way: then the blocks hold what prefill had."""
    deadline = time.monotonic() + SECONDS
    loads.started, left = AHEAD, loads.started
    while loads.done < left and time.monotonic() < deadline:
        loads.go_on()
        loads.agent.wait(0.1)


def right(cache: Cache, loads: Loads) -> bool:
    return all(cache.read(layer, block) == bytes([BYTE]) * cache.size for layer in (0, 3) for block in loads.ids[:: len(loads.ids) // 4])


def row(step: Step, source: str, target: str, block: int, by: str, kernel: bool) -> dict[str, Any]:
    of = large(block)
    cache = cache_of(target, 0, of.blocks, of.bytes)
    cache.fill(0)
    prefill = [sys.executable, str(Path(__file__).with_name("offers.py")), source, str(block), by]
    child = subprocess.Popen(prefill, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout
        address = child.stdout.readline().strip()
        with agent_of("decode", cache, by, kernel) as agent:
            loads = Loads(agent, address, of)
            alone = quantiles(steps(step, agent.get_finished, lambda n: n < ALONE))
            begin = time.perf_counter()
            beside = steps(step, loads.go_on, lambda _: time.perf_counter() < begin + BESIDE and loads.done < AHEAD - KEPT)
            rate = loads.bytes / (time.perf_counter() - begin) / 1e9
            graphs = captured(step, loads)
            drain(loads)
            ok = not loads.reasons and set(graphs.values()) == {GRAPHS} and right(cache, loads) and loads.by == {by}
    finally:
        child.kill()
        child.wait()
    told = {"from": source, "to": target, "block": block, "by": by, "kernel": kernel, "ok": ok, "reason": "; ".join(loads.reasons[:1])}
    told |= {"alone": alone, "beside": quantiles(beside), "steps": len(beside), "GB_s": round(rate, 2), **graphs}
    return told | {"p99": round(quantiles(beside)["p99_ms"] / alone["p99_ms"], 3)}


def main() -> int:
    free, _ = torch.cuda.mem_get_info()
    if free < LEAST_FREE:
        reason = f"{free >> 20} MiB of the GPU's memory are free, and {LEAST_FREE >> 20} are needed"
        print(f"NOT RUN: a decode step beside loads: {reason}", file=sys.stderr)
        print(json.dumps({"not_run": reason}))
        return 0
    step = Step()
    rows = []
    for source, target, block, by, kernel in (
        ("host", "host", 64 << 10, "tcp", True),  # the agent's own cost
        ("host", "cuMemAlloc", 64 << 10, "tcp", True),
        ("cuMemAlloc", "cuMemAlloc", 64 << 10, "tcp", True),
        ("cuMemAlloc", "cuMemAlloc", 64 << 10, "local", True),
        ("cuMemAlloc", "cuMemAlloc", 64 << 10, "local", False),
        ("cuMemAlloc", "torch", 64 << 10, "local", True),
    ):
        rows.append(row(step, source, target, block, by, kernel))
        print(json.dumps(rows[-1]), file=sys.stderr)
    print(json.dumps({"torch": torch.__version__, "device": torch.cuda.get_device_name(), "rows": rows}, indent=2))
    return not all(r["ok"] for r in rows)


if __name__ == "__main__":
    sys.exit(main())
