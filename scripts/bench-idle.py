"""An idle get_finished against a ctypes call of an empty C function.

Run it with the Python of an environment that has the wheel:
    build/test-wheel/bin/python scripts/bench-idle.py
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import tempfile
import timeit
from pathlib import Path

import kvconn

CALLS = 300_000


def ns(call: object) -> float:
    return min(timeit.repeat(call, number=CALLS, repeat=7)) / CALLS * 1e9  # type: ignore[arg-type]


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def rss_mb() -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def main() -> None:
    with tempfile.TemporaryDirectory() as d:
        source, library = Path(d, "empty.c"), Path(d, "empty.so")
        source.write_text("void empty(void) {}\n")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        cdll, pydll = ctypes.CDLL(str(library)).empty, ctypes.PyDLL(str(library)).empty
    memory = mmap.mmap(-1, 1 << 15)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    kvconn.Region, kvconn.KvconnError  # noqa: B018  (loaded before the memory is measured)
    mb, n = rss_mb(), threads()
    agent = kvconn.Agent({"engine_id": "idle", "role": "both", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0})
    agent.register_kv_caches([kvconn.Region("r", address, 4096, 4096, 8)])
    print(f"in the host's process: {rss_mb() - mb:.1f} MB, {threads() - n} threads more")
    ours, a, b = ns(agent.get_finished), ns(cdll), ns(pydll)
    print(f"get_finished {ours:.0f} ns; empty C function by CDLL {a:.0f} ns, by PyDLL {b:.0f} ns: {ours / a:.2f} and {ours / b:.2f} times")
    before = os.times()
    agent.wait(5)
    after = os.times()
    print(f"idle for 5 s: {(after.user - before.user + after.system - before.system) * 1e3:.0f} ms of processor time")
    agent.close()


if __name__ == "__main__":
    main()
