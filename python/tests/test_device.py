"""Caches in device memory, on the tests' CUDA driver: an engine of its own streams and kernels, and kvconn's agents."""

from __future__ import annotations

import ctypes as c
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from side import Side

import kvconn

LAYERS, BLOCKS, BLOCK = 2, 16, 64 << 10
DOUBLE = Path(os.environ.get("KVCONN_LIBCUDA", ""))  # the library reads the environment that its process began with
REFUSED = "KVCONN_TEST_NO_MEMBARRIER"  # names what the process may not call

pytestmark = pytest.mark.skipif(not DOUBLE.is_file(), reason="NOT RUN: the driver double is not built, see `make gpu-double`")


class Gpu:
    """An engine's side of the driver: its context, memory, streams and kernels."""

    def __init__(self) -> None:
        self.lib = c.CDLL(str(DOUBLE))
        self.lib.kvgpu_wrong.restype = c.c_size_t
        self.lib.kvgpu_count.restype = c.c_uint64
        self.call("cuInit", 0)
        context = c.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", c.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *args: Any) -> None:
        assert getattr(self.lib, name)(*args) == 0, name

    def stream(self) -> int:
        stream = c.c_void_p()
        self.call("cuStreamCreate", c.byref(stream), 1)
        assert stream.value
        return stream.value

    def cache(self) -> DeviceArray:
        address = c.c_uint64()
        self.call("cuMemAlloc_v2", c.byref(address), c.c_size_t(LAYERS * BLOCKS * BLOCK))
        return DeviceArray(address.value, (LAYERS, BLOCKS, BLOCK))

    def kernel(self, stream: int, address: int, pattern: int) -> None:
        """Writes a block, when the stream comes to it."""
        self.call("kvgpu_kernel_fill", c.c_void_p(stream), c.c_uint64(address), c.c_size_t(BLOCK), c.c_uint64(pattern), c.c_uint64(0))

    def wrong(self, address: int, pattern: int) -> int:
        """How many bytes of a block differ from the pattern."""
        return int(self.lib.kvgpu_wrong(c.c_uint64(address), c.c_size_t(BLOCK), c.c_uint64(pattern), c.c_uint64(0)))


class DeviceArray:
    """What cupy or numba would give."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.address = address
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}

    def layer(self, i: int) -> DeviceArray:
        return DeviceArray(self.address + i * BLOCKS * BLOCK, (BLOCKS, BLOCK))

    def block(self, layer: int, block: int) -> int:
        return self.address + (layer * BLOCKS + block) * BLOCK


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return Gpu()


class DeviceSide(Side):
    """A side whose cache is in device memory."""

    def __init__(self, gpu: Gpu, role: str, **config: object) -> None:
        super().__init__(role, device_ring_bytes=4 << 20, device_slot_bytes=128 << 10, **config)
        self.device = gpu.cache()

    def register(self) -> Side:
        self.agent.register_kv_caches(
            [r for i in range(LAYERS) for r in kvconn.regions_from_tensor(f"layer.{i}", self.device.layer(i), block_dim=0)]
        )
        return self


@pytest.fixture
def sides(gpu: Gpu) -> Iterator[tuple[DeviceSide, DeviceSide]]:
    p, d = DeviceSide(gpu, "prefill"), DeviceSide(gpu, "decode")
    try:
        p.register()
        d.register()
        yield p, d
    finally:
        d.agent.close()
        p.agent.close()


def load(p: Side, d: Side, blocks: list[int], after: int = 0) -> None:
    d.agent.start_load([kvconn.Load("t", p.agent.bootstrap_address, "engine-prefill", [blocks], after=after)])


def test_an_offer_waits_for_its_moment(gpu: Gpu, sides: tuple[DeviceSide, DeviceSide]) -> None:
    p, d = sides
    stream = gpu.stream()
    load(p, d, [5, 6])
    for layer in range(LAYERS):
        for k, block in enumerate((1, 2)):
            gpu.kernel(stream, p.device.block(layer, block), 100 + 10 * layer + k)
    p.agent.offer([kvconn.Offer("t", [[1, 2]], after=p.agent.moment(0, stream))])
    assert d.finished("t").ok and p.finished("t").ok
    for layer in range(LAYERS):
        for k, block in enumerate((5, 6)):
            assert gpu.wrong(d.device.block(layer, block), 100 + 10 * layer + k) == 0


def test_a_load_waits_for_its_moment(gpu: Gpu, sides: tuple[DeviceSide, DeviceSide]) -> None:
    """Kernels that still write the blocks for another request come first."""
    p, d = sides
    mine, theirs = gpu.stream(), gpu.stream()
    gpu.kernel(mine, p.device.block(0, 1), 7)
    gpu.kernel(mine, p.device.block(1, 1), 8)
    p.agent.offer([kvconn.Offer("t", [[1]], after=p.agent.moment(0, mine))])
    for _ in range(20):
        gpu.kernel(theirs, d.device.block(0, 3), 1)
        gpu.kernel(theirs, d.device.block(1, 3), 1)
    load(p, d, [3], after=d.agent.moment(0, theirs))
    assert d.finished("t").ok
    assert gpu.wrong(d.device.block(0, 3), 7) == 0 and gpu.wrong(d.device.block(1, 3), 8) == 0


def test_layers_wait_for_their_moments(gpu: Gpu, sides: tuple[DeviceSide, DeviceSide]) -> None:
    p, d = sides
    stream = gpu.stream()
    load(p, d, [9])
    p.agent.offer_partial([kvconn.PartialOffer("t", [[4]], ready=[0], computing=[1])])
    for layer in range(LAYERS):
        gpu.kernel(stream, p.device.block(layer, 4), 50 + layer)
        p.agent.written_after([layer], p.agent.moment(layer, stream))
    p.agent.offer([kvconn.Offer("t", [[4]], after=p.agent.moment(0, stream))])
    assert d.finished("t").ok and p.finished("t").ok
    assert [gpu.wrong(d.device.block(layer, 9), 50 + layer) for layer in range(LAYERS)] == [0] * LAYERS


def test_layers_are_marked_on_their_stream(gpu: Gpu, sides: tuple[DeviceSide, DeviceSide]) -> None:
    """One call a layer: its moment is of the work that the stream has then."""
    p, d = sides
    stream = gpu.stream()
    load(p, d, [9])
    p.agent.offer_partial([kvconn.PartialOffer("t", [[4]], ready=[0], computing=[1])])
    for layer, regions in enumerate(([0], (1,))):
        gpu.kernel(stream, p.device.block(layer, 4), 70 + layer)
        p.agent.written_on(regions, stream)
    p.agent.offer([kvconn.Offer("t", [[4]], after=p.agent.moment(0, stream))])
    assert d.finished("t").ok and p.finished("t").ok
    assert [gpu.wrong(d.device.block(layer, 9), 70 + layer) for layer in range(LAYERS)] == [0] * LAYERS


def test_layers_go_before_their_offer(gpu: Gpu, sides: tuple[DeviceSide, DeviceSide]) -> None:
    """What a layer's mark says is ready moves while the step runs, and no other call comes."""
    p, d = sides
    stream = gpu.stream()
    load(p, d, [9])
    p.until("offers_under_way", 1)  # from then on what is ready moves at once
    p.agent.offer_partial([kvconn.PartialOffer("t", [[4]], ready=[0], computing=[1])])
    for layer in range(LAYERS):
        gpu.kernel(stream, p.device.block(layer, 4), 90 + layer)
        p.agent.written_on((layer,), stream)
        deadline = time.monotonic() + 30
        while gpu.wrong(d.device.block(layer, 9), 90 + layer):
            assert time.monotonic() < deadline, (layer, p.agent.stats())
            time.sleep(0.001)
    p.agent.offer([kvconn.Offer("t", [[4]], after=p.agent.moment(0, stream))])
    assert d.finished("t").ok and p.finished("t").ok


# Refuses membarrier(2) to a process, as the filters of some containers do.
NO_MEMBARRIER = """
import ctypes as c, errno, os, platform, struct, sys
number = {"x86_64": 324, "aarch64": 283}[platform.machine()]
code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | errno.EPERM), (0x06, 0, 0, 0x7FFF0000)]
rules = c.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in code))
program = c.create_string_buffer(struct.pack("HxxxxxxP", len(code), c.addressof(rules)))
libc = c.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(c.get_errno())
assert libc.syscall(c.c_long(number), 0, 0, 0) == -1 and c.get_errno() == errno.EPERM
"""


def test_layers_need_no_membarrier() -> None:
    """What a host's stores need to be seen in order is nothing that a device's work needs."""
    code = NO_MEMBARRIER + "import pytest\nsys.exit(pytest.main(sys.argv[1:]))"
    tests = [f"{__file__}::{test.__name__}" for test in (test_no_marks_of_stores, test_layers_go_before_their_offer)]
    argv = [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(argv, env={**os.environ, REFUSED: "1"}, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


def test_no_marks_of_stores(sides: tuple[DeviceSide, DeviceSide]) -> None:
    """Where membarrier(2) is refused there are no bytes to store marks at, and only there."""
    p, _ = sides
    assert len(p.agent.written) == (0 if REFUSED in os.environ else LAYERS)


def test_moments_that_cannot_be(gpu: Gpu, sides: tuple[DeviceSide, DeviceSide]) -> None:
    """Each refusal has the value, and the call that it comes from."""
    p, _ = sides
    stream = gpu.stream()
    first, again = p.agent.moment(0, stream), p.agent.moment(1, stream)
    assert 0 < first < again
    gpu.call("cuStreamBeginCapture_v2", c.c_void_p(stream), 2)
    for refused in (lambda: p.agent.moment(0, stream), lambda: p.agent.written_on((0,), stream)):
        with pytest.raises(kvconn.InvalidError, match="captured into a CUDA graph"):
            refused()
    gpu.call("cuStreamEndCapture", c.c_void_p(stream), c.byref(c.c_void_p()))
    for nowhere in (lambda: p.agent.moment(LAYERS, stream), lambda: p.agent.moment(LAYERS)):
        with pytest.raises(kvconn.InvalidError, match=f"region {LAYERS} "):
            nowhere()
    with pytest.raises(kvconn.InvalidError, match="region 4294967295 "):
        p.agent.moment(2**32 - 1, stream)
    with pytest.raises(kvconn.InvalidError, match="region is 4294967296"):
        p.agent.moment(2**32, stream)
    for unnamed in (lambda: p.agent.moment(), lambda: p.agent.written_on([1, 0])):  # torch does not know these arrays
        with pytest.raises(kvconn.InvalidError, match=r"stream is missing: region [01] was not made of a torch tensor"):
            unnamed()
    with pytest.raises(kvconn.InvalidError, match="stream is -1"):
        p.agent.moment(0, -1)
    with pytest.raises(kvconn.InvalidError, match="moment is -1"):
        p.agent.written_after([0], -1)
    for regions in ([0, LAYERS], (0, LAYERS), range(LAYERS + 1)):
        with pytest.raises(kvconn.InvalidError, match="not in device memory"):
            p.agent.written_after(regions, again)
        with pytest.raises(kvconn.InvalidError, match="not in device memory"):
            p.agent.written_on(regions, stream)
    with pytest.raises(kvconn.InvalidError, match="num_regions is 0"):
        p.agent.written_on((), stream)
    gone = gpu.stream()
    gpu.call("cuStreamDestroy_v2", c.c_void_p(gone))
    with pytest.raises(kvconn.KvconnError, match=f"stream {gone:#x}.*INVALID_HANDLE"):
        p.agent.moment(0, gone)
    p.agent.close()
    for refused in (lambda: p.agent.moment(0, stream), lambda: p.agent.written_on((0,), stream), lambda: p.agent.written_after((0,), 1)):
        with pytest.raises(kvconn.KvconnError, match="handle is not open"):
            refused()


def test_host_memory_is_not_a_device(gpu: Gpu) -> None:
    p = Side("prefill")
    try:
        region = kvconn.regions_from_tensor("layer.0", p.cache[0], block_dim=0)[0]
        with pytest.raises(kvconn.KvconnError, match="host memory"):
            p.agent.register_kv_caches([region._replace(memory=kvconn.Memory.DEVICE)])
        p.register()
        with pytest.raises(kvconn.KvconnError, match="device memory"):
            p.agent.moment(0, 0)
        with pytest.raises(kvconn.KvconnError, match="device memory"):
            p.agent.moment()
    finally:
        p.agent.close()


def test_library_is_named_by_the_environment_that_is() -> None:
    """Go's copy of the environment is of the process's beginning, and engines overwrite it with a title (setproctitle)."""
    code = "import os, sys, pytest; os.environ['KVCONN_LIBCUDA'] = sys.argv[1]; sys.exit(pytest.main(sys.argv[2:]))"
    argv = [str(DOUBLE), "-q", "-p", "no:cacheprovider", f"{__file__}::test_an_offer_waits_for_its_moment"]
    env = {name: value for name, value in os.environ.items() if name != "KVCONN_LIBCUDA"}
    done = subprocess.run([sys.executable, "-c", code, *argv], env=env, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
