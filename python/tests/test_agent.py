"""The typed API on the installed wheel: transfers, completions, bad input."""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path

import numpy as np
import pytest
from conftest import BLOCK, BLOCKS, LAYERS, Side

import kvconn


def random_blocks(side: Side, ids: list[int]) -> np.ndarray:
    data = np.random.default_rng(7).integers(0, 256, (LAYERS, len(ids), BLOCK), dtype=np.uint8)
    side.cache[:, ids] = data
    return data


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_blocks_move(prefill: Side, decode: Side, transfer_id: str, first: str) -> None:
    data = random_blocks(prefill, [3, 9, 4])
    offer = kvconn.Offer(transfer_id, [[3, 9, 4]], token=5)
    load = kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1, 0, 7]], token=2**60)
    if first == "prefill":
        prefill.agent.offer([offer])
        decode.agent.start_load([load])
    else:
        decode.agent.start_load([load])
        prefill.agent.announce([transfer_id])
        prefill.agent.offer([offer])
    done = decode.finished(transfer_id)
    assert (done.kind, done.code, done.reason, done.blocks, done.token) == ("load", 0, "", 3, 2**60)
    assert done.ok and done.transport == "tcp" and done.bytes == LAYERS * 3 * BLOCK and done.segments > 0
    assert done.wait_s >= 0 and done.transfer_s > 0
    sent = prefill.finished(transfer_id)
    assert (sent.kind, sent.code, sent.token, sent.bytes) == ("offer", 0, 5, done.bytes)
    assert np.array_equal(decode.cache[:, [1, 0, 7]], data)
    others = [b for b in range(BLOCKS) if b not in (1, 0, 7)]
    assert not decode.cache[:, others].any()
    assert not decode.agent.get_finished() and not prefill.agent.get_finished()


def arrives(side: Side, layer: int, block: int, data: np.ndarray) -> None:
    deadline = time.monotonic() + 30
    while not np.array_equal(side.cache[layer, block], data):
        assert time.monotonic() < deadline, f"layer {layer} of block {block} has not come"
        time.sleep(0.001)


def test_a_transfer_grows(prefill: Side, decode: Side, transfer_id: str) -> None:
    data = random_blocks(prefill, [3, 9, 4])
    decode.agent.start_load([kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1, 0, 7]])])
    prefill.agent.grow([kvconn.Growth(transfer_id, [[3, 9]], [1])])
    for layer in range(LAYERS):
        arrives(decode, layer, 1, data[layer, 0])
    assert not decode.cache[:, 0].any()
    regions = [n for n in range(LAYERS) if n != 1]
    prefill.agent.grow([kvconn.Growth(transfer_id, [[]], [2])], regions)
    for layer in regions:
        arrives(decode, layer, 0, data[layer, 1])
    assert not decode.cache[1, 0].any() and not decode.agent.get_finished()
    # Preempted: other blocks, other data in them, and all of it comes.
    prefill.agent.retract([transfer_id])
    prefill.cache[:, [3, 9, 4]] = 0
    prefill.cache[:, [10, 11, 12]] = data
    prefill.agent.grow([kvconn.Growth(transfer_id, [[10, 11]], [2])])
    prefill.agent.offer([kvconn.Offer(transfer_id, [[10, 11, 12]], token=3)])
    assert decode.finished(transfer_id).ok
    sent = prefill.finished(transfer_id)
    assert sent.ok and (sent.token, sent.transport) == (3, "tcp")
    assert np.array_equal(decode.cache[:, [1, 0, 7]], data)


def test_layers_of_a_step_move_as_they_are_written(prefill: Side, decode: Side, transfer_id: str) -> None:
    data = random_blocks(prefill, [3, 9])
    decode.agent.start_load([kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1, 0]])])
    prefill.agent.written[0] = 1  # of no step: it says nothing
    for n, block in enumerate([3, 9]):
        prefill.agent.grow([kvconn.Growth(transfer_id, [[block]], [n], computing=[n + 1])])
        for layer in reversed(range(1, LAYERS)):  # in any order
            prefill.agent.written[layer] = 1
            arrives(decode, layer, 1 - n, data[layer, n])
        assert not decode.cache[0, 1 - n].any()
    prefill.agent.grow([kvconn.Growth(transfer_id, [[]], [2])])
    arrives(decode, 0, 0, data[0, 1])
    prefill.agent.offer([kvconn.Offer(transfer_id, [[3, 9]])])
    assert decode.finished(transfer_id).ok and prefill.finished(transfer_id).ok


def test_growth_that_is_refused(prefill: Side, decode: Side, transfer_id: str) -> None:
    with pytest.raises(kvconn.InvalidError, match="blocks up to 2 of group 0 are ready or being computed, those up to 1 are given"):
        prefill.agent.grow([kvconn.Growth(transfer_id, [[1]], [2])])
    with pytest.raises(kvconn.InvalidError, match="region 99"):
        prefill.agent.grow([kvconn.Growth(transfer_id, [[1]], [1])], [99])
    with pytest.raises(kvconn.InvalidError, match="regions is empty"):
        prefill.agent.grow([kvconn.Growth(transfer_id, [[1]], [1])], [])
    with pytest.raises(kvconn.InvalidError, match="ready has 2 groups, block_ids 1"):
        prefill.agent.grow([kvconn.Growth(transfer_id, [[1]], [1, 1])])
    with pytest.raises(kvconn.InvalidError, match="computing has 2 groups, block_ids 1"):
        prefill.agent.grow([kvconn.Growth(transfer_id, [[1]], [1], computing=[1, 1])])
    with pytest.raises(IndexError):
        prefill.agent.written[LAYERS] = 1
    with pytest.raises(kvconn.InvalidError, match="role"):
        decode.agent.grow([kvconn.Growth(transfer_id, [[1]], [1])])
    prefill.agent.grow([kvconn.Growth(transfer_id, [[1]], [1])])
    with pytest.raises(kvconn.InvalidError, match="take them back first"):
        prefill.agent.offer([kvconn.Offer(transfer_id, [[2]])])
    prefill.agent.retract([transfer_id, "nobody's"])
    prefill.agent.offer([kvconn.Offer(transfer_id, [[2]])])
    with pytest.raises(kvconn.InvalidError, match="is offered"):
        prefill.agent.retract([transfer_id])
    prefill.agent.cancel([transfer_id])
    assert prefill.finished(transfer_id).code == kvconn.Status.CANCELLED


def test_long_prompt_of_blocks_of_one_token() -> None:
    """Blocks anywhere, which no run joins, and as many as a transfer may have."""
    count, width = 1 << 18, 16
    order = np.random.default_rng(3).permutation(count)
    caches = {role: np.zeros((2, count, width), np.uint8) for role in ("prefill", "decode")}
    caches["prefill"][:] = np.random.default_rng(4).integers(0, 256, caches["prefill"].shape, dtype=np.uint8)
    with (
        kvconn.Agent({"engine_id": "p", "role": "prefill", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0}) as p,
        kvconn.Agent({"engine_id": "d", "role": "decode"}) as d,
    ):
        for agent, cache in ((p, caches["prefill"]), (d, caches["decode"])):
            agent.register_kv_caches([kvconn.regions_from_tensor(f"layer.{n}", layer, block_dim=0)[0] for n, layer in enumerate(cache)])
        p.offer([kvconn.Offer("long", [order])])
        d.start_load([kvconn.Load("long", p.bootstrap_address, "p", [np.arange(count)])])
        deadline = time.monotonic() + 60
        while not (done := d.get_finished()):
            assert time.monotonic() < deadline, d.stats()
            time.sleep(0.001)
        assert done[0].ok and done[0].bytes == 2 * count * width, done
        assert np.array_equal(caches["decode"], caches["prefill"][:, order])
        with pytest.raises(kvconn.InvalidError, match=r"262145.*262144"):
            p.offer([kvconn.Offer("longer", [np.zeros(count + 1, np.uint32)])])


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_another_prompt(prefill: Side, decode: Side, transfer_id: str, first: str, grows: bool) -> None:
    """A router has sent prefill and decode two requests by one id, with as many blocks."""
    random_blocks(prefill, [3, 9])
    ours, theirs = kvconn.fingerprint([1, 2, 3]), kvconn.fingerprint([1, 2, 4])
    load = kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1, 0]], prompt=theirs)

    def prefills() -> None:
        if grows:
            prefill.agent.grow([kvconn.Growth(transfer_id, [[3]], [1], prompt=ours)])
            with pytest.raises(kvconn.InvalidError, match=f"{theirs:016x}"):
                prefill.agent.grow([kvconn.Growth(transfer_id, [[9]], [2], prompt=theirs)])
        prefill.agent.offer([kvconn.Offer(transfer_id, [[3, 9]], prompt=0 if grows else ours)])

    if first == "prefill":
        prefills()
    decode.agent.start_load([load])
    if first == "decode":
        prefill.until("offers_early", 1)
        if grows:
            prefill.agent.grow([kvconn.Growth(transfer_id, [[3]], [1], prompt=ours)])
        prefill.agent.offer([kvconn.Offer(transfer_id, [[3, 9]], prompt=ours)])
    for side in (decode, prefill):
        done = side.finished(transfer_id)
        assert done.code == kvconn.Status.REFUSED
        assert transfer_id in done.reason and f"{theirs:016x} and {ours:016x}" in done.reason
    assert not decode.cache.any()


def test_the_same_prompt(prefill: Side, decode: Side, transfer_id: str) -> None:
    data, prompt = random_blocks(prefill, [3, 9]), kvconn.fingerprint(range(32))
    prefill.agent.grow([kvconn.Growth(transfer_id, [[3]], [1], prompt=prompt)])
    decode.agent.start_load([kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1, 0]], prompt=prompt)])
    prefill.agent.offer([kvconn.Offer(transfer_id, [[3, 9]], prompt=prompt)])
    assert decode.finished(transfer_id).ok and prefill.finished(transfer_id).ok
    assert np.array_equal(decode.cache[:, [1, 0]], data)


def test_fingerprint() -> None:
    """Of one prompt on all machines and all releases."""
    assert kvconn.fingerprint([1, 2, 3]) == 0x689DE1E73A03E2E2
    assert kvconn.fingerprint([]) == 0x141CFC9842C4B0E3
    for same in ((1, 2, 3), array("q", [1, 2, 3]), array("Q", [1, 2, 3]), array("I", [1, 2, 3]), np.array([1, 2, 3])):
        assert kvconn.fingerprint(same) == kvconn.fingerprint([1, 2, 3])
    assert kvconn.fingerprint([-1, 2]) == kvconn.fingerprint(array("q", [-1, 2]))
    others = [[1, 2, 3], [1, 2], [1, 2, 4], [3, 2, 1], [1, 2, 3, 0], [0, 1, 2, 3], [1 + 2**32, 2, 3], [-1, 2, 3], [2, 3]]
    assert len({kvconn.fingerprint(ids) for ids in others}) == len(others)
    for bad in ([1.5], ["1"], [None], [2**64], [-(2**63) - 1], 7, iter([-1, 2])):
        with pytest.raises(kvconn.InvalidError, match="token_ids"):
            kvconn.fingerprint(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [-1, 2**64, 1.5, "1", None])
def test_prompt_that_is_no_number(prefill: Side, decode: Side, transfer_id: str, prompt: object) -> None:
    with pytest.raises(kvconn.InvalidError, match="prompt"):
        prefill.agent.offer([kvconn.Offer(transfer_id, [[1]], prompt=prompt)])  # type: ignore[arg-type]
    with pytest.raises(kvconn.InvalidError, match="prompt"):
        decode.agent.start_load([kvconn.Load(transfer_id, "http://p:1", "p", [[1]], prompt=prompt)])  # type: ignore[arg-type]


def test_cached_prefix_is_skipped(prefill: Side, decode: Side, transfer_id: str) -> None:
    data = random_blocks(prefill, [0, 1, 2, 3])
    prefill.agent.offer([kvconn.Offer(transfer_id, [[0, 1, 2, 3]])])
    address = prefill.agent.bootstrap_address
    decode.agent.start_load([kvconn.Load(transfer_id, address, "engine-prefill", [[8, 9]], first_block=[2])])
    assert decode.finished(transfer_id).blocks == 2
    assert np.array_equal(decode.cache[:, [8, 9]], data[:, 2:])
    assert not decode.cache[:, :8].any()


def test_empty_load_frees_the_offer(prefill: Side, decode: Side, transfer_id: str) -> None:
    address = prefill.agent.bootstrap_address
    decode.agent.start_load([kvconn.Load(transfer_id, address, "engine-prefill", [])])
    assert decode.finished(transfer_id).ok
    prefill.agent.offer([kvconn.Offer(transfer_id, [[1]])])
    assert prefill.finished(transfer_id).ok


def test_many_in_one_batch(prefill: Side, decode: Side) -> None:
    ids = [f"batch-{i}" for i in range(500)]
    address = prefill.agent.bootstrap_address
    decode.agent.start_load([kvconn.Load(t, address, "engine-prefill", [[i % BLOCKS]]) for i, t in enumerate(ids)])
    prefill.agent.offer([kvconn.Offer(t, [[i % BLOCKS]]) for i, t in enumerate(ids)])
    for side in (decode, prefill):
        seen: dict[str, int] = {}
        deadline = time.monotonic() + 60
        while len(seen) < len(ids) and time.monotonic() < deadline:
            for done in side.agent.get_finished():
                assert done.ok, done
                seen[done.transfer_id] = seen.get(done.transfer_id, 0) + 1
            side.agent.wait(1)
        assert seen == dict.fromkeys(ids, 1)


def test_cancel_by_decode_frees_prefill(prefill: Side, decode: Side, transfer_id: str) -> None:
    prefill.agent.announce([transfer_id])
    decode.agent.start_load([kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1]])])
    decode.agent.cancel([transfer_id], "the client went away")
    done = decode.finished(transfer_id)
    assert done.code == kvconn.Status.CANCELLED and "client went away" in done.reason
    prefill.agent.offer([kvconn.Offer(transfer_id, [[2]])])
    assert prefill.finished(transfer_id).code == kvconn.Status.PEER_CANCELLED


def test_cancel_by_prefill_reaches_decode(prefill: Side, decode: Side, transfer_id: str) -> None:
    prefill.agent.announce([transfer_id])
    decode.agent.start_load([kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1]])])
    prefill.agent.cancel([transfer_id], "out of memory")
    done = decode.finished(transfer_id)
    assert done.code == kvconn.Status.PEER_CANCELLED and "out of memory" in done.reason


def test_load_that_nobody_offers(decode: Side, transfer_id: str) -> None:
    prefill = Side("prefill", early_load_s=0.5).register()
    decode.agent.start_load([kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1]])])
    done = decode.finished(transfer_id)
    assert done.code == kvconn.Status.NOT_OFFERED and transfer_id in done.reason
    prefill.agent.close()


def test_claim_outlives_the_lease(transfer_id: str) -> None:
    prefill, decode = Side("prefill", lease_s=1).register(), Side("decode", peer_timeout_s=0.6).register()
    address = prefill.agent.bootstrap_address
    claim = kvconn.Claim(transfer_id, address, "engine-prefill")
    decode.agent.claim([claim])
    decode.agent.claim([claim])
    prefill.until("offers_early", 1)
    data = random_blocks(prefill, [4])
    prefill.agent.offer([kvconn.Offer(transfer_id, [[4]]), kvconn.Offer("unclaimed", [[5]])])
    assert prefill.finished("unclaimed").code == kvconn.Status.EXPIRED
    decode.agent.start_load([kvconn.Load(transfer_id, address, "engine-prefill", [[2]])])
    assert decode.finished(transfer_id).ok and prefill.finished(transfer_id).ok
    assert np.array_equal(decode.cache[:, [2]], data)
    stats = decode.agent.stats()
    assert (stats["claimed"], stats["loads_started"], stats["loads"], stats["loads_claimed"]) == (1, 1, 1, 0)
    assert prefill.agent.stats()["offers_failed_by"] == {"expired": 1}
    prefill.agent.close()
    decode.agent.close()


def test_cancelled_claim_frees_prefill(prefill: Side, decode: Side, transfer_id: str) -> None:
    decode.agent.claim([kvconn.Claim(transfer_id, prefill.agent.bootstrap_address, "engine-prefill")])
    prefill.until("offers_early", 1)
    prefill.agent.offer([kvconn.Offer(transfer_id, [[1]])])
    decode.agent.cancel([transfer_id], "aborted in the queue")
    done = prefill.finished(transfer_id)
    assert done.code == kvconn.Status.PEER_CANCELLED and "aborted in the queue" in done.reason
    assert not decode.agent.get_finished()


def test_failure_says_where_and_when(prefill: Side, decode: Side, transfer_id: str) -> None:
    prefill.agent.cancel([transfer_id], "out of memory")
    decode.agent.start_load([kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1]])])
    reason = decode.finished(transfer_id).reason
    for part in ("out of memory [load of engine", "dp0 tp0 pp0", '"engine-prefill"', prefill.agent.bootstrap_address, "requesting", " ms]"):
        assert part in reason


def test_offer_that_nobody_loads(transfer_id: str) -> None:
    prefill = Side("prefill", lease_s=0.5).register()
    prefill.agent.offer([kvconn.Offer(transfer_id, [[1]])])
    done = prefill.finished(transfer_id)
    assert done.code == kvconn.Status.EXPIRED and "lease" in done.reason
    prefill.agent.close()


def test_closed_prefill_ends_loads(decode: Side, transfer_id: str) -> None:
    prefill = Side("prefill").register()
    decode.agent.start_load([kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1]])])
    prefill.until("offers_under_way", 1)  # the load has arrived
    prefill.agent.announce([transfer_id])
    prefill.agent.close()
    done = decode.finished(transfer_id)
    assert done.code in (kvconn.Status.AGENT_CLOSED, kvconn.Status.PEER_LOST), done


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://", "ftp://x", "127.0.0.1:8998", "http://[::1"])
def test_unreachable_bootstrap(decode: Side, transfer_id: str, address: str) -> None:
    decode.agent.start_load([kvconn.Load(transfer_id, address, "engine-prefill", [[1]])])
    done = decode.finished(transfer_id)
    assert done.code == kvconn.Status.UNREACHABLE and address in done.reason


def test_unknown_engine(prefill: Side, decode: Side, transfer_id: str) -> None:
    decode.agent.start_load([kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "somebody-else", [[1]])])
    done = decode.finished(transfer_id)
    assert done.code == kvconn.Status.UNREACHABLE and "somebody-else" in done.reason


def test_layouts_that_differ_name_both_values(prefill: Side, transfer_id: str) -> None:
    other = kvconn.Agent({"engine_id": "d", "role": "decode"})
    cache = np.zeros((LAYERS, BLOCKS, BLOCK // 2), np.uint8)
    other.register_kv_caches([r for i in range(LAYERS) for r in kvconn.regions_from_tensor(f"layer.{i}", cache[i], 0)])
    other.start_load([kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1]])])
    other.wait(30)
    (done,) = other.get_finished()
    assert done.code == kvconn.Status.REFUSED and str(BLOCK) in done.reason and str(BLOCK // 2) in done.reason
    other.close()


def test_models_that_differ_are_refused(prefill: Side, transfer_id: str) -> None:
    one = Side("prefill", model="llama", engine_id="m").register()
    two = Side("decode", model="qwen").register()
    two.agent.start_load([kvconn.Load(transfer_id, one.agent.bootstrap_address, "m", [[1]])])
    done = two.finished(transfer_id)
    assert done.code == kvconn.Status.REFUSED and "llama" in done.reason and "qwen" in done.reason
    one.agent.close()
    two.agent.close()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "engine_id"),
        ({"engine_id": "e"}, "role"),
        ({"engine_id": "e", "role": "chef"}, "chef"),
        ({"engine_id": 5, "role": "decode"}, "engine_id"),
        ({"engine_id": "e", "role": "decode", "leas_s": 3}, "leas_s"),
        ({"engine_id": "e", "role": "decode", "lease_s": -3}, "lease_s"),
        ({"engine_id": "e", "role": "decode", "lease_s": "long"}, "lease_s"),
        ({"engine_id": "e", "role": "decode", "transport": "pigeon"}, "pigeon"),
        ({"engine_id": "e", "role": "decode", "max_transfers": 0}, "max_transfers"),
        ({"engine_id": "e", "role": "prefill", "bootstrap_port": 70000}, "70000"),
        ({"engine_id": "e", "role": "decode", "nats_url": "http://x"}, "nats_url"),
        ({"engine_id": "e", "role": "decode", "model": object()}, "JSON"),
    ],
)
def test_bad_config_names_the_key(config: dict, says: str) -> None:
    with pytest.raises(kvconn.ConfigError, match=says) as e:
        kvconn.Agent(config)
    assert e.value.code == kvconn.Status.INVALID


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
        with pytest.raises(kvconn.AddressError, match=str(port)):
            kvconn.Agent({"engine_id": "e", "role": "prefill", "bootstrap_host": "127.0.0.1", "bootstrap_port": port})


def region(**change: object) -> kvconn.Region:
    return kvconn.Region("r", 1 << 20, 4096, 4096, 8)._replace(**change)


@pytest.mark.parametrize(
    ("regions", "says"),
    [
        ([], "no regions"),
        ([region(address=0)], "null"),
        ([region(address=(1 << 20) + 2)], "unaligned"),
        ([region(block_bytes=8192)], "stride"),
        ([region(), region()], "twice"),
        ([region(), region(name="s", address=(1 << 20) + 4096)], "overlaps"),
        ([region(group=1)], "group 0"),
        ([region(name="")], "name"),
        ([region(num_blocks=0)], "0"),
        ([region(address=-1)], "address"),
        ([region(address=(1 << 64) - 4096)], "address space"),
    ],
)
def test_bad_regions(regions: list[kvconn.Region], says: str) -> None:
    with kvconn.Agent({"engine_id": "e", "role": "decode"}) as agent, pytest.raises(kvconn.InvalidError, match=says):
        agent.register_kv_caches(regions)


@pytest.mark.parametrize(
    ("load", "error", "says"),
    [
        (kvconn.Load("", "http://x:1", "e", [[1]]), kvconn.InvalidError, "transfer_id"),
        (kvconn.Load("a\0b", "http://x:1", "e", [[1]]), kvconn.InvalidError, "NUL"),
        (kvconn.Load("a\ud800", "http://x:1", "e", [[1]]), kvconn.InvalidError, "surrogates"),
        (kvconn.Load("t" * 200, "http://x:1", "e", [[1]]), kvconn.InvalidError, "128"),
        (kvconn.Load("t", "", "", [[1]]), kvconn.InvalidError, "bootstrap"),
        (kvconn.Load("t", "http://x:1", "e", [[BLOCKS]]), kvconn.InvalidError, f"block id {BLOCKS}"),
        (kvconn.Load("t", "http://x:1", "e", [[1, 1]]), kvconn.InvalidError, "twice"),
        (kvconn.Load("t", "http://x:1", "e", [[-1]]), kvconn.InvalidError, "block ids"),
        (kvconn.Load("t", "http://x:1", "e", [[1], [1]]), kvconn.InvalidError, "groups"),
        (kvconn.Load("t", "http://x:1", "e", [[1]], [1, 2]), kvconn.InvalidError, "first_block"),
        (kvconn.Load(7, "http://x:1", "e", [[1]]), kvconn.InvalidError, "transfer_id"),  # type: ignore[arg-type]
        (kvconn.Load("t", "http://x:1", "e", [[1]], [-1]), kvconn.InvalidError, "first_block.*0 to 4294967295"),
        (kvconn.Load("t", "http://x:1", "e", [[1]], token=2**64), kvconn.InvalidError, "token.*0 to 18446744073709551615"),
        (kvconn.Load("t", "http://x:1", "e", [[1]], token=-1), kvconn.InvalidError, "token"),
        (kvconn.Load("t", "http://x:1", "e", [[1]], tokens=[2**32]), kvconn.InvalidError, "tokens.*0 to 4294967295"),
        (kvconn.Load("t", "http://x:1", "e", [[1]], tokens=[1, 2]), kvconn.InvalidError, "tokens has 2 groups"),
    ],
)
def test_bad_loads(decode: Side, load: kvconn.Load, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        decode.agent.start_load([load])
    assert decode.agent.stats()["outstanding"] == 0


def test_same_transfer_twice(prefill: Side, decode: Side, transfer_id: str) -> None:
    prefill.agent.announce([transfer_id])
    load = kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1]])
    decode.agent.start_load([load])
    with pytest.raises(kvconn.DuplicateError, match=transfer_id) as e:
        decode.agent.start_load([load])
    assert e.value.transfer_id == transfer_id
    prefill.agent.offer([kvconn.Offer(transfer_id, [[1]])])
    assert decode.finished(transfer_id).ok


def test_second_decoder_is_refused(prefill: Side, decode: Side, transfer_id: str) -> None:
    other = Side("decode", engine_id="other").register()
    load = kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1]])
    decode.agent.start_load([load])
    prefill.until("offers_under_way", 1)
    other.agent.start_load([load._replace(block_ids=[[2]])])
    done = other.finished(transfer_id)
    assert done.code == kvconn.Status.REFUSED and "already" in done.reason
    prefill.agent.offer([kvconn.Offer(transfer_id, [[1]])])
    assert decode.finished(transfer_id).ok and prefill.finished(transfer_id).ok
    other.agent.close()


def test_overload_is_refused_and_passes() -> None:
    prefill = Side("prefill", max_transfers=4).register()
    offers = [kvconn.Offer(f"o{i}", [[1]]) for i in range(6)]
    with pytest.raises(kvconn.OverloadError, match="max_transfers") as e:
        prefill.agent.offer(offers)
    assert e.value.transfer_id == "o4"
    prefill.agent.cancel([o.transfer_id for o in offers[:4]])
    for o in offers[:4]:
        assert prefill.finished(o.transfer_id).code == kvconn.Status.CANCELLED
    prefill.agent.offer([kvconn.Offer("later", [[1]])])
    prefill.agent.close()


def test_transfers_before_registration() -> None:
    with kvconn.Agent({"engine_id": "e", "role": "decode"}) as agent, pytest.raises(kvconn.NotRegisteredError):
        agent.start_load([kvconn.Load("t", "http://x:1", "e", [[1]])])


def test_closed_agent(decode: Side) -> None:
    agent = decode.agent
    agent.close()
    agent.close()
    for call in (
        agent.get_finished,
        agent.stats,
        agent.fileno,
        lambda: agent.wait(0),
        lambda: agent.cancel(["x"]),
        lambda: agent.announce(["x"]),
        lambda: agent.register_kv_caches([]),
    ):
        with pytest.raises(kvconn.ClosedError):
            call()
    assert "closed" in repr(agent)


def test_close_with_transfers_under_way(prefill: Side) -> None:
    decode = Side("decode").register()
    load = kvconn.Load("under-way", prefill.agent.bootstrap_address, "engine-prefill", [[1]])
    decode.agent.start_load([load, load._replace(transfer_id="early", block_ids=[[2]])])
    prefill.until("offers_under_way", 2)
    prefill.agent.announce(["under-way"])
    begin = time.monotonic()
    decode.agent.close()
    assert time.monotonic() - begin < 20
    # The prefill engine is told: its blocks come back without waiting for the lease.
    prefill.agent.offer([kvconn.Offer("under-way", [[1]])])
    assert not prefill.finished("under-way").ok


def test_event_fd(prefill: Side, decode: Side, transfer_id: str) -> None:
    assert select.select([decode.agent], [], [], 0) == ([], [], [])
    assert decode.agent.wait(0) is False
    prefill.agent.offer([kvconn.Offer(transfer_id, [[1]])])
    decode.agent.start_load([kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1]])])
    assert select.select([decode.agent], [], [], 30)[0] == [decode.agent]
    assert decode.agent.wait(0) is True
    assert len(decode.agent.get_finished()) == 1
    assert select.select([decode.agent], [], [], 0)[0] == []


def test_all_that_wait_come_with_one_call(prefill: Side, decode: Side) -> None:
    ids = [f"many-{n}" for n in range(200)]  # the ring in C memory grows twice for so many
    decode.agent.start_load([kvconn.Load(i, prefill.agent.bootstrap_address, "engine-prefill", [[1]]) for i in ids])
    decode.agent.cancel(ids, "not wanted")
    decode.until("loads_under_way", 0)
    done = decode.agent.get_finished()
    assert sorted(d.transfer_id for d in done) == sorted(ids) and not any(d.ok for d in done)
    assert not decode.agent.get_finished() and select.select([decode.agent], [], [], 0)[0] == []


def test_logs_arrive_in_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "kvconn"):
        agent = kvconn.Agent({"engine_id": "talkative", "role": "decode"})
        agent.close()
        deadline = time.monotonic() + 30
        while not any("talkative" in r.getMessage() for r in caplog.records) and time.monotonic() < deadline:
            threading.Event().wait(0.01)
    assert any(r.name.startswith("kvconn") and "talkative" in r.getMessage() for r in caplog.records)


def test_threads_share_an_agent(prefill: Side, decode: Side) -> None:
    address = prefill.agent.bootstrap_address

    def work(n: int) -> None:
        for i in range(25):
            t = f"thread-{n}-{i}"
            decode.agent.start_load([kvconn.Load(t, address, "engine-prefill", [[n]])])
            prefill.agent.offer([kvconn.Offer(t, [[n]])])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    seen: list[str] = []
    deadline = time.monotonic() + 60
    while len(seen) < 100 and time.monotonic() < deadline:
        for done in decode.agent.get_finished():
            assert done.ok, done
            seen.append(done.transfer_id)
        decode.agent.wait(0.1)
    for t in threads:
        t.join()
    assert len(seen) == len(set(seen)) == 100


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **env})


def test_forked_child_gets_an_error() -> None:
    r = run(
        """
import os, signal, kvconn
a = kvconn.Agent({"engine_id": "e", "role": "decode"})
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    errors = 0
    for call in (a.get_finished, a.stats, lambda: kvconn.Agent({"engine_id": "e", "role": "decode"})):
        try:
            call()
        except kvconn.ForkedError:
            errors += 1
    os._exit(0 if errors == 3 else 1)
assert os.waitpid(pid, 0)[1] == 0
a.close()
"""
    )
    assert r.returncode == 0, r.stderr


def test_fork_before_first_use_is_fine() -> None:
    r = run(
        """
import os, signal, kvconn
pid = os.fork()
signal.alarm(60)
kvconn.Agent({"engine_id": "e", "role": "decode"}).close()
if pid == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""
    )
    assert r.returncode == 0, r.stderr


def test_import_loads_no_library() -> None:
    r = run(
        """
import sys, kvconn
assert "ctypes" not in sys.modules and "libkvconn" not in open("/proc/self/maps").read()
from kvconn import Agent
assert "libkvconn" not in open("/proc/self/maps").read()
Agent({"engine_id": "e", "role": "decode"}).close()
assert "libkvconn" in open("/proc/self/maps").read()
"""
    )
    assert r.returncode == 0, r.stderr


def test_missing_library_says_what_to_do() -> None:
    r = run("import kvconn; kvconn.Agent({})", KVCONN_LIBRARY="/nowhere/libkvconn.so")
    assert r.returncode != 0 and "KVCONN_LIBRARY" in r.stderr


def test_host_keeps_its_signals_and_output() -> None:
    r = run(
        """
import signal, kvconn
before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
a = kvconn.Agent({"engine_id": "e", "role": "both", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0})
assert before == {s: signal.getsignal(s) for s in before}
caught = []
signal.signal(signal.SIGINT, lambda *_: caught.append(1))
signal.raise_signal(signal.SIGINT)
assert caught == [1]
a.close()
"""
    )
    assert (r.returncode, r.stdout, r.stderr) == (0, "", "")


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    r = run(
        """
import os, tempfile, kvconn
def once():
    a = kvconn.Agent({"engine_id": "e", "role": "both", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0})
    a.close()
once()
fds = len(os.listdir("/proc/self/fd"))
for _ in range(5):
    once()
assert len(os.listdir("/proc/self/fd")) <= fds, (fds, os.listdir("/proc/self/fd"))
left = [f for f in os.listdir(tempfile.gettempdir()) if f.startswith("kvconn")]
assert not left, left
""",
        TMPDIR=str(tmp_path),
    )
    assert r.returncode == 0, r.stderr


def test_host_process_stays_small() -> None:
    r = run(
        """
import json, os, kvconn
def rss():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) / 1024
from kvconn import agent, errors, logs, types, _lib
before, threads = rss(), len(os.listdir("/proc/self/task"))
a = kvconn.Agent({"engine_id": "e", "role": "both", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0})
a.register_kv_caches([kvconn.Region("r", 1 << 20, 4096, 4096, 8)])
print(json.dumps({"mb": rss() - before, "threads": len(os.listdir("/proc/self/task")) - threads}))
a.close()
"""
    )
    used = json.loads(r.stdout)
    assert used["mb"] <= 40 and used["threads"] <= 12, used


def test_command_line() -> None:
    command = [sys.executable, "-m", "kvconn"]
    r = subprocess.run([*command, "demo"], capture_output=True, text=True, timeout=120)
    assert r.returncode == 0 and r.stdout.count("verified") == 5, r.stdout + r.stderr
    r = subprocess.run(
        [*command, "bench", "--block", "16K", "--total", "8M", "--rounds", "2", "--iperf3=false", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    (row,) = json.loads(r.stdout)["results"]
    assert row["block_bytes"] == 16384 and row["total_bytes"] == 8 << 20 and row["median_gb_per_s"] > 0
    assert set(row) >= {"transport", "best_gb_per_s", "iperf3_gb_per_s"}
    for args, says in (([], "Usage"), (["cook"], "cook"), (["bench", "--block", "3"], "block"), (["proxy"], "--prefill")):
        r = subprocess.run([*command, *args], capture_output=True, text=True, timeout=60)
        assert r.returncode == 2 or (args == ["proxy"] and r.returncode != 0), (args, r)
        assert says in r.stderr, (args, r.stderr)
