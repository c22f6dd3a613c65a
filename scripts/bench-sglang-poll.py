#!/usr/bin/env python3
"""Measures how long SGLang's scheduler takes to poll 100 rooms that have no news, and to collect the news of 100.

    .venv-sglang/bin/python scripts/bench-sglang-poll.py [ROOMS]

Two agents in this process, SGLang's own classes over them; the best and the median of many rounds, in microseconds.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python" / "tests"))

from sglang_rank import MLATokenToKVPool, kv_args

import kvconn
from kvconn.sglang.conn import KVConnReceiver, KVConnSender
from kvconn.sglang.layout import Heads, Layout
from kvconn.sglang.rooms import Rooms
from kvconn.sglang.route import Engine

PAGES, ROW = 512, 256


def manager(role: str, **config: object) -> SimpleNamespace:
    """What a sender and a receiver use of their manager."""
    cache, rows = np.zeros((2, PAGES, ROW), np.uint8), np.zeros((PAGES, 64), np.uint8)
    args = kv_args(1, cache, [rows], {})
    args.keep = (cache, rows)
    agent = kvconn.Agent({"engine_id": "sglang-dp0" if role == "prefill" else "d", "role": role, "log_level": "error", **config})
    layout = Layout(args, MLATokenToKVPool(cache, range(2)), None, Heads(0, 0, 0, 1))
    agent.register_kv_caches(layout.regions)
    rooms = Rooms(agent, role, 300, 300)
    router = SimpleNamespace(engine=lambda _address, then: then(Engine()), forget=lambda _address: None)
    one = SimpleNamespace(rank=SimpleNamespace(dp_size=1))
    return SimpleNamespace(
        rooms=rooms,
        layout=layout,
        agent=agent,
        kv_args=args,
        router=router,
        parallel=one,
        kv_cache_dtype_str="",
        kv_layout=None,
        open_room=rooms.open,
    )


def poll_all(halves: list) -> float:
    began = time.perf_counter()
    for half in halves:
        half.poll()
    return (time.perf_counter() - began) * 1e6


def report(what: str, times: list[float]) -> None:
    print(f"{what}: best {min(times):.1f} µs, median {statistics.median(times):.1f} µs")


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    p = manager("prefill", bootstrap_host="127.0.0.1", bootstrap_port=0, report_demands=True)
    d = manager("decode")
    address = p.agent.bootstrap_address.removeprefix("http://")
    receivers, senders = [], []
    for room in range(count):
        receivers.append(KVConnReceiver(d, address, room))
        receivers[-1].init(0)
    report(f"{count} receivers that wait", [poll_all(receivers) for _ in range(2000)])
    for row, receiver in enumerate(receivers):
        receiver.send_metadata(np.array([row * 4 + n for n in range(4)], np.int32), row, None, 0)
    report(f"{count} receivers whose prefill is not done", [poll_all(receivers) for _ in range(2000)])
    for room in range(count):
        senders.append(KVConnSender(p, address, room))
    while any(sender.poll() != 2 for sender in senders):
        time.sleep(0.01)
    report(f"{count} senders that wait", [poll_all(senders) for _ in range(2000)])
    for row, sender in enumerate(senders):
        sender.pop_decode_prefix_len()
        sender.init(4, row)
        sender.send(np.array([row * 4 + n for n in range(4)], np.int32))
    while p.agent._count.value < count or d.agent._count.value < count:
        time.sleep(0.01)
    print(f"the news of {count} at once: {poll_all(receivers):.1f} µs, {poll_all(senders):.1f} µs")
    assert {half.poll() for half in (*receivers, *senders)} == {4}, "not all were carried"
    for side in (d, p):
        side.agent.close()


if __name__ == "__main__":
    main()
