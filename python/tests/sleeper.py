"""Device memory that was mapped by handles, as that of an engine that can sleep: vLLM's cumem allocator, SGLang's memory saver."""

from __future__ import annotations

import ctypes as c
from typing import Any

GRAIN = 2 << 20


class _Properties(c.Structure):
    """CUmemAllocationProp: pinned, a file descriptor, on device 0, for RDMA."""

    _fields_ = [
        ("kind", c.c_int),
        ("handles", c.c_int),
        ("where", c.c_int),
        ("device", c.c_int),
        ("win32", c.c_void_p),
        ("flags", c.c_ubyte * 8),
    ]


class _Access(c.Structure):
    """CUmemAccessDesc: device 0 reads and writes."""

    _fields_ = [("where", c.c_int), ("device", c.c_int), ("flags", c.c_int)]


class Sleeper:
    """Addresses at which memory lies while the engine is awake. gpu.call(name, ...) calls the driver."""

    def __init__(self, gpu: Any, size: int) -> None:
        self._call, self._size, address = gpu.call, -(-size // GRAIN) * GRAIN, c.c_uint64()
        self._call("cuMemAddressReserve", c.byref(address), c.c_size_t(self._size), c.c_size_t(0), c.c_uint64(0), c.c_uint64(0))
        self.address = address.value
        self.wake()

    def wake(self) -> None:
        self._handle = c.c_uint64()
        at, size = c.c_uint64(self.address), c.c_size_t(self._size)
        properties = _Properties(kind=1, handles=1, where=1, device=0)
        properties.flags[1] = 1  # gpuDirectRDMACapable
        self._call("cuMemCreate", c.byref(self._handle), size, c.byref(properties), c.c_uint64(0))
        self._call("cuMemMap", at, size, c.c_size_t(0), self._handle, c.c_uint64(0))
        self._call("cuMemSetAccess", at, size, c.byref(_Access(1, 0, 3)), c.c_size_t(1))

    def sleep(self) -> None:
        self._call("cuMemUnmap", c.c_uint64(self.address), c.c_size_t(self._size))
        self._call("cuMemRelease", self._handle)
