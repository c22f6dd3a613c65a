"""vLLM's KV cache tensors as regions of blocks.

vLLM gives every layer a view in logical order. Its strides say how the layer lies in memory (layers side by side, heads
before tokens, one storage for all layers, …). This module finds out which dimensions count blocks, tokens and heads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import states
from .groups import host_layers, is_dealt, is_index, layer_specs
from .served import cache_dtype
from .shards import WHOLE, Shard

logger = logging.getLogger("kvconn.vllm")

# Sizes with which a backend is asked for its cache's shape: the numbers of blocks, of tokens in a block and of heads. No
# other dimension of a cache is equal to one of them, and the number of tokens is one that backends accept.
_MARKS = {"block": 1_234_577, "token": 16_144, "head": 7_919}


@dataclass(frozen=True)
class Dims:
    """Which dimensions of a layer's tensor count the blocks, the tokens of a block, and the heads; None: no dimension does."""

    block: int
    token: int | None = None
    head: int | None = None


def _dims_from_backend(vllm_config: Any, layer_name: str, spec: Any) -> Dims | None:
    """The dimensions by the shape that the layer's attention backend asks for; None if the backend does not tell it."""
    try:
        layer = vllm_config.compilation_config.static_forward_context[layer_name]
        shape = layer.get_attn_backend().get_kv_cache_shape(*_MARKS.values(), spec.head_size)
    except Exception as error:  # another vLLM may lack any of this; find_dims has a second way
        logger.debug("%s: the attention backend does not tell its cache's shape: %r", layer_name, error)
        return None
    found = {what: [dim for dim, size in enumerate(shape) if size == mark] for what, mark in _MARKS.items()}
    if any(len(dims) > 1 for dims in found.values()) or not found["block"]:
        return None
    return Dims(*(dims[0] if dims else None for dims in found.values()))


def find_dims(vllm_config: Any, kv_cache_config: Any, layer_name: str, spec: Any, shape: Sequence[int]) -> Dims:
    num_blocks = kv_cache_config.num_blocks
    if hasattr(kv_cache_config, "kv_cache_layout"):
        # A vLLM whose layouts are named by L, B, H, N, C has a layer's dimensions in this order, however they lie in memory.
        dims: Dims | None = Dims(0, 2, 1) if len(shape) == 4 else Dims(0, 1) if len(shape) == 3 else Dims(0)
    else:
        dims = _dims_from_backend(vllm_config, layer_name, spec)
    if dims is None:
        fitting = [d for d, size in enumerate(shape) if size == num_blocks]
        dims = Dims(fitting[0]) if len(fitting) == 1 else None
    # If a kernel works on smaller blocks, the dimension is a multiple of vLLM's number of blocks.
    if dims is None or dims.block >= len(shape) or not shape[dims.block] or shape[dims.block] % num_blocks:
        raise ValueError(f"layer {layer_name} has a cache of shape {tuple(shape)}: no dimension of it counts {num_blocks} blocks")
    return dims


# The backends in whose blocks each token of each head is an item of its own. Other backends may have an order of their own
# in a block: on CPU the tokens of a head are packed for the matrix unit. Of these only whole blocks of a head can be moved.
_BACKENDS_OF_ITEMS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA", "CUTLASS_MLA", "CPU_MLA")


def _backend(vllm_config: Any, layer_name: str) -> str:
    try:
        return str(vllm_config.compilation_config.static_forward_context[layer_name].get_attn_backend().get_name())
    except Exception as error:
        logger.debug("%s: its attention backend has no name: %r", layer_name, error)
        return ""


# Modes of quantisation that change nothing but the type of the numbers: their scales are the model's, and the same everywhere.
_PLAIN_QUANTISATION = ("", "NONE", "FP8_PER_TENSOR")


# Types of numbers that are not quantised. Two of them are as long as each other.
_PLAIN_TYPES = ("bfloat16", "float16", "float32")


def _quantisation(spec: Any) -> str:
    """How the numbers in the blocks are packed, as vLLM names it."""
    return str(getattr(getattr(spec, "kv_quant_mode", None), "name", ""))


def _other_dtype(vllm_config: Any, spec: Any) -> str:
    """The type of a layer's numbers where it is not that of the engine's caches, as with --kv-cache-dtype-skip-layers.

    If a cache is quantised, vLLM says that the type is bytes: then this is empty, and the engine's type says what the bytes are.
    """
    dtype = str(getattr(spec, "dtype", "")).removeprefix("torch.")
    return dtype if dtype in _PLAIN_TYPES and dtype != cache_dtype(vllm_config) else ""


def _meaning(vllm_config: Any, layer_name: str, spec: Any, backend: str, shard: Shard) -> str:
    """What a block's bytes mean beside their geometry: the attention backend, the order that the backend has chosen for a
    block (on CPU it depends on the processor), the mode of quantisation, a type of numbers that is not the engine's, and the
    rank's share of the tokens.

    It becomes a part of the region's name, so that a region moves only between engines in which its bytes mean the same.
    """
    layers = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", {})
    order = getattr(layers.get(layer_name), "isa", None) if backend not in _BACKENDS_OF_ITEMS else None
    said = [backend, order if isinstance(order, str) else "", _quantisation(spec).replace("NONE", ""), _other_dtype(vllm_config, spec)]
    said.append("shuffled" if getattr(layers.get(layer_name), "uses_shuffled_layout", None) is True else "")
    said.append(shard.name if is_dealt(spec) else "")
    return f"[{','.join(filter(None, said))}]" if any(said) else ""


@dataclass(frozen=True)
class Heads:
    """Which KV heads of the model a rank has: vLLM deals them out evenly; if there are too few, several ranks have the same."""

    total: int
    tp_rank: int = 0
    tp_size: int = 1

    def of(self, spec: Any) -> tuple[int, int]:
        """A layer's first head on this rank, and the number of heads on all ranks."""
        here = getattr(spec, "num_kv_heads", 1)
        shards = getattr(spec, "max_tp_shards", None)
        if shards == 1 or "MLAAttentionSpec" in [kind.__name__ for kind in type(spec).__mro__]:
            return 0, here  # a latent, which every rank has
        total = self.total if max(1, self.total // self.tp_size) == here else here * self.tp_size
        return self.tp_rank * total // self.tp_size, total


def _with_geometry(tensor: Any, dims: Dims, spec: Any, num_blocks: int, heads: Heads, items: bool) -> tuple[Any, dict[str, Any]]:
    """The tensor as regions_from_tensor should see it, with further arguments for it; none if a block is not tokens by heads."""
    parts = tensor.shape[dims.block] // num_blocks
    size, per_state = getattr(spec, "block_size", 0), getattr(spec, "tokens_per_state", 1)
    here = tensor.shape[dims.head] if dims.head is not None else 1
    first, total = heads.of(spec)
    known = dims.token is not None and per_state == 1 and tensor.shape[dims.token] * parts == size
    if known and here != getattr(spec, "num_kv_heads", here):
        known, first, total = total == here, 0, here  # heads are packed: on several ranks, which heads are here is not known
    geometry: dict[str, Any] = {"token_dim": dims.token, "head_dim": dims.head, "first_head": first, "total_heads": total} if known else {}
    if parts > 1:
        tensor = tensor.unflatten(dims.block, (num_blocks, -1))
        if not items:
            geometry = {}
        if geometry:  # a block's tokens are its parts' tokens, one part after the other
            inner = dims.block + 1
            for key, dim in (("token_dim", dims.token), ("head_dim", dims.head)):
                geometry[key] = None if dim is None else dim + (dim >= inner)
            geometry["token_dim"] = (inner, geometry["token_dim"])
    elif geometry and not items:
        # All of a head's tokens become one item: only whole blocks move, and both sides need blocks of equal length.
        place = dims.token
        assert place is not None
        if place + 1 < tensor.ndim and tensor.stride(place) == tensor.shape[place + 1] * tensor.stride(place + 1):
            tensor = tensor.flatten(place, place + 1).unsqueeze(place)
        else:
            geometry = {}
    return tensor, geometry


def _check_size(tensor: Any, dims: Dims, spec: Any, kv_cache_config: Any, layer_name: str) -> None:
    """Refuses a cache that is not what its spec says; a vLLM whose layouts have no names says it in another way."""
    says = getattr(spec, "unpadded_page_size_bytes", None) if hasattr(kv_cache_config, "kv_cache_layout") else None
    there = tensor.numel() * tensor.element_size() // kv_cache_config.num_blocks
    if says is not None and says != there:
        raise ValueError(
            f"layer {layer_name} has a cache of shape {tuple(tensor.shape)}, which is {there} bytes for each of "
            f"{kv_cache_config.num_blocks} blocks, but its {type(spec).__name__} says {says} bytes"
        )


def make_regions(
    kv_caches: Mapping[str, Any],
    vllm_config: Any,
    kv_cache_config: Any,
    regions_from_tensor: Callable[..., list[Any]],
    heads: Heads,
    shard: Shard = WHOLE,
) -> list[Any]:
    """One region or more per layer, in the order of the layers; a tensor shared by layers is taken once."""
    group_of = {name: (place, spec) for name, place, spec in layer_specs(kv_cache_config)}
    regions: list[Any] = []
    seen: set[tuple[Any, ...]] = set()
    on_host, config = host_layers(kv_cache_config), kv_cache_config
    for name, tensor in kv_caches.items():
        if name not in group_of:
            logger.debug("%s: its cache takes no part in transfers", name)
            continue
        if not hasattr(tensor, "stride"):
            raise ValueError(
                f"the cache of layer {name} is a {type(tensor).__name__}, not a tensor: this kind of cache is not supported yet"
            )
        place, spec = group_of[name]
        kv_cache_config = replace(config, num_blocks=config.hisparse_host_num_blocks) if name in on_host else config
        key = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), place)
        if key in seen:
            continue
        seen.add(key)
        if states.is_state(spec):
            rank, device = (heads.tp_rank, heads.tp_size), tensor.device.type
            regions += states.make_regions(name, tensor, spec, place, kv_cache_config.num_blocks, rank, device, regions_from_tensor)
            continue
        dims = find_dims(vllm_config, kv_cache_config, name, spec, tensor.shape)
        _check_size(tensor, dims, spec, kv_cache_config, name)
        backend = _backend(vllm_config, name)
        items = backend in _BACKENDS_OF_ITEMS
        tensor, geometry = _with_geometry(tensor, dims, spec, kv_cache_config.num_blocks, heads, items)
        if _quantisation(spec) not in _PLAIN_QUANTISATION or is_index(spec):
            geometry = {}  # scales lie among the numbers: that a block can be cut by heads or tokens is not known
        named = name + _meaning(vllm_config, name, spec, backend, shard)
        regions.extend(regions_from_tensor(named, tensor, dims.block, place, **geometry))
    if not regions:
        raise ValueError(f"none of {len(kv_caches)} caches can be transferred")
    return regions


def regions_by_layer(layers: Iterable[str], regions: Sequence[Any]) -> dict[str, list[int]]:
    """The indices of each layer's regions."""
    return {name: [n for n, region in enumerate(regions) if region.name == name or region.name.startswith(f"{name}[")] for name in layers}
