"""Which layer of the model each of SGLang's buffers belongs to, and which part of the layer's cache it holds.

SGLang hands its backends bare addresses. If a stage of a pipeline has only some of the layers, the order of the addresses does
not tell which layers. The pool knows the layers: by the pool's lists the attention of a layer finds its cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvconn import Memory

from ..regions import memory_of
from . import kinds


class Owner(NamedTuple):
    """The layer and the part of its cache that a buffer belongs to."""

    layer: int
    part: str
    shape: str  # what an item holds, where the part does not say it
    pool: Any  # the pool that holds the buffer
    memory: Memory = Memory.HOST


def owners(pool: Any) -> dict[int, Owner]:
    """All buffers of a pool, by their addresses."""
    kinds.pool(pool)
    out: dict[int, Owner] = {}
    for child, layers in _children(pool):
        for address, owner in _of(child, layers):
            if other := out.get(address):
                both = f"{other.part} of layer {other.layer} and {owner.part} of layer {owner.layer}"
                raise ValueError(f"kvconn: SGLang's {type(pool).__name__} has one address for {both}")
            out[address] = owner
    return out


def _children(pool: Any) -> list[tuple[Any, Sequence[int]]]:
    """The pools that hold buffers, each with the layers of its buffers."""
    name = type(pool).__name__
    if name == "SWAKVPool":
        mapping = pool.layers_mapping.items()  # layer: place, whether it has a window
        full, windows = ([layer for layer, (_, windowed) in mapping if windowed == which] for which in (False, True))
        return [(pool.full_kv_pool, full), (pool.swa_kv_pool, windows)]
    if name == "HybridLinearKVPool":
        return [(pool.full_kv_pool, list(pool.full_attention_layer_id_mapping)), (pool.mamba_pool, pool.mamba_pool.mamba_layer_ids)]
    if name == "MambaPool":
        return [(pool, pool.mamba_layer_ids)]
    return [(pool, range(pool.start_layer, pool.start_layer + pool.layer_num))]


def _of(pool: Any, layers: Sequence[int]) -> Iterator[tuple[int, Owner]]:
    kind = kinds.pool(pool)
    lists = [(part, "", getattr(pool, attribute)) for attribute, part in kind.buffers]
    if kind.slots:
        states = pool.mamba_cache
        lists += [(f"conv{number}", _shape(tensor), tensor) for number, tensor in enumerate(states.conv) if tensor.numel()]
        lists += [("temporal", _shape(states.temporal), states.temporal)] if states.temporal.numel() else []
    for part, shape, buffers in lists:
        if buffers is None:  # this pool has the part switched off
            continue
        if len(buffers) != len(layers):
            raise ValueError(f"kvconn: a {type(pool).__name__} has {len(buffers)} buffers of {part} for {len(layers)} layers")
        for layer, buffer in zip(layers, buffers):
            if buffer.nbytes:
                yield buffer.data_ptr(), Owner(layer, part, shape, pool, memory_of(buffer))


def _shape(tensor: Any) -> str:
    """What a slot of a state holds, and in which order."""
    slot = tensor[0, 0]
    if tensor.stride(1) != slot.numel():
        raise ValueError(
            f"kvconn: the slots of a state of the shape {tuple(tensor.shape)} do not lie one after the other: strides {tensor.stride()}"
        )
    return f"{'x'.join(map(str, slot.shape))} by {'x'.join(map(str, slot.stride()))} {str(slot.dtype).removeprefix('torch.')}"


def described(pool: Any) -> str:
    """The classes of a pool, in which order they hold items, and of which type of numbers. Two engines must have the same."""
    inner = [described(child) for child, _ in _children(pool) if child is not pool]
    if inner:
        return f"{type(pool).__name__} ({', '.join(inner)})"
    said = [getattr(pool, "kv_cache_layout", None), str(getattr(pool, "dtype", "")).removeprefix("torch.")]
    return " ".join([type(pool).__name__, *filter(None, said)])


def shapes(pool: Any) -> dict[str, str]:
    """What an item of each part of a pool holds, where the part does not say it."""
    return {owner.part: owner.shape for owner in owners(pool).values() if owner.shape}
