"""States: what a layer keeps of all tokens so far, in one block. Mamba layers, gated delta nets and short convolutions have one.

Each token changes the state, so it is of exactly as many tokens as were computed. A decode engine computes the prompt's last
token by itself, and needs the state before that token. Prefill leaves the token out (scheduler.py), and sends the state when
the prompt has ended, never before.

A block holds a layer's tensors one after the other, and padding behind them. Each tensor becomes a region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from ..types import IndexKind
from .served import short

# The types of layers by vLLM's name (MambaAttentionBackendEnum), with the tensors of a state. With further tensors, as the inputs that
# ReplaySSM keeps, these two alone are not the whole state.
PARTS = {"MAMBA1": ("conv", "ssm"), "MAMBA2": ("conv", "ssm"), "GDN_ATTN": ("conv", "ssm"), "SHORT_CONV": ("conv",)}

# One block for a request; or blocks at their places in the prompt, of which those that a later prompt may begin with are kept.
_MODES = ("none", "align")


def is_state(spec: Any) -> bool:
    return type(spec).__name__ == "MambaSpec"


def of(spec: Any) -> list[Any]:
    """The specs of the states of a group's layers."""
    return [each for each in getattr(spec, "kv_cache_specs", {"": spec}).values() if is_state(each)]


def refusal(spec: Any) -> str:
    """Why a state is not carried; nothing if it is."""
    kind = getattr(spec.mamba_type, "name", str(spec.mamba_type))
    parts = PARTS.get(kind)
    if parts is None:
        return f"a state of {kind} is not supported: no test has run one, but of {', '.join(PARTS)}"
    if len(spec.shapes) != len(parts):
        return (
            f"a state of {kind} in tensors of shapes {spec.shapes} is not supported: {', '.join(parts)} are known, and further "
            "ones, as --use-replayssm has, hold a part of the state only"
        )
    if spec.num_speculative_blocks:
        return (
            f"a state with num_speculative_blocks = {spec.num_speculative_blocks} is not supported: speculative decoding keeps "
            "a state of each draft, and no test has run that"
        )
    if spec.mamba_cache_mode not in _MODES:
        return f"a state with mamba_cache_mode = {spec.mamba_cache_mode!r} is not supported: known are {', '.join(_MODES)}"
    return ""


def _conv_layout() -> str:
    """The order of the numbers in a convolution's state: by tokens (SD) or by channels (DS). VLLM_SSM_CONV_STATE_LAYOUT sets it."""
    try:
        from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
    except ImportError:  # a vLLM that has one order only
        return "SD"
    return str(get_conv_state_layout())


def _tensors(spec: Any) -> Iterator[tuple[str, str, int]]:
    """The tensors of a state, as they lie in a block: name, what it holds, bytes."""
    for part, shape, dtype in zip(PARTS[spec.mamba_type.name], spec.shapes, spec.dtypes):
        yield part, f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}", prod(shape) * dtype.itemsize


def _replicated(spec: Any) -> bool:
    """Whether each tensor parallel rank has the whole state; older vLLMs have no such state."""
    return bool(getattr(spec, "tp_replicated", False))


def _described(spec: Any) -> str:
    return f"{spec.mamba_type.name} {', '.join(f'{part} {what}' for part, what, _ in _tensors(spec))}"


def facts(vllm_config: Any, kv_cache_config: Any, tp_size: int) -> dict[str, str]:
    """What two engines must have in common; nothing for a model without states."""
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in of(group.kv_cache_spec)]
    if not specs:
        return {}
    there = "; ".join(sorted({_described(spec) for spec in specs}))
    said = {"states": short(f"{there} on {vllm_config.device_config.device_type}"), "conv_state_layout": _conv_layout()}
    if not all(_replicated(spec) for spec in specs):
        said["state_tp_size"] = str(tp_size)  # each rank has a part of a state, which is not cut
    return said


def make_regions(
    layer: str,
    tensor: Any,
    spec: Any,
    place: int,
    num_blocks: int,
    rank: tuple[int, int],
    device: str,
    regions_from_tensor: Callable[..., list[Any]],
) -> list[Any]:
    """A region for each tensor of a layer's states. Its name says what its bytes mean, and of which rank they are.

    vLLM never says that a state is written, so the name does not begin like the names of the layer's other
    regions.
    """
    sizes = [size for _, _, size in _tensors(spec)]
    *outer, content = tensor.shape
    pages = outer == [num_blocks, *[1] * (len(outer) - 1)] and tensor.stride(-1) * tensor.element_size() == 1
    if not pages or content < sum(sizes):
        raise ValueError(
            f"layer {layer} has a cache of shape {tuple(tensor.shape)} in items of {tensor.element_size()} bytes, "
            f"but its states are {num_blocks} pages of {sum(sizes)} bytes"
        )
    page = tensor[(slice(None), *[0] * (len(outer) - 1))]
    tp_rank, tp_size = rank
    whose = "" if _replicated(spec) or tp_size == 1 else f",rank {tp_rank}/{tp_size}"
    regions, begin = [], 0
    for part, what, size in _tensors(spec):
        order = f",{_conv_layout()}" if part == "conv" else ""
        name = f"{layer}:{part}[{spec.mamba_type.name},{what}{order},{device}{whose}]"
        regions += regions_from_tensor(name, page[:, begin : begin + size], 0, place, index_kind=int(IndexKind.SLOT))
        begin += size
    return regions
