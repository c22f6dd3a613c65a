"""The SGLang backend without SGLang: a request's way through the rooms."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from sglang_rank import HEADS, ITEM, LAYERS, PAGES, TOKENS, both, empty, fill

import kvconn
from kvconn._engine import Rank as RankOf
from kvconn.sglang.layout import ids
from kvconn.sglang.parallel import Parallel
from kvconn.sglang.partial import Chunks
from kvconn.sglang.rooms import BOOTSTRAPPING, FAILED, SUCCESS, TRANSFERRING, WAITING, NoAgent, Rooms


def test_request_from_the_first_word_to_the_last(ranks: Any) -> None:
    p, d = ranks("prefill", states={"swa": 32}), ranks("decode", states={"swa": 32})
    fill(p)
    at_p, at_d = both(p, d, 7)
    p.rooms.tick()
    assert at_p.state == BOOTSTRAPPING, "a claim is no room for the pages"
    # Decode has the first two pages already, and with them a part of what prefill sends of the window.
    d.load(at_d, p.address, np.array([9, 3, 4], np.int32), 5, [np.array([6, 7])], prefix=2)
    assert at_d.state == TRANSFERRING
    p.until(at_p, WAITING)
    assert at_p.prefix_pages == 2
    p.offer(at_p, [11, 12, 20], 1, [[1, 2, 3]])
    d.until(at_d, SUCCESS)
    p.until(at_p, SUCCESS)
    assert (d.kv[:, [9, 3, 4]] == p.kv[:, [11, 12, 20]]).all()
    assert all((mine[5] == theirs[1]).all() for mine, theirs in zip(d.rows, p.rows))
    assert (d.states["swa"][:, [6, 7]] == p.states["swa"][:, [2, 3]]).all()
    assert not d.kv[:, [0, 1, 2, 5]].any(), "nothing else was written"
    assert at_d.completion.bytes == 3 * p.layout.page_bytes + 64 + 128 + 2 * 2 * 24
    for side, room in ((p, at_p), (d, at_d)):
        side.rooms.forget(room)
        del room
    del at_p, at_d
    assert (len(p.rooms), len(d.rooms)) == (0, 0)


def test_chunks_move_while_prefill_goes_on(ranks: Any) -> None:
    """Each chunk is on decode before the next is there; the row comes with the last, and the request ends with it."""
    p, d = ranks("prefill", states={"mamba": 8}), ranks("decode", states={"mamba": 8})
    fill(p)
    at_p, at_d = both(p, d, 9)
    d.load(at_d, p.address, [5, 6, 7, 8], 3, [[1]], prefix=1)
    p.until(at_p, WAITING)
    chunks = Chunks(p.layout, 4, at_p.prefix_pages)
    for pages, theirs in (([20], [5]), ([10, 11], [6, 7])):
        pages = ids(pages, "pages")
        assert not chunks.add(pages)
        p.rooms.offer_partial(at_p, *chunks.partial_offer(pages))
        deadline = time.monotonic() + 30
        while not (d.kv[:, theirs] == p.kv[:, pages]).all():
            assert time.monotonic() < deadline, (p.agent.stats(), d.agent.stats())
            d.rooms.tick()
            p.rooms.tick()
        assert (at_d.state, at_p.state) == (TRANSFERRING, WAITING)
    assert not d.rows[0].any() and not d.kv[:, 8].any()
    assert chunks.add(ids([12], "pages"))
    p.rooms.offer(at_p, *chunks.offer([[2]], 4))
    d.until(at_d, SUCCESS)
    p.until(at_p, SUCCESS)
    assert (d.kv[:, 8] == p.kv[:, 12]).all() and (d.rows[1][3] == p.rows[1][4]).all()
    assert (d.states["mamba"][:, 1] == p.states["mamba"][:, 2]).all()
    with pytest.raises(ValueError, match="has sent 5 pages, but announced 4"):
        chunks.add(ids([13], "pages"))


def test_everything_is_on_decode_but_the_first_token(ranks: Any) -> None:
    p, d = ranks("prefill"), ranks("decode")
    fill(p)
    at_p, at_d = both(p, d, 8)
    d.load(at_d, p.address, [], 3, prefix=4)
    p.until(at_p, WAITING)
    assert at_p.prefix_pages == 4
    p.offer(at_p, [], 2)
    d.until(at_d, SUCCESS)
    p.until(at_p, SUCCESS)
    assert (d.rows[0][3] == p.rows[0][2]).all() and not d.kv.any()


@pytest.mark.parametrize(("prefill", "decode", "mla"), [(2, 1, False), (1, 2, False), (4, 2, False), (2, 1, True), (1, 2, True)])
def test_unequal_ranks(ranks: Any, prefill: int, decode: int, mla: bool) -> None:
    """Heads are cut and gathered; a latent, which all ranks have, is read from one of them."""
    host = kvconn.Agent({"role": "bootstrap", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0})
    try:
        ps = [ranks("prefill", tp=(rank, prefill), mla=mla, bootstrap_join=host.bootstrap_address) for rank in range(prefill)]
        ds = [ranks("decode", tp=(rank, decode), mla=mla) for rank in range(decode)]
        heads = 1 if mla else HEADS
        model = np.random.default_rng(3).integers(1, 255, (ps[0].kv.shape[0], PAGES, TOKENS, heads, ITEM), np.uint8)
        for rank, p in enumerate(ps):
            p.kv[:] = model if mla else model[:, :, :, rank * heads // prefill : (rank + 1) * heads // prefill]
            for row in p.rows:
                row[:] = 77  # all ranks have sampled the same token
        at_p = [p.rooms.open(5) for p in ps]
        for p, room in zip(ps, at_p):
            p.rooms.announce(room)
        at_d = [d.rooms.open(5) for d in ds]
        for d, room in zip(ds, at_d):
            d.rooms.claim(room, host.bootstrap_address, "sglang-prefill")
            d.load(room, host.bootstrap_address, [4, 5, 9], 1)
        for p, room in zip(ps, at_p):
            p.until(room, WAITING, SUCCESS)
            p.offer(room, [1, 2, 3], 6)
        for rank, (d, room) in enumerate(zip(ds, at_d)):
            d.until(room, SUCCESS)
            expected = model if mla else model[:, :, :, rank * heads // decode : (rank + 1) * heads // decode]
            assert (d.kv[:, [4, 5, 9]] == expected[:, [1, 2, 3]]).all()
            assert (d.rows[1][1] == 77).all()
        for p, room in zip(ps, at_p):
            p.until(room, SUCCESS)
    finally:
        host.close()


def test_layers_of_pipeline_stages(ranks: Any) -> None:
    """Each stage of the prefill engine has some layers, decode all of them."""
    host = kvconn.Agent({"role": "bootstrap", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0})
    try:
        stages = [range(2), range(2, LAYERS)]
        ps = [
            ranks("prefill", layers=layers, pp_rank=n, pp_size=2, bootstrap_join=host.bootstrap_address) for n, layers in enumerate(stages)
        ]
        d = ranks("decode")
        for seed, p in enumerate(ps):
            fill(p, seed)
        at_p, at_d = [p.rooms.open(6) for p in ps], d.rooms.open(6)
        d.load(at_d, host.bootstrap_address, [4, 5], 1)
        for p, room in zip(ps, at_p):
            p.rooms.announce(room)
            p.until(room, WAITING)
            p.offer(room, [1, 2], 0)
        d.until(at_d, SUCCESS)
        keys_values = d.kv.reshape(2, LAYERS, *d.kv.shape[1:])
        for p, layers in zip(ps, stages):
            theirs = p.kv.reshape(2, len(layers), *p.kv.shape[1:])
            assert (keys_values[:, layers.start : layers.stop, [4, 5]] == theirs[:, :, [1, 2]]).all()
            p.until(p.rooms._owing.get(at_p[ps.index(p)].id, at_p[ps.index(p)]), SUCCESS)
    finally:
        host.close()


def test_room_that_is_used_twice(ranks: Any) -> None:
    p, d = ranks("prefill"), ranks("decode")
    at_p, at_d = both(p, d, 3)
    for side in (p, d):
        twice = side.rooms.open(3)
        assert twice.state == FAILED and "in use" in twice.reason
        side.rooms.abort(twice, "it has failed")  # does not touch the first
        side.rooms.forget(twice)
    d.load(at_d, p.address, [1], 1)
    p.until(at_p, WAITING)
    p.offer(at_p, [1], 1)
    p.until(at_p, SUCCESS)
    d.until(at_d, SUCCESS)
    p.rooms.forget(at_p)
    d.rooms.forget(at_d)
    again = p.rooms.open(3)
    p.rooms.announce(again)
    p.until(again, FAILED)
    assert "offered before" in again.reason
    late = d.rooms.open(3)
    d.load(late, p.address, [1], 1)
    d.until(late, FAILED)
    assert "ended already" in late.reason


def test_requests_that_cross_in_a_room(ranks: Any) -> None:
    """Two requests of one room came in different order: prefill has another request than decode."""
    p, d = ranks("prefill"), ranks("decode")
    fill(p)
    for chunks in (1, 2):
        at_p, at_d = both(p, d, chunks, (7, 8))
        d.load(at_d, p.address, [1, 2], 1)
        p.until(at_p, WAITING)
        if chunks == 2:
            begun = Chunks(p.layout, 2, 0)
            begun.add(ids([4], "pages"))
            p.rooms.offer_partial(at_p, *begun.partial_offer(ids([4], "pages")))
            d.until(at_d, FAILED)
        p.offer(at_p, [4, 5], 1)
        for side, room in ((d, at_d), (p, at_p)):
            side.until(room, FAILED)
            assert "decode asks for another prompt than prefill has" in room.reason
            side.rooms.forget(room)
    assert not d.kv.any() and not any(row.any() for row in d.rows)
    empty(p, d)
    at_p, at_d = both(p, d, 3, (7, 7))
    d.load(at_d, p.address, [1, 2], 1)
    p.until(at_p, WAITING)
    p.offer(at_p, [4, 5], 1)
    d.until(at_d, SUCCESS)
    p.until(at_p, SUCCESS)


@pytest.mark.parametrize("number", [-1, 1 << 63, "7", 1.5, None, True, [7]])
def test_room_that_is_none(ranks: Any, number: Any) -> None:
    rooms = ranks("decode").rooms
    room = rooms.open(number)
    assert room.state == FAILED and repr(number) in room.reason
    assert not rooms.under_way(number)
    rooms.forget(room)


@pytest.mark.parametrize(("pages", "says"), [([-1], "-1"), ([1, PAGES], str(PAGES)), ([1 << 40], str(1 << 40)), ([0.5], "float64")])
def test_pages_that_are_none(ranks: Any, pages: list[Any], says: str) -> None:
    p, d = ranks("prefill"), ranks("decode")
    at_p, at_d = both(p, d, 3)
    for side, act in ((d, lambda: d.load(at_d, p.address, pages, 1)), (p, lambda: p.offer(at_p, pages, 1))):
        room = at_d if side is d else at_p
        try:
            act()
        except ValueError as error:
            side.rooms.abort(room, str(error))
        side.until(room, FAILED)
        assert says in room.reason, room.reason
    empty(p, d)


@pytest.mark.parametrize(
    ("theirs", "says"), [({"layers": range(LAYERS - 1)}, "layer.2.k"), ({"mla": True}, "layer."), ({"states": {"mamba": 8}}, "group")]
)
def test_engines_that_differ(ranks: Any, theirs: dict[str, Any], says: str) -> None:
    p, d = ranks("prefill", **theirs), ranks("decode")
    at_d = d.rooms.open(3)
    d.rooms.claim(at_d, p.address, "sglang-prefill")
    d.load(at_d, p.address, [1], 1)
    d.until(at_d, FAILED)
    assert says in at_d.reason, at_d.reason
    empty(p, d)


def test_rank_without_anything_to_send() -> None:
    rooms = Rooms(NoAgent(), "prefill", 300, 300)
    room = rooms.open(1)
    rooms.announce(room)
    rooms.tick()
    assert room.state == WAITING
    rooms.offer(room, [[1]], [0])
    rooms.tick()
    assert room.state == SUCCESS


def test_rank_that_answers() -> None:
    """One rank answers for each data parallel rank."""

    def answers(tp: int = 0, pp: int = 0, cp: int = 0, dp: int = 0) -> bool:
        return Parallel(RankOf(tp, 2, pp, 2, dp, 2), cp, 2, "127.0.0.1", 8998, None, None, "").answers

    assert answers() and answers(dp=1)
    assert not (answers(tp=1) or answers(pp=1) or answers(cp=1) or answers(tp=1, dp=1))
