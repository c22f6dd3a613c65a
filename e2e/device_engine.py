"""Within an engine's process: its cache as device memory, and a stream on which its writes are late. See device_memory.py.

A CPU engine computes at once, a GPU later. Gpu.later plays the GPU: it takes out what the engine has just written, leaves
garbage in its place, and queues the write on a stream of the double. Before the engine computes again, Gpu.settle waits for
the stream: a GPU would do the next step's work behind it, on the same stream.
"""

from __future__ import annotations

import ctypes as c
import json
import os
from pathlib import Path
from typing import Any

import torch
from device_memory import FAULTS

GARBAGE = 0x7F
# An operation of the stream is late by up to this. LATER_US: a step's last ones end tens of milliseconds after the step.
LATE_US, LATER_US = 4_000, 40_000
_STAGE = 256 << 20  # of pinned memory, for writes that are not done


class DeviceTensor(torch.Tensor):
    """What a tensor on a GPU tells of itself: its device, its address, its shape and strides. It has no bytes."""

    _address: int  # the device address of the first element of its storage

    @classmethod
    def at(cls, address: int, like: torch.Tensor) -> DeviceTensor:
        meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        made = torch.Tensor._make_subclass(cls, meta)
        made._address = address
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        for view in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(view, cls):  # nothing but views is asked for
                view._address = next(each._address for each in args if isinstance(each, cls))
        return out

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    @property
    def is_cuda(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return self._address + self.storage_offset() * self.element_size()


class Gpu:
    """The engine's GPU: its context, the stream on which it works, and one that it never uses."""

    def __init__(self) -> None:
        self._driver, self._preload = c.CDLL(os.environ["KVCONN_LIBCUDA"]), c.CDLL(None)
        self._preload.kvgpu_engine_expose.restype = c.c_uint64
        self._preload.kvgpu_engine_expose.argtypes = [c.c_void_p, c.c_int]
        context, stage = c.c_void_p(), c.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", c.byref(context), 0)
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemHostAlloc", c.byref(stage), c.c_size_t(_STAGE), 0)
        assert stage.value
        self._stage, self._staged, self._context = stage.value, 0, context
        self.stream, self.idle = self._new_stream(), self._new_stream()
        self.slow(LATE_US)

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._driver, name)(*args)
        assert code == 0, f"{name}: {code}"

    def slow(self, late_us: int) -> None:
        """Makes each further operation of the stream late by up to late_us microseconds."""
        self._call("kvgpu_slow", c.c_void_p(self.stream), c.c_uint(late_us))

    def _new_stream(self) -> int:
        stream = c.c_void_p()
        self._call("cuStreamCreate", c.byref(stream), 1)
        assert stream.value
        return stream.value

    def enter(self) -> None:
        """Makes the context current in this thread, as torch does."""
        self._call("cuCtxSetCurrent", self._context)

    def address(self, part: torch.Tensor) -> int:
        """Where the tensor lies on the device."""
        found = int(self._preload.kvgpu_engine_expose(c.c_void_p(part.data_ptr()), 0))
        assert found, f"the tensor at {part.data_ptr():#x} is in no large allocation"
        return found

    def tensor(self, cache: torch.Tensor) -> DeviceTensor:
        """The cache at its device address."""
        return DeviceTensor.at(self.address(cache), cache)

    def later(self, part: torch.Tensor) -> None:
        """Has the stream write what the engine has just written; until then garbage is there."""
        assert part.is_contiguous()
        size, host = part.numel() * part.element_size(), part.data_ptr()
        if self._staged + size > _STAGE:
            self.settle()
        at = self._stage + self._staged
        self._staged += size
        c.memmove(at, host, size)
        c.memset(host, GARBAGE, size)
        self._call("cuMemcpyHtoDAsync_v2", c.c_uint64(self.address(part)), c.c_void_p(at), c.c_size_t(size), c.c_void_p(self.stream))

    def scrub(self, part: torch.Tensor) -> None:
        """Has the stream overwrite the part, as work does that is queued for whoever had it before."""
        assert part.is_contiguous()
        size = c.c_size_t(part.numel() * part.element_size())
        self._call("cuMemsetD8Async", c.c_uint64(self.address(part)), c.c_ubyte(GARBAGE), size, c.c_void_p(self.stream))

    def settle(self) -> None:
        """Waits until all that is queued is done."""
        self._call("cuStreamSynchronize", c.c_void_p(self.stream))
        self._staged = 0


def faults() -> frozenset[str]:
    """What the test wants to go wrong now."""
    path = os.environ.get(FAULTS)
    return frozenset(json.loads(Path(path).read_text()) if path else ())
