"""KV caches in GPU memory, carried by kvconn between two processes of this machine, with every byte compared. Prints JSON.

    transfers.py                                          all cases; the status is 1 if one fails
    transfers.py prefill KIND DEVICE BLOCKS BYTES FOLDER  the other process of a case

Blocks are written by work that is still queued on a stream when kvconn is told of them, and decode's blocks are still being overwritten
when it asks for them. So a build that does not wait for its moments brings wrong bytes here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Optional

from caches import LAYERS, Cache, Device, Driver, cache_of

import kvconn

SECONDS = 60
WAYS = {"layers": "layer by layer", "queued": "whole, before it is computed", "ready": "into blocks that are still in use"}
POISON, OLD, LATE = 0xEE, 0x11, 0x55  # prefill's blocks before they are computed; decode's; what decode's stream still writes


def data_of(layer: int, block: int, size: int) -> bytes:
    return random.Random(1000 * layer + block).randbytes(size)


@contextlib.contextmanager
def agent_of(role: str, cache: Cache) -> Iterator[kvconn.Agent]:
    config: dict[str, object] = {"engine_id": f"kit-{role}", "role": role, "transport": "tcp"}
    if role == "prefill":
        config |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": 0, "tcp_listen_host": "127.0.0.1"}
    agent = kvconn.Agent(config)
    try:
        agent.register_kv_caches(cache.regions())
        yield agent
    finally:
        agent.close()


def finished(agent: kvconn.Agent) -> kvconn.Completion:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for done in agent.get_finished():
            return done
        agent.wait(1)
    raise TimeoutError(f"no completion within {SECONDS} s")


def prefill(kind: str, device: int, blocks: int, size: int) -> None:
    """Offers the blocks from 0 on: layer by layer, each as soon as it is queued, or all of them, when they are queued or written."""
    cache = cache_of(kind, device, blocks, size)
    cache.fill(POISON)
    with agent_of("prefill", cache) as agent:
        print(json.dumps({"address": agent.bootstrap_address}), flush=True)
        asked = json.loads(sys.stdin.readline())
        ids, layers = list(range(asked["count"])), asked["way"] == "layers"
        if layers:
            agent.offer_partial([kvconn.PartialOffer("t", [ids], ready=[0], computing=[len(ids)])])
        for layer in range(LAYERS):
            cache.busy(0 if asked["way"] == "ready" else 1)
            for block in ids:
                cache.write(layer, block, data_of(layer, block, size))
            if layers and cache.on_device:
                agent.written_on([layer], cache.stream)
            elif layers:
                agent.written[layer] = 1
        if asked["way"] == "ready":
            cache.settle()
        after = agent.moment(0, cache.stream) if cache.on_device else 0
        agent.offer([kvconn.Offer("t", [ids], after=after)])
        print(json.dumps({"offered": True}), flush=True)
        done = finished(agent)
        print(json.dumps({"ok": done.ok, "reason": done.reason}), flush=True)
        sys.stdin.readline()


@contextlib.contextmanager
def other_process(kind: str, device: int, blocks: int, size: int, visible: Optional[str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, __file__, "prefill", kind, str(device), str(blocks), str(size)]
    environment = os.environ | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield child
        child.communicate("end\n", timeout=SECONDS)
    finally:
        child.kill()
        child.wait()


def said(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout
    line = child.stdout.readline()  # ends when the child does, which waits for nothing for ever
    if not line:
        raise ChildProcessError("the prefill process ended, see above")
    return json.loads(line)


def ask(child: subprocess.Popen[str], count: int, way: str) -> None:
    assert child.stdin
    child.stdin.write(json.dumps({"count": count, "way": way}) + "\n")
    child.stdin.flush()


def transfer(
    source: str,
    target: str,
    to: int = 0,
    *,
    count: int = 6,
    blocks: int = 16,
    size: int = 64 << 10,
    way: str = "layers",
    visible: Optional[str] = None,
) -> dict[str, Any]:
    """One transfer, into every second block from the end of decode's cache on, which decode's stream still writes."""
    cache = cache_of(target, to, blocks, size)
    cache.fill(OLD)
    ids = [blocks - 1 - 2 * i for i in range(count)]
    with other_process(source, 0, blocks, size, visible) as child, agent_of("decode", cache) as agent:
        address = said(child)["address"]
        if way == "ready":  # decode's stream is what is waited for
            ask(child, count, way)
            said(child)
            cache.busy(20)
        for block in ids:
            cache.write(0, block, bytes([LATE]) * size)
        after = agent.moment(0, cache.stream) if cache.on_device else 0
        agent.start_load([kvconn.Load("t", address, "kit-prefill", [ids], after=after)])
        if way != "ready":
            ask(child, count, way)
            said(child)
        done, theirs = finished(agent), said(child)
        cache.settle()  # what was written too early is overwritten now
        wrong = sum(cache.read(layer, block) != data_of(layer, i, size) for layer in range(LAYERS) for i, block in enumerate(ids))
        kept = {bytes([OLD]) * size}
        wrong += sum(cache.read(layer, block) not in kept for layer in range(LAYERS) for block in set(range(blocks)) - set(ids))
    ok = done.ok and theirs["ok"] and not wrong
    rate = round(done.bytes / done.transfer_s / 1e9, 2) if done.transfer_s else 0
    reason = done.reason or theirs["reason"] or (f"{wrong} blocks have wrong bytes" if wrong else "")
    return {"ok": ok, "wrong_blocks": wrong, "reason": reason, "transport": done.transport, "bytes": done.bytes, "GB_s": rate}


def freed() -> dict[str, Any]:
    """Decode frees its memory after it was registered: the load fails by the region's name."""
    cache = cache_of("cuMemAlloc", 0, 16, 64 << 10)
    assert isinstance(cache, Device)
    with other_process("host", 0, 16, 64 << 10, None) as child, agent_of("decode", cache) as agent:
        address = said(child)["address"]
        cache.free()
        agent.start_load([kvconn.Load("t", address, "kit-prefill", [[1]])])
        ask(child, 1, "ready")
        done = finished(agent)
    return {"ok": not done.ok and "freed or mapped anew" in done.reason and "layer.0" in done.reason, "reason": done.reason}


def moment_us() -> float:
    """What a moment costs the engine's thread: the median of steps of 80."""
    cache = cache_of("cuMemAlloc", 0, 16, 4096)
    took = []
    with agent_of("prefill", cache) as agent:
        for _ in range(200):
            cache.settle()
            begin = time.perf_counter_ns()
            for _ in range(80):
                agent.moment(0, cache.stream)
            took.append((time.perf_counter_ns() - begin) / 80_000)
    return round(statistics.median(took), 2)


def torch_version() -> Optional[str]:
    try:
        import torch
    except ImportError:
        return None
    return f"{torch.__version__}, CUDA {torch.version.cuda}" if torch.cuda.is_available() else None


def main() -> int:
    driver = Driver(0)
    devices, torch = driver.number("cuDeviceGetCount"), torch_version()
    of_driver = ["cuMemAlloc", "pool", "mapped by handles"]
    cases: dict[str, Any] = {
        f"{kind} to {kind}, {WAYS[way]}": lambda kind=kind, way=way: transfer(kind, kind, way=way) for kind in of_driver for way in WAYS
    }
    cases["host to cuMemAlloc"] = lambda: transfer("host", "cuMemAlloc")
    cases["cuMemAlloc to host"] = lambda: transfer("cuMemAlloc", "host")
    cases["memory that was freed"] = freed
    if devices > 1:
        cases["to another GPU"] = lambda: transfer("cuMemAlloc", "cuMemAlloc", 1)
        if "CUDA_VISIBLE_DEVICES" not in os.environ:
            cases["other CUDA_VISIBLE_DEVICES in each process"] = lambda: transfer("cuMemAlloc", "cuMemAlloc", visible=str(devices - 1))
    if not driver.double:  # each of 128 MiB, offered whole: the rates are of this machine's loopback
        large: dict[str, Any] = {"count": 32, "blocks": 64, "size": 1 << 20, "way": "ready"}
        cases |= {
            f"128 MiB, {a} to {b}": lambda a=a, b=b: transfer(a, b, **large) for a, b in (("host", "host"), ("cuMemAlloc", "cuMemAlloc"))
        }
    if torch:
        cases |= {f"torch to torch, {WAYS[way]}": lambda way=way: transfer("torch", "torch", way=way) for way in WAYS}
        cases |= {"host to torch": lambda: transfer("host", "torch"), "torch to host": lambda: transfer("torch", "host")}
    results = []
    for name, case in cases.items():
        try:
            result = case()
        except Exception as e:
            result = {"ok": False, "reason": f"{type(e).__name__}: {e}"}
        results.append({"case": name, **result})
        print(f"{'ok    ' if result['ok'] else 'FAILED'} {name}: {result['reason'] or 'every byte is right'}", file=sys.stderr)
    head = {"device": driver.name(), "devices": devices, "double": driver.double, "driver": driver.number("cuDriverGetVersion")}
    head |= {"kvconn": kvconn.__version__, "python": platform.python_version(), "torch": torch or "not here, or without a GPU"}
    head |= {"moment_us": moment_us()}
    print(json.dumps({**head, "cases": results}, indent=2))
    return not all(r["ok"] for r in results)


if __name__ == "__main__":
    logging.basicConfig(level=logging.CRITICAL)  # reasons stand in the results
    if sys.argv[1:2] == ["prefill"]:
        prefill(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        sys.exit(main())
