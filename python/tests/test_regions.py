"""Tensors to regions: every block's every byte belongs to just one region."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import kvconn


def covered(regions: list[kvconn.Region], block: int) -> list[int]:
    out = []
    for r in regions:
        start = r.address + block * r.block_stride
        out.extend(range(start, start + r.block_bytes))
    return out


@pytest.mark.parametrize("dims", list(itertools.permutations(range(4))))
@pytest.mark.parametrize("block_dim", range(4))
def test_every_layout(dims: tuple[int, ...], block_dim: int) -> None:
    storage = np.arange(5 * 3 * 2 * 4, dtype=np.float32).reshape(5, 3, 2, 4)
    view = storage.transpose(dims)
    regions = kvconn.regions_from_tensor("t", view, block_dim)
    assert len({r.name for r in regions}) == len(regions)
    base = storage.__array_interface__["data"][0]
    for block in range(view.shape[block_dim]):
        got = covered(regions, block)
        # The bytes of the block, found element by element.
        want = []
        for index in np.ndindex(view.shape):
            if index[block_dim] == block:
                at = base + sum(i * s for i, s in zip(index, view.strides))
                want.extend(range(at, at + 4))
        assert len(got) == len(set(got))
        assert sorted(got) == sorted(want)


def test_contiguous_block_is_one_region() -> None:
    (r,) = kvconn.regions_from_tensor("k", np.zeros((7, 2, 3, 8), np.float32), 0, group=2)
    assert r[0] == "k" and r[2:] == (192, 192, 7, 2, 0, 0, 0, 0, 0, 0, kvconn.IndexKind.BLOCK, False, kvconn.Memory.HOST, -1)


def test_fused_kv_outside_blocks_is_two_regions() -> None:
    k, v = kvconn.regions_from_tensor("kv", np.zeros((2, 7, 16), np.float32), 1)
    assert (k.name, v.name, k.block_bytes, v.address - k.address) == ("kv[0]", "kv[1]", 64, 7 * 64)


def test_pieces_are_named_after_their_outer_indices() -> None:
    """Outermost first, whatever the strides are: both engines must give a piece the same name, and name them in one order."""
    for storage in (np.zeros((2, 7, 3, 16), np.float32), np.zeros((3, 7, 2, 16), np.float32).transpose(2, 1, 0, 3)):
        kv = storage[..., :8]
        regions = kvconn.regions_from_tensor("kv", kv, 1)
        first = kv.__array_interface__["data"][0]
        want = [(f"kv[{i},{j}]", first + i * kv.strides[0] + j * kv.strides[2]) for i in range(2) for j in range(3)]
        assert [(r.name, r.address) for r in regions] == want
        assert {r.block_bytes for r in regions} == {32}


def test_views_of_one_storage_interleave() -> None:
    storage = np.zeros((7, 2, 16), np.float32)
    regions = [kvconn.regions_from_tensor(f"l{i}", storage[:, i], 0)[0] for i in range(2)]
    assert [r.block_stride for r in regions] == [128, 128]
    with kvconn.Agent({"engine_id": "e", "role": "decode"}) as agent:
        agent.register_kv_caches(regions)


def test_buffers() -> None:
    buf = bytearray(64)
    (r,) = kvconn.regions_from_tensor("b", memoryview(buf).cast("B", (4, 16)), 0)
    assert (r.block_bytes, r.num_blocks) == (16, 4)
    with pytest.raises(kvconn.InvalidError, match="read-only"):
        kvconn.regions_from_tensor("b", bytes(8), 0)
    with pytest.raises(kvconn.InvalidError, match="block_dim"):
        kvconn.regions_from_tensor("b", buf, 3)
    with pytest.raises(kvconn.InvalidError, match="empty"):
        kvconn.regions_from_tensor("b", np.zeros((0, 4)), 0)
    with pytest.raises(kvconn.InvalidError, match="object"):
        kvconn.regions_from_tensor("b", object(), 0)
