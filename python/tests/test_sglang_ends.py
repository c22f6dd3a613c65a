"""The SGLang backend without SGLang: requests that are aborted, or lost with the other side."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sglang_rank import PAGES, ROWS, both, empty, fill

import kvconn
from kvconn.sglang.layout import ids
from kvconn.sglang.partial import Chunks
from kvconn.sglang.rooms import BOOTSTRAPPING, FAILED, SUCCESS, TRANSFERRING, WAITING, Holder


def soon(holds: Callable[[], bool], *sides: Any) -> None:
    """Waits for something of which Python sees no event."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, [side.agent.stats() for side in sides]
        time.sleep(0.001)


@pytest.mark.parametrize("by", ["prefill", "decode"])
def test_abort_between_chunks(ranks: Any, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = ranks("prefill"), ranks("decode")
    withdrawn: list[Any] = []
    withdraw = p.agent.withdraw
    monkeypatch.setattr(p.agent, "withdraw", lambda ids, bound: (withdraw(ids, bound), withdrawn.extend(ids)))
    fill(p)
    at_p, at_d = both(p, d, 9)
    d.load(at_d, p.address, [5, 6], 3)
    p.until(at_p, WAITING)
    chunks = Chunks(p.layout, 2, 0)
    chunks.add(ids([1], "pages"))
    p.rooms.offer_partial(at_p, *chunks.partial_offer(ids([1], "pages")))
    if by == "prefill":
        p.rooms.abort(at_p, "the client went")
        assert at_p.state == FAILED and withdrawn == [at_p.id], "its pages are used again at once"
        d.until(at_d, FAILED)
        assert "the client went" in at_d.reason
    else:
        finished, ends = p.rooms._get_finished, list[Any]()
        monkeypatch.setattr(p.rooms, "_get_finished", lambda: (done := finished(), ends.extend(done))[0])
        soon(lambda: np.array_equal(d.kv[:, 5], p.kv[:, 1]), p, d)  # the first chunk is there
        d.rooms.abort(at_d, "the client went")
        d.until(at_d, FAILED)
        soon(lambda: p.agent.stats()["offers_under_way"] == 0, p, d)  # prefill has heard it; SGLang hears it with the next chunk
        chunks.add(ids([2], "pages"))
        p.rooms.offer(at_p, *chunks.offer(None, 1))
        p.until(at_p, FAILED)
        # Prefill may hear first, by the way of the bytes, that decode does not expect the transfer. It waits for the reason.
        assert [one.code for one in ends] == [kvconn.Status.PEER_CANCELLED]
        assert "the client went" in at_p.reason
        assert not d.kv[:, 6].any(), "a chunk went to a request that had ended"
    p.rooms.forget(at_p)
    d.rooms.forget(at_d)
    empty(p, d)


def test_pages_that_are_still_read_end_the_engine(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would write into these pages, and decode would have the wrong bytes."""
    p, d = ranks("prefill"), ranks("decode")
    at_p, at_d = both(p, d, 9)
    d.load(at_d, p.address, [5, 6], 3)
    p.until(at_p, WAITING)
    chunks = Chunks(p.layout, 2, 0)
    chunks.add(ids([1], "pages"))
    p.rooms.offer_partial(at_p, *chunks.partial_offer(ids([1], "pages")))

    def withdraw(_ids: Any, _timeout_s: float) -> None:
        raise kvconn.KvconnError("still read", code=kvconn.Status.SYSTEM)

    monkeypatch.setattr(p.agent, "withdraw", withdraw)
    with pytest.raises(SystemExit, match="still read"):
        p.rooms.abort(at_p, "the client went")
    d.until(at_d, FAILED)


def test_one_of_several_ranks_ends_a_request_that_waits(ranks: Any) -> None:
    """The end is told once; the other ranks of the prefill engine hear of it."""
    host = kvconn.Agent({"role": "bootstrap", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0})
    try:
        ps = [ranks("prefill", tp=(rank, 2), bootstrap_join=host.bootstrap_address) for rank in range(2)]
        d = ranks("decode")
        at_p, at_d = [p.rooms.open(5) for p in ps], d.rooms.open(5)
        for p, room in zip(ps, at_p):
            p.rooms.announce(room)
        d.rooms.claim(at_d, host.bootstrap_address, "sglang-prefill")
        ps[1].rooms.abort(at_p[1], "no memory")
        d.until(at_d, FAILED)
        assert "no memory" in at_d.reason
        ps[0].until(at_p[0], FAILED)
        assert "no memory" in at_p[0].reason
        d.rooms.tick()
        assert (d.rooms.failed, d.agent.stats()["claims_lost"]) == (1, 1)
        empty(d, *ps)
    finally:
        host.close()


@pytest.mark.parametrize("by", ["prefill", "decode"])
@pytest.mark.parametrize("when", ["opened", "claimed", "asked", "wanted", "offered"])
def test_abort_in_each_state(ranks: Any, by: str, when: str) -> None:
    p, d = ranks("prefill"), ranks("decode")
    at_p, at_d = p.rooms.open(1), d.rooms.open(1)
    if when != "opened":
        p.rooms.announce(at_p)
        d.rooms.claim(at_d, p.address, "sglang-prefill")
    if when in ("asked", "wanted", "offered"):
        d.load(at_d, p.address, [1, 2], 1)
    if when in ("wanted", "offered"):
        p.until(at_p, WAITING)
    if when == "offered":
        p.offer(at_p, [1, 2], 1)
    side, room = (p, at_p) if by == "prefill" else (d, at_d)
    side.rooms.abort(room, "the client went")
    side.until(room, FAILED, *([SUCCESS] if when == "offered" else []))
    if room.state == FAILED:
        assert "the client went" in room.reason and f"{by}, room 1" in room.reason
    other_side, other = (d, at_d) if by == "prefill" else (p, at_p)
    if when in ("asked", "wanted", "offered"):
        if when in ("asked", "wanted") and by == "decode":
            p.until(at_p, FAILED, WAITING)
            if at_p.state == WAITING:  # decode's load came first, so that prefill is under way
                p.offer(at_p, [1, 2], 1)
        other_side.until(other, FAILED, *([SUCCESS] if when == "offered" else []))
        # If a write is under way, prefill may hear of the end by its connection first.
        reasons = ["the client went", *(["does not expect"] if when == "offered" and by == "decode" else [])]
        assert other.state == SUCCESS or any(reason in other.reason for reason in reasons), other.reason
    for each_side, each in ((p, at_p), (d, at_d)):
        each_side.rooms.forget(each)
    empty(p, d)


def test_storm_of_aborts_leaves_nothing(ranks: Any) -> None:
    p, d = ranks("prefill"), ranks("decode")
    chosen = np.random.default_rng(4)
    for number in range(500):
        at_p, at_d = p.rooms.open(number), d.rooms.open(number)
        step = chosen.integers(0, 5)
        if step > 0:
            p.rooms.announce(at_p)
        if step > 1:
            d.rooms.claim(at_d, p.address, "sglang-prefill")
        if step > 2:
            d.load(at_d, p.address, [number % PAGES], number % ROWS)
        if step > 3:
            p.offer(at_p, [number % PAGES], number % ROWS)
        p.rooms.tick()
        d.rooms.tick()
        for side, room in chosen.permutation([(p, at_p), (d, at_d)]).tolist():
            how = chosen.integers(0, 3)
            if how == 0:
                side.rooms.abort(room, "storm")
            elif how == 1:
                side.rooms.forget(room)
            else:  # the scheduler drops it without a word
                Holder().room = room
        del at_p, at_d, side, room
    gc.collect()
    empty(p, d)
    assert (len(p.rooms), len(d.rooms)) == (0, 0)
    at_p, at_d = both(p, d, 1000)
    d.load(at_d, p.address, [1], 1)
    p.until(at_p, WAITING)
    p.offer(at_p, [1], 1)
    d.until(at_d, SUCCESS)


def test_pages_are_held_until_nothing_can_land(ranks: Any) -> None:
    p, d = ranks("prefill"), ranks("decode")
    _, at_d = both(p, d, 3)
    d.load(at_d, p.address, [1, 2], 1)
    assert d.rooms.under_way(3)
    d.rooms.abort(at_d, "aborted")
    assert at_d.state == TRANSFERRING, "it fails when the agent says that the pages are free"
    d.until(at_d, FAILED)
    assert not d.rooms.under_way(3)


def test_prefill_is_gone(ranks: Any) -> None:
    p, d = ranks("prefill"), ranks("decode")
    _, at_d = both(p, d, 3)
    d.load(at_d, p.address, [1, 2], 1)
    p.close()
    d.until(at_d, FAILED)
    assert "decode, room 3: " in at_d.reason, at_d.reason
    late = d.rooms.open(4)
    d.rooms.claim(late, p.address, "sglang-prefill")
    d.load(late, p.address, [1, 2], 1)
    d.until(late, FAILED)
    assert p.address in late.reason, late.reason


@pytest.mark.parametrize("by", ["abort", "close"])
def test_request_that_waits_for_pages_fails_with_its_prefill(ranks: Any, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode has no pages for the request, and hears of its end all the same. Other requests are loaded when there are pages."""
    p, other, d = ranks("prefill"), ranks("prefill"), ranks("decode")
    fill(other)
    waiting = [(p.rooms.open(number), d.rooms.open(number)) for number in range(3)]
    for _, at_d in waiting:
        d.rooms.claim(at_d, p.address, "sglang-prefill")
    deadline = time.monotonic() + 30
    while p.agent.stats()["offers_early"] < 3:  # one that was never found could be waiting for its prefill to come up
        assert time.monotonic() < deadline, p.agent.stats()
    for at_p, _ in waiting:
        p.rooms.announce(at_p)
    at_other, lives = both(other, d, 3)
    with monkeypatch.context() as patch:  # nothing has happened yet, so decode asks nothing
        patch.setattr(d.agent, "_lib", None)
        d.rooms.tick()
    if by == "abort":
        for at_p, _ in waiting:
            p.rooms.abort(at_p, "the client went")
    else:
        p.close()
    for number, (_, at_d) in enumerate(waiting):
        d.until(at_d, FAILED)
        assert at_d.reason.startswith(f"decode, room {number}: "), at_d.reason
        assert "the client went" in at_d.reason or by == "close", at_d.reason
        d.load(at_d, p.address, [1], 1)  # changes nothing
        d.rooms.abort(at_d, "aborted too")
        d.rooms.forget(at_d)
    assert (d.rooms.failed, lives.state, d.agent.stats()["claims_lost"]) == (3, WAITING, 3)
    d.load(lives, other.address, [4], 1)
    other.until(at_other, WAITING)
    other.offer(at_other, [5], 1)
    d.until(lives, SUCCESS)
    assert (d.kv[:, 4] == other.kv[:, 5]).all()
    empty(d, other)


def test_end_of_a_request_that_is_loaded_before_it_is_heard(ranks: Any) -> None:
    p, d = ranks("prefill"), ranks("decode")
    at_p, at_d = both(p, d, 1)
    p.rooms.abort(at_p, "the client went")
    assert d.agent.wait(30), "the claim's end is reported"
    d.load(at_d, p.address, [1], 1)
    assert at_d.state == TRANSFERRING, "its pages are under way until the load is reported"
    d.until(at_d, FAILED)
    assert "the client went" in at_d.reason and d.rooms.failed == 1
    empty(p, d)


def test_end_of_an_earlier_request_in_the_room(ranks: Any) -> None:
    p, other, d = ranks("prefill"), ranks("prefill"), ranks("decode")
    at_p, at_d = both(p, d, 1)
    p.rooms.abort(at_p, "the client went")
    assert d.agent.wait(30), "the claim's end is reported"
    d.rooms.forget(at_d)
    _, again = both(other, d, 1)
    d.rooms.tick()
    assert again.state == WAITING, again.reason
    d.load(again, other.address, [1], 1)
    assert again.state == TRANSFERRING, again.reason


def test_lost_request_that_is_kept_back_gets_no_pages(ranks: Any) -> None:
    """A pipeline's stages give pages to a request that all of them call ready. If one stage failed alone later, they could not agree."""
    p, d = ranks("prefill"), ranks("decode")
    d.rooms.tell_s = 3600
    at_p, at_d = both(p, d, 1)
    assert at_d.told() == WAITING
    p.rooms.abort(at_p, "the client went")
    d.until(at_d, FAILED)
    assert at_d.told() == BOOTSTRAPPING
    at_d.tell_at = 0
    assert at_d.told() == FAILED and "the client went" in at_d.reason
    empty(p, d)


def test_nobody_comes(ranks: Any) -> None:
    p, d = ranks("prefill", timeouts=(0.5, 0.5)), ranks("decode", timeouts=(0.5, 0.5))
    lonely = p.rooms.open(1)
    p.rooms.announce(lonely)
    p.until(lonely, FAILED)
    assert "BOOTSTRAP_TIMEOUT" in lonely.reason
    at_p, at_d = both(p, d, 2)
    d.load(at_d, p.address, [1], 1)
    d.until(at_d, FAILED)
    assert "WAITING_TIMEOUT" in at_d.reason
    p.until(at_p, WAITING, FAILED)
    p.offer(at_p, [1], 1)
    p.until(at_p, FAILED)
    empty(p, d)
