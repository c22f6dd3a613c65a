"""From an engine's tensors to regions."""

from __future__ import annotations

from itertools import product
from typing import Any, Optional, Sequence

from .errors import InvalidError
from .types import Memory, Region


def memory_of(tensor: Any) -> Memory:
    """Where anything array-like lies."""
    device = getattr(getattr(tensor, "device", None), "type", "cpu") if hasattr(tensor, "data_ptr") else "cpu"
    if device not in ("cpu", "cuda"):
        raise InvalidError(f"the tensor is on device {device!r}; kvconn moves host memory and CUDA device memory")
    on_device = device == "cuda" or (not hasattr(tensor, "data_ptr") and hasattr(tensor, "__cuda_array_interface__"))
    return Memory.DEVICE if on_device else Memory.HOST


def _describe(tensor: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int, bool]:
    """Address, shape, strides in bytes, item size and whether it is read-only, of anything array-like."""
    if hasattr(tensor, "data_ptr"):  # torch
        item = tensor.element_size()
        return tensor.data_ptr(), tuple(tensor.shape), tuple(s * item for s in tensor.stride()), item, False
    cuda = getattr(tensor, "__cuda_array_interface__", None)
    if cuda is not None:
        address, read_only = cuda["data"]
        item, shape = int(cuda["typestr"][2:]), tuple(cuda["shape"])
        return address, shape, tuple(cuda.get("strides") or _dense(shape, item)), item, bool(read_only)
    interface = getattr(tensor, "__array_interface__", None)
    if interface is not None:  # numpy
        address, read_only = interface["data"]
        return address, tuple(tensor.shape), tuple(tensor.strides), tensor.itemsize, bool(read_only)
    try:
        view = memoryview(tensor)
    except TypeError:
        raise InvalidError(f"{type(tensor).__name__} is neither a tensor, an array nor a buffer") from None
    if view.readonly:
        raise InvalidError("the buffer is read-only: a transfer could not be received into it")
    import ctypes

    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return address, tuple(view.shape or ()), tuple(view.strides or ()), view.itemsize, False


def _dense(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    """The strides, in bytes, of an array without gaps."""
    strides = []
    for n in reversed(shape):
        strides.append(item)
        item *= n
    return tuple(reversed(strides))


def _merge(dims: list[int], shape: tuple[int, ...], strides: tuple[int, ...], length: int) -> tuple[int, list[int]]:
    """How many bytes lie together when dims are joined to length bytes, and which dims do not join.

    Dimensions are taken from the innermost in memory outwards. Those that follow
    each other without a gap make one contiguous piece.
    """
    outer = []
    for i in sorted((i for i in dims if shape[i] > 1), key=lambda i: strides[i]):
        if not outer and strides[i] == length:
            length *= shape[i]
        else:
            outer.append(i)
    return length, sorted(outer)


def _joined(dims: list[int], shape: tuple[int, ...], strides: tuple[int, ...], alone: int) -> tuple[int, int]:
    """How many items there are along dims, outermost first, and the stride between them; 0 if no stride fits.

    A single item has the stride alone.
    """
    count, stride = 1, alone
    for i in reversed(dims):
        if shape[i] == 1:
            continue
        if count > 1 and strides[i] != count * stride:
            return count, 0
        if count == 1:
            stride = strides[i]
        count *= shape[i]
    return count, stride


# A caller names what a tensor has, in a call of its own for each: a record would be made for one call and only hold keywords.
def regions_from_tensor(  # noqa: PLR0913
    name: str,
    tensor: Any,
    block_dim: int,
    group: int = 0,
    *,
    token_dim: int | Sequence[int] | None = None,
    head_dim: Optional[int] = None,
    first_head: int = 0,
    total_heads: int = 0,
    index_kind: int = 0,
) -> list[Region]:
    """The regions of one tensor whose dimension ``block_dim`` counts blocks.

    ``tensor`` is a torch tensor, of the CPU or of a CUDA device, a numpy array,
    anything with ``__cuda_array_interface__``, or anything with a writable buffer;
    strided views are fine, and the call copies nothing. If the bytes of a block
    are contiguous, they become one region, named ``name``. If a block has several
    contiguous pieces, each becomes a region named ``name[i,j,…]`` after its outer
    indices.

    With ``token_dim`` and ``head_dim`` the regions say where each token and head lies.
    Then the other engine may have blocks of another size, other heads of the model, or
    another order. ``token_dim`` is the dimension that counts the tokens of a block, or
    several, outermost first, if a block is made of smaller blocks. ``head_dim`` counts
    the heads; None: there is one, as in a latent. The tensor has the heads from
    ``first_head`` on, of ``total_heads`` (0: it has all of them). If the heads do not
    lie together, each becomes a region of its own, all with one name. If a block's
    tokens are apart, or an item is no multiple of 4 bytes, the regions stay opaque. An
    agent that loads refuses the regions of a read-only array. ``index_kind`` says what
    the ids of the group stand for, see :class:`~kvconn.IndexKind`.
    """
    address, shape, strides, item, read_only = _describe(tensor)
    dims = len(shape)

    def dim(i: int, what: str) -> int:
        if not -dims <= i < dims:
            raise InvalidError(f"{what} is {i}, but the tensor has the shape {shape}")
        return i % dims

    block_dim = dim(block_dim, "block_dim")
    token_dims = [dim(i, "token_dim") for i in ([] if token_dim is None else [token_dim] if isinstance(token_dim, int) else token_dim)]
    head_dims = [] if head_dim is None else [dim(head_dim, "head_dim")]
    if head_dims and not token_dims:
        raise InvalidError(f"head_dim is {head_dim}, but token_dim is missing: give both, or neither")
    named = [block_dim, *token_dims, *head_dims]
    if len(set(named)) != len(named):
        raise InvalidError(f"block_dim {block_dim}, token_dim {token_dim} and head_dim {head_dim} name one dimension twice")
    if 0 in shape:
        raise InvalidError(f"tensor {name!r} of shape {shape} is empty")
    if any(s < 0 for s in strides):
        raise InvalidError(f"tensor {name!r} has negative strides {strides}")

    blocks = shape[block_dim]
    about: dict[str, Any] = {"index_kind": index_kind, "read_only": read_only, "memory": memory_of(tensor)}
    index = getattr(getattr(tensor, "device", None), "index", None)
    if about["memory"] is Memory.DEVICE and index is not None:
        about["device"] = index

    def pieces(outer: list[int], length: int, begin: int = 0, **geometry: int) -> list[Region]:
        stride = strides[block_dim] if blocks > 1 else max(length, strides[block_dim])
        out = []
        for index in product(*(range(shape[i]) for i in outer)):
            offset = begin + sum(k * strides[i] for k, i in zip(index, outer))
            suffix = f"[{','.join(map(str, index))}]" if index else ""
            out.append(Region(name + suffix, address + offset, stride, length, blocks, group, **about, **geometry))
        return out

    if token_dims:
        length, outer = _merge([i for i in range(dims) if i not in named], shape, strides, item)
        tokens, token_stride = _joined(token_dims, shape, strides, length)
        heads, head_stride = _joined(head_dims, shape, strides, length)
        total = total_heads or (heads if first_head == 0 else 0)
        known = {"tokens": tokens, "heads": heads, "first_head": first_head, "total_heads": total}
        if length % 4:
            pass
        elif head_stride == length and (tokens == 1 or token_stride == heads * length):
            return pieces(outer, tokens * heads * length, token_stride=heads * length, head_stride=length, **known)
        elif token_stride == length and head_stride == tokens * length:
            return pieces(outer, tokens * heads * length, token_stride=length, head_stride=tokens * length, **known)
        elif token_stride == length:
            out = []
            for h in range(heads):
                known.update(heads=1, first_head=first_head + h)
                out += pieces(outer, tokens * length, h * head_stride, token_stride=length, head_stride=length, **known)
            return out
    length, outer = _merge([i for i in range(dims) if i != block_dim], shape, strides, item)
    return pieces(outer, length)
