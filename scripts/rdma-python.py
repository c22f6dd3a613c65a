"""A pair of agents through the C library and the Python API, in two processes, by
RDMA; and what ``kvconn doctor`` says. Run by scripts/rdma-test.sh in its machine,
with PYTHONPATH=python and KVCONN_LIBRARY. Nothing but the standard library.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import subprocess
import sys
import time
from ctypes import addressof, c_char
from typing import Any

import kvconn

LAYERS, BLOCKS, BLOCK = 4, 256, 32 << 10
BOUND = 120.0
IDLE = 20.0


class Side:
    """One agent over a cache of LAYERS regions of BLOCKS blocks of BLOCK bytes."""

    def __init__(self, role: str, **config: Any) -> None:
        self.cache = mmap.mmap(-1, LAYERS * BLOCKS * BLOCK)
        base = addressof(c_char.from_buffer(self.cache))
        self.agent = kvconn.Agent({"engine_id": f"engine-{role}", "role": role, "transport": "rdma", **config})
        size = BLOCKS * BLOCK
        self.agent.register_kv_caches([kvconn.Region(f"layer.{i}", base + i * size, BLOCK, BLOCK, BLOCKS) for i in range(LAYERS)])

    def at(self, layer: int, block: int) -> slice:
        start = (layer * BLOCKS + block) * BLOCK
        return slice(start, start + BLOCK)

    def finished(self, transfer_id: str) -> kvconn.Completion:
        end = time.monotonic() + BOUND
        while time.monotonic() < end:
            for done in self.agent.get_finished():
                assert done.transfer_id == transfer_id, done
                return done
            self.agent.wait(1)
        raise AssertionError(f"no completion of {transfer_id} within {BOUND} s: {self.agent.stats()}")


def content(transfer_id: str, layer: int, position: int) -> bytes:
    """The value of a transfer at a place. It names both."""
    return random.Random(f"{transfer_id} {layer} {position}").randbytes(BLOCK)


def blocks_of(transfer_id: str, side: str, count: int) -> list[int]:
    return random.Random(transfer_id + side).sample(range(BLOCKS), count)


def idle(side: Side) -> float:
    """The milliseconds of processor time that this process takes while it waits for nothing."""
    before = os.times()
    assert not side.agent.wait(IDLE)
    after = os.times()
    return (after.user - before.user + after.system - before.system) * 1e3


def prefill(transport: str) -> None:
    """Offers what its standard input names, a transfer and a number of blocks a line."""
    side = Side("prefill", transport=transport, bootstrap_host="127.0.0.1", bootstrap_port=0)
    print(json.dumps(side.agent.bootstrap_address), flush=True)
    for line in sys.stdin:
        transfer_id, count = json.loads(line)
        if not count:
            print(idle(side), flush=True)
            continue
        ids = blocks_of(transfer_id, "prefill", count)
        for layer in range(LAYERS):
            for position, block in enumerate(ids):
                side.cache[side.at(layer, block)] = content(transfer_id, layer, position)
        side.agent.offer([kvconn.Offer(transfer_id, [ids])])
        done = side.finished(transfer_id)
        print(json.dumps([done.code, done.reason, done.bytes, done.transport, side.agent.stats()["transports"]]), flush=True)
    side.agent.close()


class Pair:
    """A decode agent here, and a prefill agent in a process of its own."""

    def __init__(self, transport: str) -> None:
        command = [sys.executable, __file__, "prefill", transport]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.address = self.answer()
            self.side = Side("decode", transport=transport)
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        assert self.process.stdin
        self.side.agent.close()
        self.process.stdin.close()
        assert self.process.wait(BOUND) == 0

    def ask(self, *order: Any) -> None:
        print(json.dumps(order), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def idle(self) -> int:
        """Measures both agents while nothing is under way. Returns how many lanes are up."""
        self.ask("idle", 0)
        ours, theirs = idle(self.side), float(self.answer())
        lanes: int = self.side.agent.stats()["transports"]["rdma"]["counters"]["lanes"]
        took = f"{ours:.0f} ms of processor time of decode, {theirs:.0f} ms of prefill"
        print(f"measured: idle for {IDLE:.0f} s with {lanes} lanes up: {took}")
        return lanes

    def load(self, transfer_id: str, count: int) -> tuple[kvconn.Completion, dict[str, Any]]:
        """Moves so many blocks and compares every byte. Returns the completion, and the counters of prefill's transports."""
        side, nothing = self.side, bytes(BLOCK)
        self.ask(transfer_id, count)
        ids = blocks_of(transfer_id, "decode", count)
        side.cache[:] = bytes(len(side.cache))
        side.agent.start_load([kvconn.Load(transfer_id, self.address, "engine-prefill", [ids])])
        done = side.finished(transfer_id)
        assert done.ok and done.bytes == LAYERS * count * BLOCK, done
        position = {block: i for i, block in enumerate(ids)}
        for layer in range(LAYERS):
            for block in range(BLOCKS):
                want = content(transfer_id, layer, position[block]) if block in position else nothing
                assert side.cache[side.at(layer, block)] == want, (transfer_id, layer, block)
        code, reason, sent, transport, stats = self.answer()
        assert (code, sent, transport) == (0, done.bytes, done.transport), (code, reason, sent, transport)
        took = done.wait_s + done.transfer_s
        print(f"measured: {count} blocks, {done.bytes >> 10} KiB by {done.transport} in {took:.3f} s, every byte right")
        return done, stats


def check_pair() -> None:
    with Pair("rdma") as pair:
        total = 0
        for n, count in enumerate([1, 7, 64, 200]):
            done, sent = pair.load(f"transfer-{n}", count)
            total += done.bytes
            assert done.transport == "rdma" and sent["rdma"]["offers"] == n + 1 and sent["rdma"]["bytes_out"] == total, sent
        assert pair.idle() > 0
        stats = pair.side.agent.stats()
        counts = stats["transports"]["rdma"]
        assert stats["transport"] == "rdma" and list(stats["transports"]) == ["rdma"], stats
        assert counts["available"] and counts["loads"] == 4 and counts["bytes_in"] == total, counts
        assert [(p["transport"], p["transfers"]["rdma"]) for p in stats["pairs"]] == [("rdma", 4)], stats["pairs"]
        pair.close()


def paths(how: str) -> None:
    for i in range(int(os.environ["RXE_PATHS"])):
        subprocess.run(["rxe-link", str(i), how], check=True, timeout=BOUND)


def check_later() -> None:
    """Agents that were opened while all ports were down go by tcp, and by rdma once these are up."""
    paths("off")
    try:
        with Pair("rdma,tcp") as pair:  # auto would take local
            done, _ = pair.load("without", 7)
            (peer,) = pair.side.agent.stats()["pairs"]
            assert done.transport == "tcp" and "rxe0:1 is down" in peer["reason"], (done, peer)
            print(f"by tcp: {peer['reason']}")
            assert pair.idle() == 0
            paths("on")
            start, n = time.monotonic(), 0
            while done.transport != "rdma":
                assert time.monotonic() < start + BOUND, pair.side.agent.stats()
                n += 1
                done, _ = pair.load(f"later-{n}", 7)
            pair.close()
    finally:
        paths("on")


def check_refusal() -> None:
    """Where rdma is asked for in vain, the call says why; auto goes on without."""
    try:
        Side("decode", rdma_devices=["mlx5_9"])
    except kvconn.KvconnError as e:
        assert "mlx5_9" in str(e) and "rxe0" in str(e), e
        print(f"refused: {e}")
    else:
        raise AssertionError("a device that is not there was taken")


def check_doctor() -> None:
    doctor = [sys.executable, "-m", "kvconn", "doctor", "--json"]
    out = subprocess.run(doctor, capture_output=True, text=True, timeout=BOUND, check=True).stdout
    found = json.loads(out)
    rdma = found["rdma"]
    assert found["ok"] and rdma["available"] and not rdma.get("problem"), rdma
    assert found["auto"].startswith("local with engines of this host, rdma"), found["auto"]
    paths = int(os.environ["RXE_PATHS"])
    assert [d["name"] for d in rdma["devices"]] == [f"rxe{i}" for i in range(paths)], rdma["devices"]
    for i, device in enumerate(rdma["devices"]):
        assert device["selected"] and device["file"].startswith("/dev/infiniband/uverbs"), device
        (port,) = device["ports"]
        assert port["usable"] and port["link_layer"] == "Ethernet", port
        (gid,) = [g for g in port["gids"] if g["chosen"]]
        assert (gid["address"], gid["netdev"], gid["type"]) == (f"10.77.{i}.1", f"path{i}", "RoCE v2"), gid
    print(subprocess.run([sys.executable, "-m", "kvconn", "doctor"], capture_output=True, text=True, timeout=BOUND, check=True).stdout)


if __name__ == "__main__":
    if sys.argv[1:2] == ["prefill"]:
        prefill(sys.argv[2])
    else:
        check_doctor()
        check_refusal()
        check_pair()
        check_later()
        print("ok: two agents in two Python processes, by rdma")
