"""KV caches in GPU memory, carried by kvconn between two processes of this machine, with every byte compared. Prints JSON.

    transfers.py [TEXT]                                   all cases, or those whose name has the text; the status is 1 if one fails
    transfers.py prefill KIND DEVICE BLOCKS BYTES BY 0|1  the other process of a case; 1: with the copy kernel

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
from typing import Any, NamedTuple, Optional

from caches import LAYERS, Cache, Device, Driver, Mapped, Standing, cache_of

import kvconn

SECONDS = 60
AGAIN_SECONDS = 10  # after which two engines that slept meet as before
FREE_SECONDS = 3  # after which a prefill engine's memory is free, if it dies or sleeps, whoever has it open
STAND_SECONDS = 3  # for which a stream stands still at most: less than a copy has
ONE_CONNECTION = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
SLACK = 16 << 20  # of that memory, which the driver and others may take meanwhile
NO_TORCH = "the Python has no PyTorch with CUDA"
WAYS = {"layers": "layer by layer", "queued": "whole, before it is computed", "ready": "into blocks that are still in use"}
POISON, OLD, LATE = 0xEE, 0x11, 0x55  # prefill's blocks before they are computed; decode's; what decode's stream still writes


class Size(NamedTuple):
    """How many blocks of how many bytes each layer of a cache has, and how many of them are transferred."""

    blocks: int
    bytes: int
    count: int


SMALL = Size(16, 64 << 10, 6)


def large(block: int) -> Size:
    """128 MiB, every second block of a cache."""
    count = (128 << 20) // LAYERS // block
    return Size(2 * count, block, count)


def data_of(layer: int, block: int, size: int) -> bytes:
    return random.Random((layer << 20) + block).randbytes(size)


@contextlib.contextmanager
def agent_of(role: str, cache: Cache, by: str = "tcp", kernel: bool = True) -> Iterator[kvconn.Agent]:
    """An agent that goes by tcp alone, or by what it chooses itself, which must be what `by` names; with or without the copy kernel."""
    config: dict[str, object] = {"engine_id": f"kit-{role}", "role": role, "transport": "tcp" if by == "tcp" else "auto"}
    config["device_copy_kernel"] = kernel
    if role == "prefill":
        config |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": 0, "tcp_listen_host": "127.0.0.1"}
    agent = kvconn.Agent(config)
    try:
        agent.register_kv_caches(cache.regions())
        yield agent
    finally:
        agent.close()


def finished(agent: kvconn.Agent, seconds: float = SECONDS) -> kvconn.Completion:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for done in agent.get_finished():
            return done
        agent.wait(min(1, seconds))
    raise TimeoutError(f"no completion within {seconds} s")


def prefill(kind: str, device: int, blocks: int, size: int, by: str, kernel: bool) -> None:
    """Offers, sleeps and wakes as it is told, a line of JSON a word."""
    cache = cache_of(kind, device, blocks, size)
    cache.fill(POISON)
    with agent_of("prefill", cache, by, kernel) as agent:
        say(address=agent.bootstrap_address)
        for line in sys.stdin:
            asked = json.loads(line)
            if asked["do"] == "offer":
                offer(agent, cache, asked["id"], asked["count"], asked["way"])
                say(offered=True)
                done = finished(agent)
                say(ok=done.ok, reason=done.reason)
            elif asked["do"] == "end":
                break
            else:
                assert isinstance(cache, Mapped)
                cache.sleep() if asked["do"] == "sleep" else cache.wake()
                say(done=True)


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


def offer(agent: kvconn.Agent, cache: Cache, transfer_id: str, count: int, way: str) -> None:
    """Offers the blocks from 0 on: layer by layer, each as soon as it is queued, or all of them, when they are queued or written."""
    ids = list(range(count))
    if way == "layers":
        agent.offer_partial([kvconn.PartialOffer(transfer_id, [ids], ready=[0], computing=[count])])
    for layer in range(LAYERS):
        cache.busy(0 if way == "ready" else 1)
        for block in ids:
            cache.write(layer, block, data_of(layer, block, cache.size))
        if way == "layers" and cache.on_device:
            agent.written_on([layer], cache.stream)
        elif way == "layers":
            agent.written[layer] = 1
    if way == "ready":
        cache.settle()
    after = agent.moment(0, cache.stream) if cache.on_device else 0
    agent.offer([kvconn.Offer(transfer_id, [ids], after=after)])


@contextlib.contextmanager
def other_process(
    kind: str, of: Size, by: str = "tcp", *, visible: Optional[str] = None, kernel: bool = True
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, __file__, "prefill", kind, "0", str(of.blocks), str(of.bytes), by, str(int(kernel))]
    environment = os.environ | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield child
        child.communicate(json.dumps({"do": "end"}) + "\n", timeout=SECONDS)
    finally:
        child.kill()
        child.wait()


def said(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout
    line = child.stdout.readline()  # ends when the child does, which waits for nothing for ever
    if not line:
        raise ChildProcessError("the prefill process ended, see above")
    return json.loads(line)


def ask(child: subprocess.Popen[str], do: str, **words: object) -> None:
    assert child.stdin
    child.stdin.write(json.dumps({"do": do, **words}) + "\n")
    child.stdin.flush()


def wrong_blocks(cache: Cache, ids: list[int], others: bytes) -> int:
    """Of decode's blocks `ids` must hold what prefill computed, and the others what they held."""
    cache.settle()  # what was written too early is overwritten now
    wrong = sum(cache.read(layer, block) != data_of(layer, i, cache.size) for layer in range(LAYERS) for i, block in enumerate(ids))
    return wrong + sum(cache.read(layer, block) != others for layer in range(LAYERS) for block in set(range(cache.blocks)) - set(ids))


class Other(NamedTuple):
    """How decode's device differs from prefill's: by decode's number of it, or by what CUDA_VISIBLE_DEVICES is for prefill."""

    device: int = 0
    visible: Optional[str] = None


def transfer(
    source: str, target: str, *, of: Size = SMALL, way: str = "layers", by: str = "tcp", kernel: bool = True, other: Optional[Other] = None
) -> dict[str, Any]:
    """One transfer, into every second block from the end of decode's cache on, which decode's stream still writes."""
    blocks, size, count = of
    cache = cache_of(target, other.device if other else 0, blocks, size)
    cache.fill(OLD)
    ids = [blocks - 1 - 2 * i for i in range(count)]
    visible = other.visible if other else None
    with other_process(source, of, by, visible=visible, kernel=kernel) as child, agent_of("decode", cache, by, kernel) as agent:
        address = said(child)["address"]
        if way == "ready":  # decode's stream is what is waited for
            ask(child, "offer", id="t", count=count, way=way)
            said(child)
            cache.busy(20)
        for block in ids:
            cache.write(0, block, bytes([LATE]) * size)
        after = agent.moment(0, cache.stream) if cache.on_device else 0
        agent.start_load([kvconn.Load("t", address, "kit-prefill", [ids], after=after)])
        if way != "ready":
            ask(child, "offer", id="t", count=count, way=way)
            said(child)
        done, theirs = finished(agent), said(child)
        wrong = wrong_blocks(cache, ids, bytes([OLD]) * size)
    rate = round(done.bytes / done.transfer_s / 1e9, 2) if done.transfer_s else 0
    how = {"transport": done.transport, "bytes": done.bytes, "GB_s": rate}
    return {**verdict(done, theirs, wrong, by), "wrong_blocks": wrong, **how}


def verdict(done: kvconn.Completion, theirs: dict[str, Any], wrong: int, by: str) -> dict[str, Any]:
    reason = done.reason or theirs["reason"] or (f"{wrong} blocks have wrong bytes" if wrong else "")
    if not reason and done.transport != by:
        reason = f"it went by {done.transport}, not by {by}"
    return {"ok": done.ok and theirs["ok"] and not reason, "reason": reason}


def freed() -> dict[str, Any]:
    """Decode frees its memory after it was registered: the load fails by the region's name."""
    cache = cache_of("cuMemAlloc", 0, 16, 64 << 10)
    assert isinstance(cache, Device)
    with other_process("host", SMALL) as child, agent_of("decode", cache) as agent:
        address = said(child)["address"]
        cache.free()
        agent.start_load([kvconn.Load("t", address, "kit-prefill", [[1]])])
        ask(child, "offer", id="t", count=1, way="ready")
        done = finished(agent)
    return {"ok": not done.ok and "freed or mapped anew" in done.reason and "layer.0" in done.reason, "reason": done.reason}


def free_again(driver: Driver, bytes_free: int, begin: float) -> Optional[float]:
    """How many seconds after begin so much of the GPU is free; None: not within 10. The double counts a process's own memory alone."""
    while not driver.double and driver.free() < bytes_free:
        if time.monotonic() > begin + 10:
            return None
        time.sleep(0.01)
    return round(time.monotonic() - begin, 2)


def in_time(seconds: Optional[float], of: str) -> dict[str, Any]:
    """Whether the memory of a prefill engine that is gone was free soon, although decode's process had opened it."""
    ok = seconds is not None and seconds <= FREE_SECONDS
    return {"ok": ok, "reason": "" if ok else f"{of} memory is not free within {FREE_SECONDS} s: {seconds}", "free_after_s": seconds}


def slept(by: str) -> dict[str, Any]:
    """Between two transfers both engines sleep, and wake with other memory at the same addresses."""
    kind, blocks, size, ids = "mapped by handles, to be exported", 64, 256 << 10, [60, 50, 40, 30]
    cache = cache_of(kind, 0, blocks, size)
    assert isinstance(cache, Mapped)
    cache.fill(OLD)
    with other_process(kind, Size(blocks, size, len(ids)), by) as child, agent_of("decode", cache, by) as agent:
        address = said(child)["address"]

        def once(transfer_id: str, others: int) -> dict[str, Any]:
            agent.start_load([kvconn.Load(transfer_id, address, "kit-prefill", [ids], after=agent.moment(0, cache.stream))])
            ask(child, "offer", id=transfer_id, count=len(ids), way="layers")
            said(child)
            done, theirs = finished(agent), said(child)
            wrong = wrong_blocks(cache, ids, bytes([others]) * size)
            return {**verdict(done, theirs, wrong, done.transport), "transport": done.transport}

        results = [once("before", OLD)]
        awake, begin = cache.driver.free(), time.monotonic()
        ask(child, "sleep")
        said(child)
        seconds = free_again(cache.driver, awake + cache.bytes - SLACK, begin)
        cache.sleep()
        cache.wake()
        ask(child, "wake")
        said(child)
        begin, within = time.monotonic(), SECONDS if cache.driver.double else AGAIN_SECONDS  # the double judges no time
        while True:  # auto may go by tcp until the two have told each other of their new memory
            cache.fill(LATE)
            results.append(once(f"after {len(results)}", LATE))
            again = round(time.monotonic() - begin, 2)
            if not results[-1]["ok"] or results[-1]["transport"] == by or again > within:
                break
            time.sleep(0.1)
    went = [results[0]["transport"], results[-1]["transport"]]
    how = {"ok": went == [by, by], "reason": f"it went by {went[0]}, and by {went[1]} after {again} s" if went != [by, by] else ""}
    of = {"free_after_s": seconds, "again_after_s": again}
    return next((r for r in (*results, in_time(seconds, "a sleeping engine's"), how) if not r["ok"]), how) | of


def killed() -> dict[str, Any]:
    """The prefill process is killed while decode's process has its memory open."""
    blocks, size = 64, 1 << 20
    cache = cache_of("cuMemAlloc", 0, blocks, size)
    assert isinstance(cache, Device)
    with agent_of("decode", cache, "local") as agent:
        before = cache.driver.free()
        with other_process("cuMemAlloc", Size(blocks, size, 2), "local") as child:
            agent.start_load([kvconn.Load("t", said(child)["address"], "kit-prefill", [[1, 2]])])
            ask(child, "offer", id="t", count=2, way="ready")
            said(child)
            first = verdict(finished(agent), said(child), 0, "local")
            begin = time.monotonic()
            child.kill()
            child.wait()
            seconds = free_again(cache.driver, before - SLACK, begin)
    return {**in_time(seconds, "a killed engine's"), **({} if first["ok"] else first)}


def beside_a_standing_stream(by: str) -> dict[str, Any]:
    """Another stream of decode's process stands still while it loads. Whether the load waits for that stream is told and not judged."""
    cache, ids = cache_of("cuMemAlloc", 0, SMALL.blocks, SMALL.bytes), list(range(SMALL.count))
    assert isinstance(cache, Device)
    cache.fill(OLD)
    # The double judges no time. With one connection it always holds the load up.
    within = SECONDS if cache.driver.double and not ONE_CONNECTION else STAND_SECONDS
    with other_process("cuMemAlloc", SMALL, by) as child, agent_of("decode", cache, by) as agent:
        address, begin, done = said(child)["address"], time.monotonic(), None
        ask(child, "offer", id="t", count=SMALL.count, way="ready")
        said(child)
        standing = Standing(cache.driver)
        try:
            agent.start_load([kvconn.Load("t", address, "kit-prefill", [ids])])
            with contextlib.suppress(TimeoutError):
                done = finished(agent, within)
        finally:
            standing.let_go()
        held_up, seconds = done is None, time.monotonic() - begin
        done, theirs = done or finished(agent), said(child)
        wrong = wrong_blocks(cache, ids, bytes([OLD]) * SMALL.bytes)
    return {**verdict(done, theirs, wrong, by), "held_up": held_up, "seconds": round(seconds, 2)}


def rates() -> dict[str, Any]:
    """128 MiB, in blocks that are as large as a layer's of some models, and in smaller ones with and without the copy kernel."""
    pairs = [(1 << 20, kind, by, True) for kind in ("host", "cuMemAlloc") for by in ("tcp", "local")]
    pairs += [(block, "cuMemAlloc", by, kernel) for block in (64 << 10, 16 << 10) for by in ("tcp", "local") for kernel in (True, False)]
    return {
        f"128 MiB in blocks of {block >> 10} KiB, {kind} to {kind}, by {by}{'' if kernel else ', without the copy kernel'}": (
            lambda block=block, kind=kind, by=by, kernel=kernel: transfer(kind, kind, of=large(block), way="ready", by=by, kernel=kernel)
        )
        for block, kind, by, kernel in pairs
    }


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


def main(only: str = "") -> int:
    driver = Driver(0)
    devices, torch = driver.number("cuDeviceGetCount"), torch_version()
    of_driver = ["cuMemAlloc", "pool", "mapped by handles"]
    cases: dict[str, Any] = {
        f"{kind} to {kind}, {WAYS[way]}": lambda kind=kind, way=way: transfer(kind, kind, way=way) for kind in of_driver for way in WAYS
    }
    shared = ["cuMemAlloc", "mapped by handles, to be exported"]
    cases |= {
        f"{kind} to {kind}, by local, {WAYS[way]}": lambda kind=kind, way=way: transfer(kind, kind, way=way, by="local")
        for kind in shared
        for way in WAYS
    }
    cases["host to cuMemAlloc"] = lambda: transfer("host", "cuMemAlloc")
    cases["cuMemAlloc to host"] = lambda: transfer("cuMemAlloc", "host")
    cases["memory that was freed"] = freed
    cases |= {f"both engines sleep and wake, by {by}": lambda by=by: slept(by) for by in ("tcp", "local")}
    cases["prefill is killed, by local"] = killed
    cases |= {f"beside a stream that stands still, by {by}": lambda by=by: beside_a_standing_stream(by) for by in ("tcp", "local")}
    not_run: dict[str, str] = {}
    if devices > 1:
        cases["to another GPU"] = lambda: transfer("cuMemAlloc", "cuMemAlloc", other=Other(1))
        if "CUDA_VISIBLE_DEVICES" not in os.environ:
            cases["other CUDA_VISIBLE_DEVICES in each process"] = lambda: transfer(
                "cuMemAlloc", "cuMemAlloc", other=Other(0, str(devices - 1))
            )
        else:
            not_run["other CUDA_VISIBLE_DEVICES in each process"] = "CUDA_VISIBLE_DEVICES is set"
    else:
        not_run["transfers between two GPUs"] = "there is one GPU"
    if driver.double:
        not_run["the rates of 128 MiB"] = "the driver double has no speed"
    elif ONE_CONNECTION:
        not_run["the rates of 128 MiB"] = "they are measured with several connections"
    else:  # offered whole: the rates are of this machine's loopback
        cases |= rates()
    if torch:
        cases |= {f"torch to torch, {WAYS[way]}": lambda way=way: transfer("torch", "torch", way=way) for way in WAYS}
        cases |= {f"torch to torch, by local, {WAYS[way]}": lambda way=way: transfer("torch", "torch", way=way, by="local") for way in WAYS}
        cases |= {"host to torch": lambda: transfer("host", "torch"), "torch to host": lambda: transfer("torch", "host")}
    else:
        not_run["PyTorch's tensors"] = NO_TORCH
    if ONE_CONNECTION:  # the kit's other run says the same
        not_run = {f"{name}, with one connection": reason for name, reason in not_run.items()}
    results = []
    for name, case in cases.items():
        if only not in name:
            continue
        try:
            result = case()
        except Exception as e:
            result = {"ok": False, "reason": f"{type(e).__name__}: {e}"}
        results.append({"case": name, **result})
        print(f"{'ok    ' if result['ok'] else 'FAILED'} {name}: {result['reason'] or 'every byte is right'}", file=sys.stderr)
    for name, reason in not_run.items():
        print(f"NOT RUN: {name}: {reason}", file=sys.stderr)
    head = {"device": driver.name(), "devices": devices, "double": driver.double, "driver": driver.number("cuDriverGetVersion")}
    head |= {"kvconn": kvconn.__version__, "python": platform.python_version(), "torch": torch or "not here, or without a GPU"}
    head |= {"moment_us": moment_us(), "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "as the driver does")}
    print(json.dumps({**head, "not_run": not_run, "cases": results}, indent=2))
    return not results or not all(r["ok"] for r in results)


if __name__ == "__main__":
    logging.basicConfig(level=logging.CRITICAL)  # reasons stand in the results
    if sys.argv[1:2] == ["prefill"]:
        prefill(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), sys.argv[6], sys.argv[7] == "1")
    else:
        sys.exit(main(*sys.argv[1:]))
