"""vLLM's KV cache tensors as regions of blocks.

vLLM gives every layer a view in logical order; the strides say how it lies in memory (layers side by side, heads before
tokens, one storage for all layers, …). So the only thing to find out is which dimension counts the blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .groups import transfer_groups

logger = logging.getLogger("kvconn.vllm")

# Stands for the number of blocks when a backend is asked for its shape: equal to no other dimension of a cache.
_MARK = 1_234_577


def _dim_from_backend(vllm_config: Any, layer_name: str, spec: Any) -> int | None:
    """The position of the block count in the shape that the layer's attention backend asks for."""
    try:
        layer = vllm_config.compilation_config.static_forward_context[layer_name]
        shape = layer.get_attn_backend().get_kv_cache_shape(_MARK, spec.block_size, spec.num_kv_heads, spec.head_size)
    except Exception as error:  # whatever another vLLM lacks here, there is a second way below
        logger.debug("%s: the attention backend does not tell its cache's shape: %r", layer_name, error)
        return None
    found = [dim for dim, size in enumerate(shape) if size == _MARK]
    return found[0] if len(found) == 1 else None


def block_dim(vllm_config: Any, kv_cache_config: Any, layer_name: str, spec: Any, shape: Sequence[int]) -> int:
    """The dimension of a layer's tensor that counts blocks."""
    num_blocks = kv_cache_config.num_blocks
    # With the layouts named L, B, H, N, C the blocks come first in a layer's logical shape.
    named = hasattr(kv_cache_config, "kv_cache_layout")
    dim = 0 if named else _dim_from_backend(vllm_config, layer_name, spec)
    if dim is None:
        fitting = [d for d, size in enumerate(shape) if size == num_blocks]
        dim = fitting[0] if len(fitting) == 1 else None
    # A kernel that works on smaller blocks sees a multiple of vLLM's blocks.
    if dim is None or not shape[dim] or shape[dim] % num_blocks:
        raise ValueError(
            f"KVConnConnector: layer {layer_name} has a cache of shape {tuple(shape)}: no dimension of it counts {num_blocks} blocks"
        )
    return dim


def make_regions(
    kv_caches: Mapping[str, Any],
    vllm_config: Any,
    kv_cache_config: Any,
    regions_from_tensor: Callable[..., list[Any]],
) -> list[Any]:
    """One region or more per layer, in the order of the layers; a tensor shared by layers is taken once."""
    group_of: dict[str, tuple[int, Any]] = {}
    for place, number in enumerate(transfer_groups(kv_cache_config)):
        group = kv_cache_config.kv_cache_groups[number]
        for name in group.layer_names:
            spec = group.kv_cache_spec
            group_of[name] = (place, getattr(spec, "kv_cache_specs", {}).get(name, spec))
    regions: list[Any] = []
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in kv_caches.items():
        if name not in group_of:
            logger.debug("%s: its cache takes no part in transfers", name)
            continue
        if not hasattr(tensor, "stride"):
            raise ValueError(
                f"KVConnConnector: the cache of layer {name} is a {type(tensor).__name__}, not a tensor: "
                "this kind of cache is not supported yet"
            )
        if tensor.device.type != "cpu":
            raise ValueError(
                f"KVConnConnector: the cache of layer {name} lies on {tensor.device}: only caches in host memory are supported yet"
            )
        place, spec = group_of[name]
        key = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), place)
        if key in seen:
            continue
        seen.add(key)
        dim = block_dim(vllm_config, kv_cache_config, name, spec, tensor.shape)
        if tensor.shape[dim] != kv_cache_config.num_blocks:
            tensor = tensor.unflatten(dim, (kv_cache_config.num_blocks, -1))
        regions.extend(regions_from_tensor(name, tensor, dim, place))
    if not regions:
        raise ValueError(f"KVConnConnector: none of {len(kv_caches)} caches can be transferred")
    return regions
