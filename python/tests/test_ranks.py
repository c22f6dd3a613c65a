"""Engines of several ranks: the configuration of each agent, and that the heads arrive."""

from __future__ import annotations

import numpy as np
import pytest
from side import Side

import kvconn

LAYERS, BLOCKS, TOKENS, HEADS, ITEM = 2, 8, 4, 4, 32


def rank(role: str, tp: int, size: int, **config: object) -> Side:
    """A rank with its share of the heads, which are painted by the test."""
    side = Side(role, tp_rank=tp, tp_size=size, **config)
    per = HEADS // size
    side.cache = np.zeros((LAYERS, BLOCKS, TOKENS, per, ITEM), np.uint8)
    regions = []
    for i, layer in enumerate(side.cache):
        regions += kvconn.regions_from_tensor(
            f"layer.{i}", layer, block_dim=0, token_dim=1, head_dim=2, first_head=tp * per, total_heads=HEADS
        )
    side.agent.register_kv_caches(regions)
    return side


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2), (4, 2)])
def test_heads_of_unequal_ranks(sizes: tuple[int, int], transfer_id: str) -> None:
    prefill = [rank("prefill", 0, sizes[0])]
    address = prefill[0].agent.bootstrap_address
    prefill += [rank("prefill", tp, sizes[0], bootstrap_join=address) for tp in range(1, sizes[0])]
    decode = [rank("decode", tp, sizes[1]) for tp in range(sizes[1])]
    assert all(p.agent.bootstrap_address == address for p in prefill)
    whole = np.random.default_rng(3).integers(1, 256, (LAYERS, 2, TOKENS, HEADS, ITEM), dtype=np.uint8)
    for side in decode:
        side.agent.claim([kvconn.Claim(transfer_id, address, "engine-prefill")])
    for tp, side in enumerate(prefill):
        per = HEADS // sizes[0]
        side.cache[:, [6, 1]] = whole[:, :, :, tp * per : (tp + 1) * per]
        side.agent.offer([kvconn.Offer(transfer_id, [[6, 1]])])
    for side in decode:
        side.agent.start_load([kvconn.Load(transfer_id, address, "engine-prefill", [[2, 5]])])
    for tp, side in enumerate(decode):
        done = side.finished(transfer_id)
        assert done.ok, done
        per = HEADS // sizes[1]
        assert np.array_equal(side.cache[:, [2, 5]], whole[:, :, :, tp * per : (tp + 1) * per])
    for side in prefill:
        assert side.finished(transfer_id).ok
    for side in decode + prefill:
        side.agent.close()


def test_a_port_without_kv_caches(transfer_id: str) -> None:
    with kvconn.Agent({"role": "bootstrap", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0}) as host:
        address = host.bootstrap_address
        prefill = [rank("prefill", tp, 2, bootstrap_join=address) for tp in range(2)]
        decode = rank("decode", 0, 1)
        for side in prefill:
            side.cache[:, 6] = 7
            side.agent.offer([kvconn.Offer(transfer_id, [[6]])])
        decode.agent.start_load([kvconn.Load(transfer_id, address, "", [[2]])])
        assert decode.finished(transfer_id).ok
        assert (decode.cache[:, 2] == 7).all()
        with pytest.raises(kvconn.KvconnError, match="bootstrap"):
            host.register_kv_caches([])
        for side in [decode, *prefill]:
            side.agent.close()


def test_a_rank_that_cannot_join() -> None:
    with pytest.raises(kvconn.ConfigError, match="bootstrap_join"):
        Side("prefill", tp_rank=1, tp_size=2)
    with pytest.raises(kvconn.KvconnError, match=r"127\.0\.0\.1:9"):
        Side("prefill", tp_rank=1, tp_size=2, bootstrap_join="http://127.0.0.1:9", join_timeout_s=0.5)
