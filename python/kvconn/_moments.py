"""What an engine with caches in device memory calls for each layer of each step.

To turn a Python number into one of C's costs ctypes a tenth of a microsecond, for each argument of each call. So numbers that
come again, of streams and regions, are kept as C's.
"""

from __future__ import annotations

import ctypes as c
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Optional

from . import _pack
from .errors import InvalidError, error_for
from .types import Memory, Region

_MOST = 4096  # numbers that are kept


class _BoundedCache(dict[Any, Any]):
    """Keeps what was made of each key. If there are too many, it forgets all."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def __missing__(self, key: Any) -> Any:
        value = self._make(key)
        if len(self) >= _MOST:
            self.clear()
        self[key] = value
        return value


class _MomentBuffer(threading.local):
    """Where the library puts a moment."""

    def __init__(self) -> None:
        self.moment = c.c_uint64()
        self.address = c.byref(self.moment)


def number(n: int, what: str, bits: int) -> int:
    n = n.__index__()
    if not 0 <= n < 1 << bits:
        raise InvalidError(f"{what} is {n}, want 0 to {(1 << bits) - 1}")
    return n


def _stream(stream: int) -> c.c_void_p:
    return c.c_void_p(number(stream, "stream", 64))


def _regions(regions: Sequence[int]) -> tuple[c.c_void_p, c.c_size_t, object]:
    """The array's address and length, and the array, which must live as long."""
    of = _pack.uint32s("regions", regions)
    return c.c_void_p(of.buffer_info()[0]), c.c_size_t(len(of)), of


def current_stream(device: int) -> Callable[[], int]:
    """What gives the handle of torch's stream that is current in this thread, on a GPU by torch's index: 0 is the default stream."""
    import torch

    # torch.cuda.current_stream makes an object for each call, which costs a layer more than the moment does.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is not None:
        return partial(raw, device)
    return lambda: int(torch.cuda.current_stream(device).cuda_stream)


_buffer = _MomentBuffer()
_streams = _BoundedCache(_stream)
_named = _BoundedCache(_regions)
_CLOSED = c.c_uint64()


class DeviceCalls:
    """The part of :class:`~kvconn.Agent` that is about moments."""

    _agent = _CLOSED  # the handle

    def _begin_moments(self, lib: Any, agent: c.c_uint64) -> None:
        self._lib, self._agent = lib, agent
        self._current: dict[int, Optional[Callable[[], int]]] = {}
        self._moment, self._written_after, self._written_on = lib.unconverted

    def _place(self, regions: Iterable[Region]) -> None:
        """Keeps what gives the current stream of each region in device memory; None where torch does not know it."""
        streams: dict[int, Callable[[], int]] = {}
        for i, r in enumerate(regions):
            if r.memory == Memory.DEVICE:
                if r.device >= 0 and r.device not in streams:
                    streams[r.device] = current_stream(r.device)
                self._current[i] = streams.get(r.device)

    def _stream_of(self, region: int) -> int:
        """Torch's current stream on a region's GPU. The library refuses a region that is not in device memory."""
        current = self._current.get(region, int)
        if current is None:
            raise InvalidError(
                f"stream is missing: region {region} was not made of a torch tensor, so which stream is current is not known. "
                "Name the stream on which its work is queued, or 0 for the default stream"
            )
        return current()

    def _refused(self, code: int) -> Exception:
        return error_for(code, self._lib.error_text())

    def moment(self, region: int = 0, stream: Optional[int] = None) -> int:
        """Marks the work that a CUDA stream has been given up to now. Offers and loads wait for that work by ``after``.

        ``region`` is the index, in :meth:`register_kv_caches`, of a region on the stream's
        GPU. ``stream`` is the stream's handle, a ``CUstream`` or ``cudaStream_t``; 0 is the
        default stream. None is torch's current stream on that GPU in this thread; if the region
        was not made of a torch tensor, a call with None raises. The call takes a microsecond or
        two, waits for nothing and may come from any thread. While the stream is captured into a
        graph the call raises.
        """
        if type(region) is not int or not 0 <= region <= 0xFFFFFFFF:
            region = number(region, "region", 32)
        if stream is None:
            stream = self._stream_of(region)
        buffer = _buffer
        if code := self._moment(self._agent, region, _streams[stream], buffer.address):
            raise self._refused(code)
        return buffer.moment.value

    def written_after(self, regions: Sequence[int], moment: int) -> None:
        """Prefill: says of regions in device memory what a byte of :attr:`written` says.

        The step has queued all work that writes the regions. The blocks that the step
        computes are ready in these regions when ``moment`` has passed.
        """
        if type(moment) is not int or not 0 <= moment <= 0xFFFFFFFFFFFFFFFF:
            moment = number(moment, "moment", 64)
        kept = type(regions) is range or type(regions) is tuple
        address, count, _keep = _named[regions] if kept else _regions(regions)
        if code := self._written_after(self._agent, address, count, c.c_uint64(moment)):
            raise self._refused(code)

    def written_on(self, regions: Sequence[int], stream: Optional[int] = None) -> None:
        """Prefill: :meth:`written_after` with a moment of ``stream``, in one call that is cheap enough for each layer.

        ``stream`` is a stream of the first region's GPU. The engine has queued there all work that writes the
        regions. None is as in :meth:`moment`. A ``tuple`` or a ``range`` of regions costs less than a list.
        """
        kept = type(regions) is range or type(regions) is tuple
        address, count, _keep = _named[regions] if kept else _regions(regions)
        if stream is None:
            stream = self._stream_of(regions[0]) if len(regions) else 0
        if code := self._written_on(self._agent, address, count, _streams[stream]):
            raise self._refused(code)
