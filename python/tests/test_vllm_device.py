"""Workers' connectors, as vLLM makes them, with caches in device memory of the driver double and real agents.

The streams are late. Without a moment the bytes that land are others.
"""

from __future__ import annotations

import ctypes as c
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

sys.path.append(str(Path(__file__).resolve().parents[2] / "e2e"))

import torch
from device_engine import DeviceTensor
from side import Side
from sleeper import Sleeper
from test_vllm_connector import Worker, groups

import kvconn
from kvconn.vllm import moments
from kvconn.vllm.metadata import KVConnMetadata, LoadWork, OfferWork, PartialWork

__all__ = ["groups"]  # vLLM's groups of ranks, for this module
DOUBLE = Path(os.environ.get("KVCONN_LIBCUDA", ""))  # the library reads it too

pytestmark = pytest.mark.skipif(not DOUBLE.is_file(), reason="NOT RUN: the driver double is not built, see `make gpu-double`")
LATE = 100  # works of a third of a millisecond at most


class Gpu:
    def __init__(self) -> None:
        self.lib = c.CDLL(str(DOUBLE))
        self.lib.kvgpu_wrong.restype = c.c_size_t
        context = c.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", c.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *args: Any) -> None:
        assert getattr(self.lib, name)(*args) == 0, name

    def stream(self) -> int:
        made = c.c_void_p()
        self.call("cuStreamCreate", c.byref(made), 1)
        assert made.value
        return made.value

    def tensor(self, like: torch.Tensor) -> DeviceTensor:
        address = c.c_uint64()
        self.call("cuMemAlloc_v2", c.byref(address), c.c_size_t(like.numel() * like.element_size()))
        return DeviceTensor.at(address.value, like)


class Engine:
    """A worker, and its GPU's stream."""

    def __init__(self, gpu: Gpu, model: Path, role: str, patch: pytest.MonkeyPatch, sleeps: bool = False) -> None:
        self.gpu, self.stream = gpu, gpu.stream()
        patch.setattr(moments, "current_stream", lambda device: lambda: self.stream)
        self.worker = Worker(model, role, place=self._sleeper if sleeps else gpu.tensor, kv_buffer_device="cuda")
        self._at, self._size = self.worker.placed.data_ptr(), self.worker.cache[0].nbytes

    def _sleeper(self, like: torch.Tensor) -> DeviceTensor:
        self.memory = Sleeper(self.gpu, like.numel() * like.element_size())
        return DeviceTensor.at(self.memory.address, like)

    def sleep_and_wake(self) -> None:
        """As vLLM's cumem allocator: the addresses stay, and hold other memory then."""
        self.memory.sleep()
        self.memory.wake()

    def write(self, block: int, pattern: int, times: int = LATE) -> None:
        """Has the stream write a block, after some others have written it."""
        for n in range(times):
            at, kind = c.c_uint64(self._at + block * self._size), c.c_uint64(pattern if n == times - 1 else 99)
            self.gpu.call("kvgpu_kernel_fill", c.c_void_p(self.stream), at, c.c_size_t(self._size), kind, c.c_uint64(0))

    def wrong(self, block: int, pattern: int) -> int:
        at = c.c_uint64(self._at + block * self._size)
        return int(self.gpu.lib.kvgpu_wrong(at, c.c_size_t(self._size), c.c_uint64(pattern), c.c_uint64(0)))


@pytest.fixture
def pair(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Engine]]:
    gpu = Gpu()
    p, d = (Engine(gpu, model, role, monkeypatch) for role in ("kv_producer", "kv_consumer"))
    yield p, d
    d.worker.connector.shutdown()
    p.worker.connector.shutdown()


def test_an_offer_is_read_after_the_steps_before(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    p.write(1, 7)
    p.worker.offer("t", [1])
    assert not d.worker.load("t", p.worker, [3]) and p.worker.is_sent("t")
    assert d.wrong(3, 7) == 0


def test_a_load_is_written_after_what_is_queued(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    p.write(1, 7, times=1)
    p.worker.offer("t", [1])
    p.gpu.call("cuStreamSynchronize", c.c_void_p(p.stream))
    d.write(3, 8, times=3 * LATE)
    assert not d.worker.load("t", p.worker, [3])
    assert d.wrong(3, 7) == 0


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_a_moment_is_of_torch_s_current_stream(layer_by_layer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's tensors, and calls that name no stream: the stream that is current on the regions' GPU is marked."""
    gpu, asked = Gpu(), []
    stream = gpu.stream()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: asked.append(index) or stream, raising=False)
    block, cache = 64 << 10, gpu.tensor(torch.zeros(4, 64 << 10, dtype=torch.uint8))
    ring: dict[str, object] = {"device_ring_bytes": 4 << 20, "device_slot_bytes": 128 << 10}
    p, d = (Side(role, **ring) for role in ("prefill", "decode"))
    try:
        for side in p, d:
            side.agent.register_kv_caches(kvconn.regions_from_tensor("layer.0", cache, block_dim=0))
        d.agent.start_load([kvconn.Load("t", p.agent.bootstrap_address, "engine-prefill", [[3]])])
        at = cache.data_ptr() + block
        for n in range(LATE):
            kind = c.c_uint64(7 if n == LATE - 1 else 99)
            gpu.call("kvgpu_kernel_fill", c.c_void_p(stream), c.c_uint64(at), c.c_size_t(block), kind, c.c_uint64(0))
        if layer_by_layer:
            p.agent.offer_partial([kvconn.PartialOffer("t", [[1]], ready=[0], computing=[1])])
            p.agent.written_on((0,))
        p.agent.offer([kvconn.Offer("t", [[1]], after=p.agent.moment())])
        assert d.finished("t").ok
        assert gpu.lib.kvgpu_wrong(c.c_uint64(at + 2 * block), c.c_size_t(block), c.c_uint64(7), c.c_uint64(0)) == 0
        assert set(asked) == {0}
    finally:
        d.agent.close()
        p.agent.close()


@pytest.mark.parametrize("called", [True, False])
def test_a_step_is_read_after_its_layers(pair: tuple[Engine, Engine], called: bool) -> None:
    """The load is there first. Block 1 is of an earlier step, block 2 of this one."""
    p, d = pair
    address = p.worker.connector.get_handshake_metadata().bootstrap_addr
    d.worker.step(KVConnMetadata(loads=[LoadWork("r", "t", address, p.worker.engine_id, [[5, 6]], [0], 256)]))
    p.write(1, 7)

    def forward() -> None:
        p.write(2, 8)
        if called:
            p.worker.connector.save_kv_layer("layer.0", None, None)

    p.worker.step(KVConnMetadata(partials=[PartialWork("t", [[1, 2]], [1], [2], first_block=[0])]), forward)
    p.worker.step(KVConnMetadata(offers=[OfferWork("s", "t", [[1, 2]], [0])]))
    assert d.worker.is_received("r") and p.worker.is_sent("s")
    assert (d.wrong(5, 7), d.wrong(6, 8)) == (0, 0)


def test_engines_that_slept_go_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their workers are not told of it. What was offered before the sleep is gone, and so it is refused."""
    gpu = Gpu()
    p, d = (Engine(gpu, model, role, monkeypatch, sleeps=True) for role in ("kv_producer", "kv_consumer"))
    for name, pattern in [("a", 7), ("b", 8), ("c", 9)]:
        p.write(1, pattern)
        p.worker.offer(name, [1])
        assert not d.worker.load(name, p.worker, [3]) and p.worker.is_sent(name)
        assert d.wrong(3, pattern) == 0
        if name == "a":
            p.write(2, 7)
            p.worker.offer("old", [2])
            gpu.call("cuStreamSynchronize", c.c_void_p(p.stream))
        p.sleep_and_wake()
        d.sleep_and_wake()
        if name == "a":
            assert d.worker.load("old", p.worker, [4]) == {4} and p.worker.is_sent("old")
    d.worker.connector.shutdown()
    p.worker.connector.shutdown()


def test_caches_elsewhere_than_vllm_was_told(model: Path) -> None:
    with pytest.raises(ValueError, match=r"layer layer\.0 lies on cpu, but kv_buffer_device is 'cuda'"):
        Worker(model, "kv_producer", kv_buffer_device="cuda")
