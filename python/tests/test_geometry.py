"""Tensors whose tokens and heads are known: every layout to every other one, with other blocks and heads."""

from __future__ import annotations

import itertools
from typing import Any, Optional

import numpy as np
import pytest
from side import Side

import kvconn

LAYERS, HEADS, CONTENT = 2, 4, 6

# vLLM's names: the order in memory of layers, blocks, heads, tokens and content.
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


def cache(layout: str, blocks: int, tokens: int, heads: int) -> np.ndarray:
    """A cache of all layers in logical order L, B, H, N, C that lies in memory as the layout says."""
    sizes = dict(zip("LBHNC", (LAYERS, blocks, heads, tokens, CONTENT)))
    storage = np.zeros([sizes[d] for d in layout], np.float32)
    return storage.transpose([layout.index(d) for d in "LBHNC"])


def regions(view: np.ndarray, first_head: int = 0, total_heads: int = 0) -> list[kvconn.Region]:
    out = []
    for i, layer in enumerate(view):
        out += kvconn.regions_from_tensor(f"layer.{i}", layer, 0, token_dim=2, head_dim=1, first_head=first_head, total_heads=total_heads)
    return out


def address(a: np.ndarray, *index: int) -> int:
    return int(a.__array_interface__["data"][0]) + sum(i * s for i, s in zip(index, a.strides))


def check_items(layer: np.ndarray, of_layer: list[kvconn.Region], first_head: int) -> None:
    """Each item (block, token, head) of a layer in B, H, N, C lies where just one region says."""
    blocks, heads, tokens, content = layer.shape
    seen = {}
    for r in of_layer:
        assert r.block_bytes == r.tokens * r.heads * content * 4 and r.num_blocks == blocks
        for b, t, h in itertools.product(range(blocks), range(r.tokens), range(r.heads)):
            key = (b, t, r.first_head + h - first_head)
            assert key not in seen
            seen[key] = r.address + b * r.block_stride + t * r.token_stride + h * r.head_stride
    assert seen == {(b, t, h): address(layer, b, h, t) for b, t, h in itertools.product(range(blocks), range(tokens), range(heads))}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("tokens", [1, 16])
def test_items(layout: str, heads: int, tokens: int) -> None:
    view = cache(layout, 5, tokens, heads)
    made = regions(view, first_head=3, total_heads=8)
    for i, layer in enumerate(view):
        check_items(layer, [r for r in made if r.name == f"layer.{i}"], 3)
    assert len(made) == LAYERS * (heads if layout in ("LHBNC", "BHLNC") else 1)
    assert {r.total_heads for r in made} == {8}


def test_all_heads() -> None:
    assert {(r.first_head, r.total_heads) for r in regions(cache("LBNHC", 3, 16, HEADS))} == {(0, HEADS)}
    assert {r.total_heads for r in regions(cache("LHBNC", 3, 16, HEADS))} == {HEADS}


@pytest.mark.parametrize(
    "shape,block_dim,token_dim,head_dim,names",
    [
        ((2, 7, 16, HEADS, 8), 1, 2, 3, ["kv[0]", "kv[1]"]),  # FlashAttention of old
        ((2, 7, HEADS, 16, 8), 1, 3, 2, ["kv[0]", "kv[1]"]),
        ((7, 2, 16, HEADS, 8), 0, 2, 3, ["kv[0]", "kv[1]"]),  # FlashInfer
        ((7, 2, HEADS, 16, 8), 0, 3, 2, ["kv[0]", "kv[1]"]),
        ((7, 16, 72), 0, 1, None, ["kv"]),  # MLA
        ((7, 4, 4, HEADS, 8), 0, (1, 2), 3, ["kv"]),  # blocks of smaller ones
        ((7, 4, 4, 72), 0, (1, 2), None, ["kv"]),
    ],
)
def test_other_shapes(shape: tuple[int, ...], block_dim: int, token_dim: Any, head_dim: Optional[int], names: list[str]) -> None:
    tensor = np.zeros(shape, np.float32)
    made = kvconn.regions_from_tensor("kv", tensor, block_dim, token_dim=token_dim, head_dim=head_dim)
    assert [r.name for r in made] == names
    for r in made:
        assert (r.tokens, r.heads) == (16, 1 if head_dim is None else HEADS)
        inner = head_dim is not None and head_dim < (token_dim if isinstance(token_dim, int) else 0)
        item = r.block_bytes // (r.tokens * r.heads)
        assert (r.token_stride, r.head_stride) == ((item, 16 * item) if inner else (r.heads * item, item))
    assert sum(r.block_bytes for r in made) * 7 == tensor.nbytes


def test_what_stays_opaque() -> None:
    apart = np.zeros((7, 16, 2, HEADS, 8), np.float32)[:, :, 0]  # another layer between two tokens
    assert {r.tokens for r in kvconn.regions_from_tensor("k", apart, 0, token_dim=1, head_dim=2)} == {0}
    odd = np.zeros((7, 16, HEADS, 3), np.int16)
    assert [(r.tokens, r.block_bytes) for r in kvconn.regions_from_tensor("k", odd, 0, token_dim=1, head_dim=2)] == [(0, 16 * HEADS * 6)]
    small = np.zeros((7, 4, HEADS, 4, 8), np.float32)  # smaller blocks with the heads outside
    assert {r.tokens for r in kvconn.regions_from_tensor("k", small, 0, token_dim=(1, 3), head_dim=2)} == {0}


def test_bad_dims() -> None:
    a = np.zeros((7, 16, HEADS, 8), np.float32)
    for kwargs, text in [
        ({"token_dim": 4}, "token_dim is 4"),
        ({"token_dim": 1, "head_dim": -5}, "head_dim is -5"),
        ({"head_dim": 2}, "give both"),
        ({"token_dim": 0}, "twice"),
        ({"token_dim": 1, "head_dim": -3}, "twice"),
    ]:
        with pytest.raises(kvconn.InvalidError, match=text):
            kvconn.regions_from_tensor("k", a, 0, **kwargs)


@pytest.mark.parametrize("src,dst", list(itertools.product(LAYOUTS, LAYOUTS)))
def test_every_layout_to_every_other(src: str, dst: str) -> None:
    """From all heads in blocks of 16 tokens to half of them in blocks of 32, of a prompt of 40 tokens."""
    p_cache, d_cache = cache(src, 6, 16, HEADS), cache(dst, 6, 32, HEADS // 2)
    p, d = Side("prefill"), Side("decode")
    try:
        p.agent.register_kv_caches(regions(p_cache))
        d.agent.register_kv_caches(regions(d_cache, HEADS // 2, HEADS))
        p_ids, d_ids = [4, 2, 3], [1, 5]
        rows = np.random.default_rng(7).random((LAYERS, HEADS, 48, CONTENT), np.float32)
        for i, block in enumerate(p_ids):
            p_cache[:, block] = rows[:, :, i * 16 : (i + 1) * 16]
        p.agent.offer([kvconn.Offer("t", [p_ids])])
        d.agent.start_load([kvconn.Load("t", p.agent.bootstrap_address, "", [d_ids], tokens=[40])])
        done = d.finished("t")
        assert (done.code, done.reason) == (0, "")
        assert done.bytes == LAYERS * HEADS // 2 * 48 * CONTENT * 4
        want = np.zeros_like(d_cache)
        want[:, 1] = rows[:, HEADS // 2 :, :32]
        want[:, 5, :, :16] = rows[:, HEADS // 2 :, 32:]
        assert np.array_equal(d_cache, want)
        assert p.finished("t").ok
    finally:
        d.agent.close()
        p.agent.close()


def test_an_offer_that_begins_late() -> None:
    p, d = Side("prefill").register(), Side("decode").register()
    try:
        p.cache[:, 3] = 9
        for transfer_id, first in (("t", 2), ("u", 1)):
            p.agent.offer([kvconn.Offer(transfer_id, [[3]], first_block=[2])])
            d.agent.start_load([kvconn.Load(transfer_id, p.agent.bootstrap_address, "", [[7]], first_block=[first])])
        assert d.finished("t").ok and (d.cache[:, 7] == 9).all()
        done = d.finished("u")
        assert done.code == kvconn.Status.REFUSED and "begins with block 2" in done.reason
        with pytest.raises(kvconn.InvalidError, match="tokens has 2 groups"):
            d.agent.start_load([kvconn.Load("v", p.agent.bootstrap_address, "", [[7]], tokens=[1, 2])])
        with pytest.raises(kvconn.InvalidError, match="first_block has 2 groups"):
            p.agent.offer([kvconn.Offer("v", [[7]], first_block=[1, 2])])
    finally:
        d.agent.close()
        p.agent.close()
