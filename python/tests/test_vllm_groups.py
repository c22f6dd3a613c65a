"""KV cache groups of the installed vLLM, and what its managers keep of them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

import torch
from test_vllm_layout import backend
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.core import single_type_kv_cache_manager as managers

import kvconn
from kvconn.vllm.groups import Group, make_groups
from kvconn.vllm.layout import Heads, make_regions

BLOCK = 16


def full(**more: Any) -> Any:
    return specs.FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, **more)


def window(tokens: int, **more: Any) -> Any:
    return specs.SlidingWindowSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=tokens, **more)


def grouped(*kinds: Any) -> Any:
    groups = [specs.KVCacheGroupSpec([f"layer.{number}"], kind) for number, kind in enumerate(kinds)]
    return specs.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def test_groups_of_the_installed_vllm() -> None:
    mla = specs.MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    chunked = specs.ChunkedLocalAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, attention_chunk_size=64)
    several = specs.UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": window(40), "b": window(40)})
    # A window in a group of full attention is only a hint: every block is kept.
    found = make_groups(grouped(full(sliding_window=32), window(40, extra_retained_tokens=3), mla, chunked, several))
    assert found == [
        Group(0, BLOCK),
        Group(1, BLOCK, window=40, retained=3),
        Group(2, BLOCK),
        Group(3, BLOCK, chunk=64),
        Group(4, BLOCK, window=40),
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_layers_of_unequal_heads(ranks: int) -> None:
    """Layers of one group that differ in heads share their block ids. Every byte of a block comes to its layer, at each decode rank."""

    def regions(tp: tuple[int, int], caches: dict[str, Any]) -> list[kvconn.Region]:
        specs_of = {
            name: specs.FullAttentionSpec(block_size=BLOCK, num_kv_heads=cache.shape[1], head_size=4, dtype=torch.bfloat16)
            for name, cache in caches.items()
        }
        group = specs.KVCacheGroupSpec(list(caches), specs.UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs_of))
        config = specs.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group], kv_cache_layout="LBHNC")
        return make_regions(caches, backend("FLASH_ATTN", list(caches)), config, kvconn.regions_from_tensor, Heads(4, *tp))

    sizes = {"a": 2, "b": 4, "c": 4}
    theirs = {name: torch.randn(8, heads, BLOCK, 8).to(torch.bfloat16) for name, heads in sizes.items()}
    at = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 0, "tcp_listen_host": "127.0.0.1"}
    with kvconn.Agent({"engine_id": "p", "role": "prefill", **at}) as p:
        p.register_kv_caches(regions((0, 1), theirs))
        p.offer([kvconn.Offer("t", [[1, 2]])])
        for rank in range(ranks):
            ours = {name: torch.zeros(8, heads // ranks, BLOCK, 8, dtype=torch.bfloat16) for name, heads in sizes.items()}
            with kvconn.Agent({"engine_id": "d", "role": "decode", "tp_rank": rank, "tp_size": ranks}) as d:
                d.register_kv_caches(regions((rank, ranks), ours))
                d.start_load([kvconn.Load("t", p.bootstrap_address, "p", [[5, 3]])])
                done = next(filter(None, (d.get_finished() or (d.wait(1) and None) for _ in range(30))))[0]
                assert done.ok, done
            for name, heads in sizes.items():
                here = heads // ranks
                assert torch.equal(ours[name][[5, 3]], theirs[name][[1, 2], rank * here : (rank + 1) * here]), name
                assert not ours[name][[0, 1, 2, 4, 6, 7]].any()


def test_groups_agree_with_vllms_managers_about_what_is_gone() -> None:
    for spec, group in ((window(40), Group(0, BLOCK, window=40)), (window(33, extra_retained_tokens=2), Group(0, BLOCK, 33, 2))):
        manager = managers.SlidingWindowManager.__new__(managers.SlidingWindowManager)
        manager.sliding_window, manager.extra_retained_tokens = spec.sliding_window, spec.extra_retained_tokens
        for computed in range(200):
            assert group.gone(computed) == manager.get_num_skipped_tokens(computed) // BLOCK
    manager = managers.ChunkedLocalAttentionManager.__new__(managers.ChunkedLocalAttentionManager)
    manager.attention_chunk_size = 64
    for computed in range(200):
        assert Group(0, BLOCK, chunk=64).gone(computed) == manager.get_num_skipped_tokens(computed) // BLOCK


def test_window_that_is_a_ring_of_one_block_is_refused() -> None:
    """Some vLLMs call such a ring a window. Its block is written to over and over: an earlier step's tokens do not stay."""
    kind = getattr(specs, "KpoolTailSpec", None) or type("KpoolTailSpec", (specs.SlidingWindowSpec,), {})
    ring = kind(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=BLOCK)
    with pytest.raises(ValueError, match="a KV cache of KpoolTailSpec is not supported"):
        make_groups(grouped(full(), ring))


def test_caches_of_another_kind_are_refused_by_name() -> None:
    crossed = specs.CrossAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="a KV cache of CrossAttentionSpec is not supported"):
        make_groups(grouped(full(), crossed))
    rebuilt = grouped(crossed)  # by vLLM, of what is carried
    rebuilt.kv_cache_groups[0].enable_kv_transfer = False
    assert make_groups(rebuilt) == []
