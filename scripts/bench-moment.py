"""What a moment costs an engine's thread, and the marks of a step, beside the driver's own calls.

Run it with the Python of an environment that has the wheel, on the driver double or a real driver:
    KVGPU_DELAY_US=0 KVCONN_LIBCUDA=$PWD/build/gpu-double/libkvgpu-double.so build/test-wheel/bin/python scripts/bench-moment.py
"""

from __future__ import annotations

import ctypes as c
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import kvconn

LAYERS, BLOCKS, BLOCK, STEPS = 80, 4, 4096, 2000

# The calls of the driver that a moment consists of, by a loop in C.
CALLS = """
#include <stddef.h>
typedef int (*call)(void *, void *);
enum { MODE, PUSH, CAPTURING, ID, RECORD, POP };
void moments(void **f, void *context, void *stream, void *event, int times) {
  while (times-- > 0) {
    int mode = 2, capturing;
    unsigned long long id;
    void *popped;
    ((call)f[MODE])(&mode, NULL);
    ((call)f[PUSH])(context, NULL);
    ((call)f[CAPTURING])(stream, &capturing);
    ((call)f[ID])(stream, &id);
    ((call)f[RECORD])(event, stream);
    ((call)f[POP])(&popped, NULL);
    ((call)f[MODE])(&mode, NULL);
  }
}
"""
NAMES = (
    "cuThreadExchangeStreamCaptureMode",
    "cuCtxPushCurrent_v2",
    "cuStreamIsCapturing",
    "cuStreamGetId",
    "cuEventRecord",
    "cuCtxPopCurrent_v2",
)


def compiled() -> c.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "calls.c"), Path(folder, "calls.so")
        source.write_text(CALLS)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        return c.CDLL(str(library))


class Driver:
    def __init__(self) -> None:
        self.lib = c.CDLL(os.environ.get("KVCONN_LIBCUDA") or "libcuda.so.1")
        self.call("cuInit", 0)
        self.context, self.stream, self.event, self.memory = c.c_void_p(), c.c_void_p(), c.c_void_p(), c.c_uint64()
        self.call("cuDevicePrimaryCtxRetain", c.byref(self.context), 0)
        self.call("cuCtxSetCurrent", self.context)
        self.call("cuStreamCreate", c.byref(self.stream), 1)
        self.call("cuEventCreate", c.byref(self.event), 3)
        self.call("cuMemAlloc_v2", c.byref(self.memory), c.c_size_t(LAYERS * BLOCKS * BLOCK))

    def call(self, name: str, *args: object) -> None:
        code = getattr(self.lib, name)(*args)
        assert code == 0, f"{name}: CUresult {code}"

    def hold(self, on: bool) -> None:
        if hasattr(self.lib, "kvgpu_hold"):
            self.call("kvgpu_hold" if on else "kvgpu_release", self.stream)


def measure(driver: Driver, what: str, step: Callable[[], None]) -> float:
    """A step's time on the engine's thread; between steps the stream comes to its end.

    Meanwhile the double's stream is held: its thread would take the core, which a GPU does not.
    """
    times = []
    for _ in range(STEPS):
        driver.hold(True)
        begin = time.perf_counter_ns()
        step()
        times.append((time.perf_counter_ns() - begin) / 1000)
        driver.hold(False)
        driver.call("cuStreamSynchronize", driver.stream)
    median, low, high = statistics.median(times), *statistics.quantiles(times, n=10)[::8]
    print(f"{what:58} {median / LAYERS:6.2f} us, a step of {LAYERS}: {median:6.1f} us (10 to 90 %: {low:.1f} to {high:.1f})")
    return median


def main() -> None:
    driver, calls = Driver(), compiled()
    table = (c.c_void_p * len(NAMES))(*(c.cast(getattr(driver.lib, name), c.c_void_p).value for name in NAMES))
    agent = kvconn.Agent({"engine_id": "moments", "role": "prefill", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0})
    base, stream = driver.memory.value, driver.stream.value or 0
    size = BLOCKS * BLOCK
    agent.register_kv_caches(
        [kvconn.Region(f"layer.{i}", base + i * size, BLOCK, BLOCK, BLOCKS, memory=kvconn.Memory.DEVICE) for i in range(LAYERS)]
    )
    layers = range(LAYERS)
    one = [range(i, i + 1) for i in layers]
    lists = [[i] for i in layers]

    def moments() -> None:
        for i in layers:
            agent.moment(i, stream)

    def marks() -> None:
        for i in layers:
            agent.written_after(one[i], moment)

    def marks_of_lists() -> None:
        for i in layers:
            agent.written_after(lists[i], moment)

    def both() -> None:
        for i in layers:
            agent.written_on(one[i], stream)

    try:
        moment = agent.moment(0, stream)
        floor = measure(
            driver,
            "the driver's calls of a moment, from C",
            lambda: calls.moments(table, driver.context, driver.stream, driver.event, LAYERS),
        )
        ours = measure(driver, "Agent.moment", moments)
        measure(driver, "Agent.written_after of a range", marks)
        measure(driver, "Agent.written_after of a list", marks_of_lists)
        layer = measure(driver, "Agent.written_on", both)
        print(
            f"above the driver's calls: a moment {(ours - floor) / LAYERS:.2f} us, a layer's written_on {(layer - floor) / LAYERS:.2f} us"
        )
    finally:
        agent.close()


if __name__ == "__main__":
    main()
