"""From an engine's tensors to regions."""

from __future__ import annotations

from itertools import product
from typing import Any

from .errors import InvalidError
from .types import Region


def _describe(tensor: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    """Address, shape, strides in bytes and item size of anything array-like."""
    if hasattr(tensor, "data_ptr"):  # torch
        device = getattr(getattr(tensor, "device", None), "type", "cpu")
        if device != "cpu":
            raise InvalidError(f"the tensor is on device {device!r}; this version moves host memory")
        item = tensor.element_size()
        return tensor.data_ptr(), tuple(tensor.shape), tuple(s * item for s in tensor.stride()), item
    interface = getattr(tensor, "__array_interface__", None)
    if interface is not None:  # numpy
        return interface["data"][0], tuple(tensor.shape), tuple(tensor.strides), tensor.itemsize
    try:
        view = memoryview(tensor)
    except TypeError:
        raise InvalidError(f"{type(tensor).__name__} is neither a tensor, an array nor a buffer") from None
    if view.readonly:
        raise InvalidError("the buffer is read-only: a transfer could not be received into it")
    import ctypes

    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return address, tuple(view.shape or ()), tuple(view.strides or ()), view.itemsize


def regions_from_tensor(name: str, tensor: Any, block_dim: int, group: int = 0) -> list[Region]:
    """The regions of one tensor whose dimension ``block_dim`` counts blocks.

    ``tensor`` is a torch tensor, a numpy array, or anything with a writable
    buffer; strided views are fine, nothing is copied. The bytes of a block that
    are contiguous become one region, named ``name``; if a block has several
    contiguous pieces, each becomes a region named ``name[i,j,…]`` after its
    outer indices.
    """
    address, shape, strides, item = _describe(tensor)
    dims = len(shape)
    if not -dims <= block_dim < dims:
        raise InvalidError(f"block_dim is {block_dim}, the tensor has the shape {shape}")
    block_dim %= dims
    if 0 in shape:
        raise InvalidError(f"tensor {name!r} of shape {shape} is empty")
    if any(s < 0 for s in strides):
        raise InvalidError(f"tensor {name!r} has negative strides {strides}")
    # The dimensions of one block, innermost in memory first; those that follow
    # each other without a gap make one contiguous piece.
    inner = sorted((i for i in range(dims) if i != block_dim and shape[i] > 1), key=lambda i: strides[i])
    length, outer = item, []
    for i in inner:
        if not outer and strides[i] == length:
            length *= shape[i]
        else:
            outer.append(i)
    outer.sort()
    stride = strides[block_dim] if shape[block_dim] > 1 else max(length, strides[block_dim])
    out = []
    for index in product(*(range(shape[i]) for i in outer)):
        offset = sum(k * strides[i] for k, i in zip(index, outer))
        suffix = f"[{','.join(map(str, index))}]" if index else ""
        out.append(Region(name + suffix, address + offset, stride, length, shape[block_dim], group))
    return out
