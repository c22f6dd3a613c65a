"""vLLM's KV cache tensors as regions of blocks."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

import like as vllm
import torch
from like import like, older
from vllm.v1 import kv_cache_interface as specs

import kvconn
from kvconn.vllm import layout

BLOCK = 16
ALL_HEADS = layout.Heads(3)


def cache_config(num_blocks: int = 8, layers: Sequence[str] = ("a", "b")) -> Any:
    group = specs.KVCacheGroupSpec(list(layers), heads(3))
    return specs.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group], kv_cache_layout="LBHNC")


def heads(number: int, **more: Any) -> Any:
    return specs.FullAttentionSpec(**{"block_size": BLOCK, "num_kv_heads": number, "head_size": 5, "dtype": torch.int32, **more})


def regions(caches: dict[str, Any], config: Any) -> list[tuple[Any, ...]]:
    def record(name: str, tensor: Any, dim: int, group: int = 0, **geometry: Any) -> list[Any]:
        return [(name, tuple(tensor.shape), tuple(tensor.stride()), dim, group, geometry)]

    return layout.make_regions(caches, backend("FLASH_ATTN", caches), config, record, ALL_HEADS)


def backend(name: str, layers: Sequence[str]) -> Any:
    asked = like(vllm.LAYER, get_attn_backend=lambda: like(vllm.BACKEND, get_name=lambda: name))
    context = like(vllm.COMPILATION_CONFIG, static_forward_context={each: asked for each in layers})
    return like(
        vllm.VLLM_CONFIG,
        compilation_config=context,
        cache_config=like(vllm.CACHE_CONFIG, cache_dtype="auto"),
        model_config=like(vllm.MODEL_CONFIG, dtype=torch.bfloat16),
    )


# The orders that vLLM names, as memory order of the logical axes L, B, H, N, C.
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


@pytest.mark.parametrize("name", ORDERS)
def test_named_layouts(name: str) -> None:
    order = ORDERS[name]
    sizes = (2, 8, 3, BLOCK, 10)
    memory = torch.arange(2 * 8 * 3 * BLOCK * 10, dtype=torch.int32).reshape([sizes[axis] for axis in order])
    logical = memory.permute([order.index(axis) for axis in range(5)])
    caches = {"a": logical[0], "b": logical[1]}
    assert [entry[1] for entry in regions(caches, cache_config())] == [(8, 3, BLOCK, 10)] * 2
    config = cache_config()
    config.kv_cache_groups[0].kv_cache_spec = heads(3)
    mine = layout.Heads(12, tp_rank=2, tp_size=4)
    made = layout.make_regions(caches, backend("FLASH_ATTN", caches), config, kvconn.regions_from_tensor, mine)
    # The heads 6 to 8 of 12, each of them and each token in one place, in as many regions as the layout keeps apart.
    assert {(region.tokens, region.total_heads) for region in made} == {(BLOCK, 12)}
    for layer in "ab":
        its = [region for region in made if region.name == f"{layer}[FLASH_ATTN]"]
        assert sorted(head for region in its for head in range(region.first_head, region.first_head + region.heads)) == [6, 7, 8]
    # Whatever the order: block 5 of all regions together is exactly block 5 of all layers.
    got = sorted(
        value
        for region in made
        for value in (ctypes.c_int32 * (region.block_bytes // 4)).from_address(region.address + 5 * region.block_stride)
    )
    assert got == sorted(logical[:, 5].flatten().tolist())


def test_smaller_kernel_blocks_are_put_together() -> None:
    config = cache_config()
    config.kv_cache_groups[0].kv_cache_spec = heads(3, head_size=3)
    made = regions({"a": torch.zeros(32, 3, BLOCK // 4, 6), "b": torch.zeros(8, 3, BLOCK, 6)}, config)
    assert [entry[1] for entry in made] == [(8, 4, 3, BLOCK // 4, 6), (8, 3, BLOCK, 6)]
    three = {"first_head": 0, "total_heads": 3}
    assert [entry[5] for entry in made] == [{"token_dim": (1, 3), "head_dim": 2, **three}, {"token_dim": 2, "head_dim": 1, **three}]


def test_heads_of_ranks() -> None:
    def spread(total: int, ranks: int, here: int) -> list[tuple[int, int]]:
        return [layout.Heads(total, rank, ranks).of(heads(here)) for rank in range(ranks)]

    assert spread(8, 2, 4) == [(0, 8), (4, 8)]
    assert spread(2, 4, 1) == [(0, 2), (0, 2), (1, 2), (1, 2)]  # too few: ranks share one
    assert spread(8, 2, 6) == [(0, 12), (6, 12)]  # layers with other heads than the model says
    mla = specs.MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    assert [layout.Heads(16, rank, 4).of(mla) for rank in range(4)] == [(0, 1)] * 4


def test_blocks_that_are_not_tokens_by_heads_stay_opaque() -> None:
    config = cache_config(layers=["a"])
    config.kv_cache_groups[0].kv_cache_spec = heads(3, head_size=3, tokens_per_state=4)
    assert regions({"a": torch.zeros(8, 3, BLOCK // 4, 6)}, config)[0][5] == {}
    config.kv_cache_groups[0].kv_cache_spec = heads(3)
    assert regions({"a": torch.zeros(8, 3 * BLOCK * 10)}, config)[0][5] == {}


def test_quantisation_is_a_part_of_the_name() -> None:
    """Blocks of the same length, in which numbers of four bits lie among their scales in different ways."""
    cache = torch.zeros(8, 3, BLOCK, 16, dtype=torch.uint8)

    def made(mode: str) -> Any:
        config = cache_config(layers=["a"])
        config.kv_cache_groups[0].kv_cache_spec = heads(3, head_size=8, dtype=torch.uint8, kv_quant_mode=specs.KVQuantMode[mode])
        return layout.make_regions({"a": cache}, backend("TRITON_ATTN", "a"), config, kvconn.regions_from_tensor, ALL_HEADS)

    found = {mode: made(mode) for mode in ("NONE", "FP8_PER_TENSOR", "NVFP4", "TURBOQUANT_4BIT_NC", "INT4_PER_TOKEN_HEAD")}
    assert [regions[0].name for regions in found.values()] == [
        "a[TRITON_ATTN]",
        "a[TRITON_ATTN,FP8_PER_TENSOR]",
        "a[TRITON_ATTN,NVFP4]",
        "a[TRITON_ATTN,TURBOQUANT_4BIT_NC]",
        "a[TRITON_ATTN,INT4_PER_TOKEN_HEAD]",
    ]
    # Only where a number is an element of the tensor can a block be cut.
    assert [regions[0].tokens for regions in found.values()] == [BLOCK, BLOCK, 0, 0, 0]
    # A block of a mode that is not known here cannot be cut.
    plain = {specs.KVQuantMode[name] for name in layout._PLAIN_QUANTISATION if name}
    assert plain == {specs.KVQuantMode.NONE, specs.KVQuantMode.FP8_PER_TENSOR}


@pytest.mark.parametrize(("engine", "named"), [("auto", ["float16", "float32"]), ("fp8", ["bfloat16", "float16", "float32"])])
def test_type_of_numbers_of_a_layer_is_a_part_of_the_name(engine: str, named: list[str]) -> None:
    """With --kv-cache-dtype-skip-layers some layers have the model's type, which the engine's own does not say."""

    def name(dtype: str) -> str:
        kind = getattr(torch, dtype)
        config, context = cache_config(layers=["a"]), backend("TRITON_ATTN", "a")
        context.cache_config.cache_dtype = engine
        config.kv_cache_groups[0].kv_cache_spec = heads(3, dtype=kind)
        cache = torch.zeros(8, 3, BLOCK, 10, dtype=kind)
        (region,) = layout.make_regions({"a": cache}, context, config, kvconn.regions_from_tensor, ALL_HEADS)
        return region.name

    for dtype in ("bfloat16", "float16", "float32", "float8_e4m3fn", "uint8"):
        assert name(dtype) == (f"a[TRITON_ATTN,{dtype}]" if dtype in named else "a[TRITON_ATTN]")


def test_quantized_cache_is_copied_as_it_is() -> None:
    config = cache_config(layers=["a"])
    config.kv_cache_groups[0].kv_cache_spec = heads(3, head_size=8, dtype=torch.float8_e4m3fn)
    cache = torch.zeros(8, 3, BLOCK, 16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    (region,) = layout.make_regions({"a": cache}, backend("FLASHINFER", "a"), config, kvconn.regions_from_tensor, ALL_HEADS)
    assert (region.block_bytes, region.tokens, region.heads) == (3 * BLOCK * 16, BLOCK, 3)


@pytest.mark.parametrize("name", ORDERS)
def test_backend_with_an_order_of_its_own_moves_whole_blocks_of_heads(name: str) -> None:
    """On CPU a head's tokens are packed within a block: heads can be dealt to ranks, but no block can be cut."""
    order, sizes = ORDERS[name], (2, 8, 3, BLOCK, 10)
    memory = torch.zeros([sizes[axis] for axis in order], dtype=torch.int32)
    layer = memory.permute([order.index(axis) for axis in range(5)])[0]
    config = cache_config(layers=["a"])
    config.kv_cache_groups[0].kv_cache_spec = heads(3)
    made = layout.make_regions({"a": layer}, backend("CPU_ATTN", "a"), config, kvconn.regions_from_tensor, layout.Heads(6, 1, 2))
    if name in ("LBNHC", "BLNHC"):  # the tokens of a head are not together at all
        assert all((region.tokens, region.heads) == (0, 0) for region in made)
        return
    assert sum(region.heads for region in made) == 3
    assert {(region.tokens, region.first_head + n) for region in made for n in range(region.heads)} == {(1, 3), (1, 4), (1, 5)}
    # Smaller kernel blocks: each is packed by itself, and their heads are apart.
    (region, *_) = layout.make_regions(
        {"a": torch.zeros(16, 3, BLOCK // 2, 10)}, backend("CPU_ATTN", "a"), config, kvconn.regions_from_tensor, layout.Heads(3)
    )
    assert region.tokens == 0


def test_order_within_a_block_is_a_part_of_the_name() -> None:
    """One of two hosts has a matrix unit: its blocks have the same size and shape, but another order of bytes."""
    config = cache_config(layers=["a"])
    config.kv_cache_groups[0].kv_cache_spec = heads(3)

    def name(kind: str, isa: Any) -> str:
        context = backend(kind, "a")
        context.compilation_config.static_forward_context["a"].isa = isa
        (region,) = layout.make_regions({"a": torch.zeros(8, 3, BLOCK, 10)}, context, config, kvconn.regions_from_tensor, ALL_HEADS)
        return region.name

    assert [name("CPU_ATTN", isa) for isa in ("amx", "vec", None)] == ["a[CPU_ATTN,amx]", "a[CPU_ATTN,vec]", "a[CPU_ATTN]"]
    assert name("FLASH_ATTN", "amx") == "a[FLASH_ATTN]"


def test_older_vllm_asks_the_backend() -> None:
    group = specs.KVCacheGroupSpec(["a"], heads(3, head_size=4))
    config = older(num_blocks=8, kv_cache_groups=[group])  # says nothing of layouts
    asked = older(get_name=lambda: "FLASH_ATTN", get_kv_cache_shape=lambda blocks, size, heads, dim: (2, blocks, size, heads, dim))
    context = backend("FLASH_ATTN", "a")
    context.compilation_config.static_forward_context["a"].get_attn_backend = lambda: asked
    # 8 blocks and 8 of something else: only the backend can tell.
    cache = torch.zeros(2, 8, BLOCK, 3, 8)
    found = layout.make_regions({"a": cache}, context, config, lambda name, tensor, dim, group, **more: [(dim, more)], ALL_HEADS)
    assert found == [(1, {"token_dim": 2, "head_dim": 3, "first_head": 0, "total_heads": 3})]
    with pytest.raises(ValueError, match="no dimension of it counts 8 blocks"):
        layout.make_regions({"a": cache}, like(vllm.VLLM_CONFIG), config, lambda *_: [], ALL_HEADS)


def test_shared_tensor_is_taken_once_and_strangers_are_left_out() -> None:
    cache = torch.zeros(8, 3, BLOCK, 10)
    assert [entry[0] for entry in regions({"a": cache, "b": cache, "x": torch.zeros(3)}, cache_config())] == ["a[FLASH_ATTN]"]
    with pytest.raises(ValueError, match="none of 1 caches"):
        regions({"x": cache}, cache_config())


def test_cache_that_is_not_what_its_spec_says_is_refused() -> None:
    """The error names both sizes. A number of blocks that does not fit is refused too."""
    for shape, said in {
        (8, 3, BLOCK, 12): "which is 2304 bytes for each of 8 blocks, but its FullAttentionSpec says 1920 bytes",
        (8, 2, BLOCK, 10): "which is 1280 bytes for each of 8 blocks, but its FullAttentionSpec says 1920 bytes",
        (9, 3, BLOCK, 10): "no dimension of it counts 8 blocks",
        (8, 3, BLOCK // 2, 10): "which is 960 bytes for each of 8 blocks, but its FullAttentionSpec says 1920 bytes",
    }.items():
        with pytest.raises(ValueError, match=rf"layer a has a cache of shape \({shape[0]}, .*{said}"):
            regions({"a": torch.zeros(shape)}, cache_config(layers=["a"]))
