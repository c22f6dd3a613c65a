"""Caches for transfers.py: in host memory, in the driver's device memory of each kind, and as PyTorch's CUDA tensors."""

from __future__ import annotations

import ctypes as c
import mmap
import os
from typing import Any

import kvconn

LAYERS = 4
BIG = 256 << 20  # bytes that are written again and again to keep a stream busy


class Driver:
    """A CUDA driver, by ctypes, in the primary context of one device."""

    def __init__(self, device: int) -> None:
        self.lib = c.CDLL(os.environ.get("KVCONN_LIBCUDA") or "libcuda.so.1")
        self.double = hasattr(self.lib, "kvgpu_seed")
        self.device = device
        self.call("cuInit", 0)
        context = c.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", c.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self.lib, name)(*args)
        if code:
            raise OSError(f"{name}: CUresult {code}")

    def free(self) -> int:
        """Bytes of the device's memory that no process has."""
        free, total = c.c_size_t(), c.c_size_t()
        self.call("cuMemGetInfo_v2", c.byref(free), c.byref(total))
        return free.value

    def number(self, name: str, *args: Any) -> int:
        out = c.c_int()
        self.call(name, c.byref(out), *args)
        return out.value

    def name(self) -> str:
        text = c.create_string_buffer(100)
        self.call("cuDeviceGetName", text, 100, self.device)
        return text.value.decode()


class Standing:
    """A stream of the device that stands still until it is let go: it calls the C library's function that takes a mutex, and no Python."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.libc, self.mutex = driver, c.CDLL(None), c.create_string_buffer(64)  # zeros: it is free
        stream = c.c_void_p()
        driver.call("cuStreamCreate", c.byref(stream), 1)
        self.stream = stream
        self.libc.pthread_mutex_lock(self.mutex)
        driver.call("cuLaunchHostFunc", stream, c.cast(self.libc.pthread_mutex_lock, c.c_void_p), self.mutex)

    def let_go(self) -> None:
        self.libc.pthread_mutex_unlock(self.mutex)
        self.driver.call("cuStreamSynchronize", self.stream)


class Cache:
    """LAYERS layers of blocks, and a stream on which work is queued that writes them."""

    stream = 0
    on_device = True

    def __init__(self, blocks: int, size: int) -> None:
        self.blocks, self.size = blocks, size

    def regions(self) -> list[kvconn.Region]:
        raise NotImplementedError

    def fill(self, byte: int) -> None:
        """Writes all of it, at once."""
        raise NotImplementedError

    def busy(self, times: int = 1) -> None:
        """Queues work that takes some milliseconds, so many times."""

    def settle(self) -> None:
        """Waits until all that was queued is done."""

    def write(self, layer: int, block: int, data: bytes) -> None:
        """Queues a block's bytes."""
        raise NotImplementedError

    def read(self, layer: int, block: int) -> bytes:
        raise NotImplementedError


class Host(Cache):
    on_device = False

    def __init__(self, blocks: int, size: int) -> None:
        super().__init__(blocks, size)
        self.memory = mmap.mmap(-1, LAYERS * blocks * size)
        self.address = c.addressof(c.c_char.from_buffer(self.memory))

    def at(self, layer: int, block: int) -> int:
        return (layer * self.blocks + block) * self.size

    def regions(self) -> list[kvconn.Region]:
        return [kvconn.Region(f"layer.{i}", self.address + self.at(i, 0), self.size, self.size, self.blocks) for i in range(LAYERS)]

    def fill(self, byte: int) -> None:
        c.memset(self.address, byte, len(self.memory))

    def write(self, layer: int, block: int, data: bytes) -> None:
        self.memory[self.at(layer, block) : self.at(layer, block) + self.size] = data

    def read(self, layer: int, block: int) -> bytes:
        return self.memory[self.at(layer, block) : self.at(layer, block) + self.size]


class Device(Cache):
    """Memory of the driver's: of cuMemAlloc, or of a pool."""

    def __init__(self, driver: Driver, kind: str, blocks: int, size: int) -> None:
        super().__init__(blocks, size)
        self.driver, self.kind = driver, kind
        self.bytes = LAYERS * blocks * size
        stream, scratch = c.c_void_p(), c.c_uint64()
        driver.call("cuStreamCreate", c.byref(stream), 1)
        self.stream = stream.value or 0
        self.scratch_bytes = 1 << 20 if driver.double else BIG
        driver.call("cuMemAlloc_v2", c.byref(scratch), c.c_size_t(self.scratch_bytes))
        self.scratch = scratch.value
        self.address = self._pool() if kind == "pool" else self._alloc()
        self.pinned: list[c.c_void_p] = []

    def _alloc(self) -> int:
        p = c.c_uint64()
        self.driver.call("cuMemAlloc_v2", c.byref(p), c.c_size_t(self.bytes))
        return p.value

    def _pool(self) -> int:
        p = c.c_uint64()
        self.driver.call("cuMemAllocAsync", c.byref(p), c.c_size_t(self.bytes), c.c_void_p(self.stream))
        self.settle()
        return p.value

    def settle(self) -> None:
        self.driver.call("cuStreamSynchronize", c.c_void_p(self.stream))

    def free(self) -> None:
        self.driver.call("cuMemFree_v2", c.c_uint64(self.address))

    def at(self, layer: int, block: int) -> int:
        return self.address + (layer * self.blocks + block) * self.size

    def regions(self) -> list[kvconn.Region]:
        device = kvconn.Memory.DEVICE
        return [kvconn.Region(f"layer.{i}", self.at(i, 0), self.size, self.size, self.blocks, memory=device) for i in range(LAYERS)]

    def fill(self, byte: int) -> None:
        for i in range(LAYERS):  # no copy leaves a mapping, which the middle of the memory may be
            self.driver.call(
                "cuMemsetD8Async", c.c_uint64(self.at(i, 0)), c.c_ubyte(byte), c.c_size_t(self.blocks * self.size), c.c_void_p(self.stream)
            )
        self.settle()

    def busy(self, times: int = 1) -> None:
        for _ in range(times * (4 if self.driver.double else 100)):
            size, stream = c.c_size_t(self.scratch_bytes), c.c_void_p(self.stream)
            self.driver.call("cuMemsetD8Async", c.c_uint64(self.scratch), c.c_ubyte(0), size, stream)

    def write(self, layer: int, block: int, data: bytes) -> None:
        pinned = c.c_void_p()
        self.driver.call("cuMemHostAlloc", c.byref(pinned), c.c_size_t(self.size), 0)
        self.pinned.append(pinned)  # until the process ends: the stream reads it later
        c.memmove(pinned, data, self.size)
        self.driver.call("cuMemcpyHtoDAsync_v2", c.c_uint64(self.at(layer, block)), pinned, c.c_size_t(self.size), c.c_void_p(self.stream))

    def read(self, layer: int, block: int) -> bytes:
        data = c.create_string_buffer(self.size)
        self.driver.call("cuMemcpyDtoH_v2", data, c.c_uint64(self.at(layer, block)), c.c_size_t(self.size))
        return data.raw


class MappedProperties(c.Structure):  # CUmemAllocationProp: pinned memory of a device
    _fields_ = [
        ("type", c.c_int),
        ("handles", c.c_int),
        ("place", c.c_int),
        ("id", c.c_int),
        ("more", c.c_uint64),
        ("flags", c.c_ubyte * 8),
    ]


class Access(c.Structure):  # CUmemAccessDesc
    _fields_ = [("place", c.c_int), ("id", c.c_int), ("flags", c.c_int)]


class Mapped(Device):
    """Memory that was mapped by two handles. Those to be exported become files' descriptors."""

    def _alloc(self) -> int:
        self.place = MappedProperties(1, 1 if "exported" in self.kind else 0, 1, self.driver.device)
        self.place.flags[1] = 1  # reached by cards, too
        step = c.c_size_t()
        self.driver.call("cuMemGetAllocationGranularity", c.byref(step), c.byref(self.place), 0)
        self.half = (self.bytes // 2 + step.value - 1) // step.value * step.value
        base = c.c_uint64()
        self.driver.call("cuMemAddressReserve", c.byref(base), c.c_size_t(2 * self.half), c.c_size_t(0), c.c_uint64(0), c.c_uint64(0))
        self.address = base.value
        self.wake()
        return self.address

    def wake(self) -> None:
        """Maps new memory."""
        base = self.address
        for k in range(2):
            handle = c.c_uint64()
            self.driver.call("cuMemCreate", c.byref(handle), c.c_size_t(self.half), c.byref(self.place), c.c_uint64(0))
            self.driver.call("cuMemMap", c.c_uint64(base + k * self.half), c.c_size_t(self.half), c.c_size_t(0), handle, c.c_uint64(0))
            self.driver.call("cuMemRelease", handle)  # the mapping keeps it
        access = Access(1, self.driver.device, 3)
        self.driver.call("cuMemSetAccess", c.c_uint64(base), c.c_size_t(2 * self.half), c.byref(access), c.c_size_t(1))

    def sleep(self) -> None:
        """Gives the memory back, and keeps its addresses."""
        self.settle()
        self.driver.call("cuMemUnmap", c.c_uint64(self.address), c.c_size_t(2 * self.half))


class Torch(Cache):
    """CUDA tensors of PyTorch."""

    def __init__(self, device: int, blocks: int, size: int) -> None:
        import torch

        super().__init__(blocks, size)
        self.torch = torch
        torch.cuda.set_device(device)
        self.tensor = torch.empty((LAYERS, blocks, size), dtype=torch.uint8, device="cuda")
        self.work = torch.ones((4096, 4096), device="cuda")
        self.own = torch.cuda.Stream()
        self.stream = self.own.cuda_stream
        self.kept: list[Any] = []
        torch.cuda.synchronize()

    def regions(self) -> list[kvconn.Region]:
        return [r for i in range(LAYERS) for r in kvconn.regions_from_tensor(f"layer.{i}", self.tensor[i], block_dim=0)]

    def fill(self, byte: int) -> None:
        self.tensor.fill_(byte)
        self.torch.cuda.synchronize()

    def busy(self, times: int = 1) -> None:
        with self.torch.cuda.stream(self.own):
            for _ in range(20 * times):
                self.work = (self.work @ self.work) * 0 + 1

    def settle(self) -> None:
        self.own.synchronize()

    def write(self, layer: int, block: int, data: bytes) -> None:
        host = self.torch.frombuffer(bytearray(data), dtype=self.torch.uint8).pin_memory()
        self.kept.append(host)
        with self.torch.cuda.stream(self.own):
            self.tensor[layer, block].copy_(host, non_blocking=True)

    def read(self, layer: int, block: int) -> bytes:
        return bytes(self.tensor[layer, block].cpu().tolist())


def cache_of(kind: str, device: int, blocks: int, size: int) -> Cache:
    if kind == "host":
        return Host(blocks, size)
    if kind == "torch":
        return Torch(device, blocks, size)
    return (Mapped if kind.startswith("mapped") else Device)(Driver(device), kind, blocks, size)
