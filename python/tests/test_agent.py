"""The typed API on the installed wheel: transfers, completions and their ends."""

from __future__ import annotations

import logging
import select
import threading
import time
from array import array
from contextlib import closing

import numpy as np
import pytest
from side import BLOCK, BLOCKS, LAYERS, Side

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
    assert done.ok and done.transport == "local" and done.bytes == LAYERS * 3 * BLOCK and done.segments > 0
    assert done.wait_s >= 0 and done.transfer_s > 0
    sent = prefill.finished(transfer_id)
    assert (sent.kind, sent.code, sent.token, sent.bytes) == ("offer", 0, 5, done.bytes)
    assert np.array_equal(decode.cache[:, [1, 0, 7]], data)
    others = [b for b in range(BLOCKS) if b not in (1, 0, 7)]
    assert not decode.cache[:, others].any()
    assert not decode.agent.get_finished() and not prefill.agent.get_finished()


@pytest.mark.parametrize(
    ("prefills", "decodes", "by"),
    [("tcp", "auto", "tcp"), ("auto", "tcp", "tcp"), ("local", "auto", "local"), ("tcp,local", "tcp,local", "tcp")],
)
def test_transports_that_are_named(transfer_id: str, prefills: str, decodes: str, by: str) -> None:
    with (
        closing(Side("prefill", transport=prefills).register().agent) as p,
        closing(Side("decode", transport=decodes).register().agent) as d,
    ):
        p.offer([kvconn.Offer(transfer_id, [[3]])])
        d.start_load([kvconn.Load(transfer_id, p.bootstrap_address, "engine-prefill", [[1]])])
        done: list[kvconn.Completion] = []
        while not done:
            assert d.wait(30), d.stats()
            done = d.get_finished()
        stats = d.stats()
        assert done[0].ok and done[0].transport == by and stats["transports"][by]["loads"] == 1, (done, stats)
        assert [pair["transport"] for pair in stats["pairs"]] == [by], stats


def arrives(side: Side, layer: int, block: int, data: np.ndarray) -> None:
    deadline = time.monotonic() + 30
    while not np.array_equal(side.cache[layer, block], data):
        assert time.monotonic() < deadline, f"layer {layer} of block {block} has not come"
        time.sleep(0.001)


def test_a_partial_offer_moves_at_once(prefill: Side, decode: Side, transfer_id: str) -> None:
    data = random_blocks(prefill, [3, 9, 4])
    decode.agent.start_load([kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1, 0, 7]])])
    prefill.agent.offer_partial([kvconn.PartialOffer(transfer_id, [[3, 9]], [1])])
    for layer in range(LAYERS):
        arrives(decode, layer, 1, data[layer, 0])
    assert not decode.cache[:, 0].any()
    regions = [n for n in range(LAYERS) if n != 1]
    prefill.agent.offer_partial([kvconn.PartialOffer(transfer_id, [[]], [2])], regions)
    for layer in regions:
        arrives(decode, layer, 0, data[layer, 1])
    assert not decode.cache[1, 0].any() and not decode.agent.get_finished()
    # The request was preempted: it has other blocks with other data, and all of it comes.
    prefill.agent.withdraw([transfer_id])
    prefill.cache[:, [3, 9, 4]] = 0
    prefill.cache[:, [10, 11, 12]] = data
    prefill.agent.offer_partial([kvconn.PartialOffer(transfer_id, [[10, 11]], [2])])
    prefill.agent.offer([kvconn.Offer(transfer_id, [[10, 11, 12]], token=3)])
    assert decode.finished(transfer_id).ok
    sent = prefill.finished(transfer_id)
    assert sent.ok and (sent.token, sent.transport) == (3, "local")
    assert np.array_equal(decode.cache[:, [1, 0, 7]], data)


def test_layers_of_a_step_move_as_they_are_written(prefill: Side, decode: Side, transfer_id: str) -> None:
    data = random_blocks(prefill, [3, 9])
    decode.agent.start_load([kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1, 0]])])
    prefill.agent.written[0] = 1  # of no step: it says nothing
    for n, block in enumerate([3, 9]):
        prefill.agent.offer_partial([kvconn.PartialOffer(transfer_id, [[block]], [n], computing=[n + 1])])
        for layer in reversed(range(1, LAYERS)):  # in any order
            prefill.agent.written[layer] = 1
            arrives(decode, layer, 1 - n, data[layer, n])
        assert not decode.cache[0, 1 - n].any()
    prefill.agent.offer_partial([kvconn.PartialOffer(transfer_id, [[]], [2])])
    arrives(decode, 0, 0, data[0, 1])
    prefill.agent.offer([kvconn.Offer(transfer_id, [[3, 9]])])
    assert decode.finished(transfer_id).ok and prefill.finished(transfer_id).ok


def test_long_prompt_of_blocks_of_one_token() -> None:
    """Blocks in random order, and as many as a transfer may have."""
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


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_another_prompt(prefill: Side, decode: Side, transfer_id: str, first: str, partial: bool) -> None:
    """A router has sent prefill and decode two requests by one id, with as many blocks."""
    random_blocks(prefill, [3, 9])
    ours, theirs = kvconn.fingerprint([1, 2, 3]), kvconn.fingerprint([1, 2, 4])
    load = kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1, 0]], prompt=theirs)

    def prefills() -> None:
        if partial:
            prefill.agent.offer_partial([kvconn.PartialOffer(transfer_id, [[3]], [1], prompt=ours)])
            with pytest.raises(kvconn.InvalidError, match=f"{theirs:016x}"):
                prefill.agent.offer_partial([kvconn.PartialOffer(transfer_id, [[9]], [2], prompt=theirs)])
        prefill.agent.offer([kvconn.Offer(transfer_id, [[3, 9]], prompt=0 if partial else ours)])

    if first == "prefill":
        prefills()
    decode.agent.start_load([load])
    if first == "decode":
        prefill.until("offers_early", 1)
        if partial:
            prefill.agent.offer_partial([kvconn.PartialOffer(transfer_id, [[3]], [1], prompt=ours)])
        prefill.agent.offer([kvconn.Offer(transfer_id, [[3, 9]], prompt=ours)])
    for side in (decode, prefill):
        done = side.finished(transfer_id)
        assert done.code == kvconn.Status.REFUSED
        assert transfer_id in done.reason and f"{theirs:016x} and {ours:016x}" in done.reason
    assert not decode.cache.any()


def test_the_same_prompt(prefill: Side, decode: Side, transfer_id: str) -> None:
    data, prompt = random_blocks(prefill, [3, 9]), kvconn.fingerprint(range(32))
    prefill.agent.offer_partial([kvconn.PartialOffer(transfer_id, [[3]], [1], prompt=prompt)])
    decode.agent.start_load([kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1, 0]], prompt=prompt)])
    prefill.agent.offer([kvconn.Offer(transfer_id, [[3, 9]], prompt=prompt)])
    assert decode.finished(transfer_id).ok and prefill.finished(transfer_id).ok
    assert np.array_equal(decode.cache[:, [1, 0]], data)


def test_fingerprint() -> None:
    """A prompt has one fingerprint, on all machines and in all releases."""
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
    # It renews each three seconds, and has nine more for that. What ends the wait is the end of an offer that nobody renews.
    prefill, decode = Side("prefill", lease_s=12).register(), Side("decode", peer_timeout_s=9).register()
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
