"""Memory for KV caches that decode engines of the same host map: the fastest way between two processes.

::

    from kvconn import memory

    cache = memory.empty((layers, 2, blocks, 16, heads, 128), torch.bfloat16)  # a torch tensor
    agent.register_kv_caches(kvconn.regions_from_tensor("kv", cache, block_dim=2))
"""

from __future__ import annotations

import ctypes as c
import math
import operator
import weakref
from typing import TYPE_CHECKING, Optional, Sequence

from . import _lib
from .errors import InvalidError, error_for

if TYPE_CHECKING:
    import torch

__all__ = ["alloc", "empty"]


def alloc(nbytes: int) -> c.Array[c.c_char]:
    """Allocates zeroed memory of ``nbytes`` bytes, as a writable buffer.

    ``numpy.frombuffer(buffer, dtype)`` and ``torch.frombuffer(buffer, dtype=...)`` are views of it, and
    :func:`empty` gives a tensor over such memory. The memory begins at a multiple of a page, and of 2 MiB if it
    has 2 MiB or more. All its pages are there, so the call takes a while for many GiB. The call raises if the
    host or the process's cgroup has not got so much.

    kvconn frees the memory when no view of it, no tensor over a view, and no open agent that has registered it uses it
    any more. A process may have 1024 such allocations at a time. The call loads the native library: call it after the
    fork, in the process that uses the memory. A child made by fork that touches the memory gets SIGSEGV.
    """
    nbytes = operator.index(nbytes)
    if not 0 < nbytes < 1 << 63:
        raise InvalidError(f"{nbytes} bytes of memory, want at least one, and fewer than 2**63")
    lib = _lib.load()
    address = c.c_void_p()
    code = lib.alloc(nbytes, c.byref(address))  # type: ignore[operator]
    if code:
        raise error_for(code, lib.error_text())
    at = address.value
    assert at is not None
    buffer = (c.c_char * nbytes).from_address(at)
    # A view keeps the array. At the end of the process some may still be in use, and the kernel frees all.
    weakref.finalize(buffer, lib.free, at).atexit = False
    return buffer


def empty(shape: int | Sequence[int], dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    """A CPU tensor over memory of :func:`alloc`, made like ``torch.empty``; in fact it is zeroed. The call needs torch."""
    import torch

    dims = torch.Size([shape] if isinstance(shape, int) else shape)
    dtype = dtype or torch.get_default_dtype()
    if any(n < 0 for n in dims):
        raise InvalidError(f"a tensor of the shape {tuple(dims)}")
    buffer = alloc(math.prod(dims) * dtype.itemsize)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(dims)
