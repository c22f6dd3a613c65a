"""The SGLang backend without SGLang: rooms of real agents over caches of numpy, as the scheduler would drive them."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace
from typing import Any, Iterator

import numpy as np
import pytest

import kvconn
from kvconn._engine import Rank as RankOf
from kvconn.sglang.layout import Heads, Layout, ids, page_names
from kvconn.sglang.parallel import Parallel
from kvconn.sglang.params import agent_config, bootstrap_address, from_environment, server_config
from kvconn.sglang.partial import Chunks
from kvconn.sglang.rooms import BOOTSTRAPPING, FAILED, SUCCESS, TRANSFERRING, WAITING, Holder, NoAgent, Rooms

LAYERS, PAGES, TOKENS, HEADS, ITEM, ROWS = 3, 64, 4, 4, 8, 16


class Rank:
    """One rank of an engine: its pages are LAYERS keys, then LAYERS values, of TOKENS tokens of some heads."""

    def __init__(
        self,
        role: str,
        *,
        tp: tuple[int, int] = (0, 1),
        layers: range = range(LAYERS),
        mla: bool = False,
        tokens: int = TOKENS,
        states: dict[str, int] | None = None,
        timeouts: tuple[float, float] = (300, 300),
        **config: Any,
    ) -> None:
        rank, size = tp
        here = 1 if mla else max(1, HEADS // size)
        buffers = len(layers) * (1 if mla else 2)
        self.kv = np.zeros((buffers, PAGES * TOKENS // tokens, tokens, here, ITEM), np.uint8)
        self.rows = [np.zeros((ROWS, 64), np.uint8), np.zeros((ROWS, 128), np.uint8)]
        self.states = {kind: np.zeros((2, slots, 24), np.uint8) for kind, slots in (states or {}).items()}
        args = SimpleNamespace(
            page_size=tokens,
            prefill_start_layer=layers.start,
            kv_data_ptrs=[one.ctypes.data for one in self.kv],
            kv_data_lens=[one.nbytes for one in self.kv],
            kv_item_lens=[one[0].nbytes for one in self.kv],
            aux_data_ptrs=[one.ctypes.data for one in self.rows],
            aux_data_lens=[one.nbytes for one in self.rows],
            aux_item_lens=[one[0].nbytes for one in self.rows],
            state_types=list(self.states),
            state_data_ptrs=[[layer.ctypes.data for layer in one] for one in self.states.values()],
            state_data_lens=[[layer.nbytes for layer in one] for one in self.states.values()],
            state_item_lens=[[layer[0].nbytes for layer in one] for one in self.states.values()],
        )
        self.layout = Layout(args, Heads(here, HEADS, rank, size), mla)
        base: dict[str, Any] = {"engine_id": f"sglang-{role}", "role": role, "tp_rank": rank, "tp_size": size}
        if role == "prefill":
            base |= {"report_wants": True, "tcp_listen_host": "127.0.0.1"}
            if "bootstrap_join" not in config:
                base |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": 0}
        else:
            base |= {"peer_timeout_s": 1.5, "report_claims": True}
        self.agent = kvconn.Agent({**base, **config})
        self.agent.register_kv_caches(self.layout.regions)
        self.rooms = Rooms(self.agent, role, *timeouts)
        self.address = self.agent.bootstrap_address or ""

    def until(self, room: Any, *states: int) -> Any:
        deadline = time.monotonic() + 30
        while room.state not in states:
            self.rooms.tick()
            assert time.monotonic() < deadline, (room.id, room.state, room.reason, self.agent.stats())
            time.sleep(0.001)
        return room

    def offer(self, room: Any, pages: Any, row: int, states: Any = None) -> None:
        blocks = self.layout.blocks(pages, states, row)
        self.rooms.offer(room, blocks, self.layout.first(blocks, room.prefix_pages))

    def load(self, room: Any, address: str, pages: Any, row: int | None, states: Any = None, prefix: int = 0) -> None:
        blocks = self.layout.blocks(pages, states, row)
        self.rooms.load(room, address, "sglang-prefill", blocks, self.layout.first(blocks, prefix))

    def close(self) -> None:
        self.agent.close()


@pytest.fixture
def ranks() -> Iterator[Any]:
    made: list[Rank] = []

    def make(role: str, **more: Any) -> Rank:
        made.append(Rank(role, **more))
        return made[-1]

    yield make
    for rank in reversed(made):
        rank.close()


def both(p: Rank, d: Rank, number: int, prompts: tuple[int, int] = (0, 0)) -> tuple[Any, Any]:
    """A room on both sides, which decode has claimed."""
    at_p, at_d = p.rooms.open(number, prompts[0]), d.rooms.open(number, prompts[1])
    p.rooms.announce(at_p)
    d.rooms.claim(at_d, p.address, "sglang-prefill")
    assert (at_p.state, at_d.state) == (BOOTSTRAPPING, WAITING), (at_p.reason, at_d.reason)
    return at_p, at_d


def fill(rank: Rank, seed: int = 1) -> None:
    chosen = np.random.default_rng(seed)
    for array in (rank.kv, *rank.rows, *rank.states.values()):
        array[:] = chosen.integers(1, 255, array.shape, np.uint8)


def test_request_from_the_first_word_to_the_last(ranks: Any) -> None:
    p, d = ranks("prefill", states={"swa": 32, "mamba": 8}), ranks("decode", states={"swa": 32, "mamba": 8})
    fill(p)
    at_p, at_d = both(p, d, 7)
    p.rooms.tick()
    assert at_p.state == BOOTSTRAPPING, "a claim is no room for the pages"
    # Decode has the first two pages already, and with them a part of what prefill sends of the window.
    d.load(at_d, p.address, np.array([9, 3, 4], np.int32), 5, [np.array([6, 7]), [2]], prefix=2)
    assert at_d.state == TRANSFERRING
    p.until(at_p, WAITING)
    assert at_p.prefix_pages == 2
    p.offer(at_p, [11, 12, 20], 1, [[1, 2, 3], np.array([5], np.int64)])
    d.until(at_d, SUCCESS)
    p.until(at_p, SUCCESS)
    assert (d.kv[:, [9, 3, 4]] == p.kv[:, [11, 12, 20]]).all()
    assert all((mine[5] == theirs[1]).all() for mine, theirs in zip(d.rows, p.rows))
    assert (d.states["swa"][:, [6, 7]] == p.states["swa"][:, [2, 3]]).all()
    assert (d.states["mamba"][:, 2] == p.states["mamba"][:, 5]).all()
    assert not d.kv[:, [0, 1, 2, 5]].any(), "nothing else was written"
    assert at_d.completion.bytes == 3 * p.layout.page_bytes + 64 + 128 + 2 * 2 * 24 + 2 * 24
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
    with pytest.raises(ValueError, match="5 pages were sent, 4"):
        chunks.add(ids([13], "pages"))


@pytest.mark.parametrize("by", ["prefill", "decode"])
def test_abort_between_chunks(ranks: Any, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = ranks("prefill"), ranks("decode")
    withdrawn: list[Any] = []
    retract = p.agent.retract
    monkeypatch.setattr(p.agent, "retract", lambda ids, bound: (retract(ids, bound), withdrawn.extend(ids)))
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
        d.rooms.abort(at_d, "the client went")
        d.until(at_d, FAILED)
        chunks.add(ids([2], "pages"))
        p.rooms.offer(at_p, *chunks.offer(None, 1))
        p.until(at_p, FAILED)
        assert "the client went" in at_p.reason
    p.rooms.forget(at_p)
    d.rooms.forget(at_d)
    empty(p, d)


def test_pages_that_are_still_read_end_the_engine(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would write into them, and decode have the wrong bytes."""
    p, d = ranks("prefill"), ranks("decode")
    at_p, at_d = both(p, d, 9)
    d.load(at_d, p.address, [5, 6], 3)
    p.until(at_p, WAITING)
    chunks = Chunks(p.layout, 2, 0)
    chunks.add(ids([1], "pages"))
    p.rooms.offer_partial(at_p, *chunks.partial_offer(ids([1], "pages")))

    def retract(_ids: Any, _timeout_s: float) -> None:
        raise kvconn.KvconnError("still read", code=kvconn.Status.SYSTEM)

    monkeypatch.setattr(p.agent, "retract", retract)
    with pytest.raises(SystemExit, match="still read"):
        p.rooms.abort(at_p, "the client went")
    d.until(at_d, FAILED)


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


def test_one_of_several_ranks_ends_a_request_that_waits(ranks: Any) -> None:
    """It is told once; the other ranks of the prefill engine hear of it."""
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


# -- ends -----------------------------------------------------------------------------------------------------------


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
        if when == "wanted" and by == "decode":
            p.offer(at_p, [1, 2], 1)  # its prefill was under way
        other_side.until(other, FAILED, *([SUCCESS] if when == "offered" else []))
        # Of what is being written prefill may hear by its connection first.
        reasons = ["the client went", *(["does not expect"] if when == "offered" and by == "decode" else [])]
        assert other.state == SUCCESS or any(reason in other.reason for reason in reasons), other.reason
    for each_side, each in ((p, at_p), (d, at_d)):
        each_side.rooms.forget(each)
    empty(p, d)


def empty(*sides: Rank) -> None:
    """No room is left, in Python or in the agent."""
    for side in sides:
        deadline = time.monotonic() + 30
        while side.rooms._owing or side.agent.stats()["outstanding"]:
            side.rooms.tick()
            assert time.monotonic() < deadline, (side.rooms._owing, side.agent.stats())
            time.sleep(0.001)


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
    """Decode has no pages for it, and hears of its end all the same; who is not concerned is loaded when there are some."""
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
    with monkeypatch.context() as patch:  # nothing has happened yet, so that nothing is asked
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
    """A pipeline's stages give pages to what all of them say is ready, and cannot agree any more when one fails alone after that."""
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


# -- bad input ------------------------------------------------------------------------------------------------------


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
    """Two requests of one room came in different order: prefill's is not decode's."""
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
    ("theirs", "says"), [({"layers": range(LAYERS - 1)}, "layer.2.0"), ({"mla": True}, "layer."), ({"states": {"mamba": 8}}, "group")]
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


# -- words ----------------------------------------------------------------------------------------------------------


def test_rank_that_answers() -> None:
    """One of each data parallel rank."""

    def answers(tp: int = 0, pp: int = 0, cp: int = 0, dp: int = 0) -> bool:
        return Parallel(RankOf(tp, 2, pp, 2, dp, 2), cp, 2, "127.0.0.1", 8998, None, None, "").answers

    assert answers() and answers(dp=1)
    assert not (answers(tp=1) or answers(pp=1) or answers(cp=1) or answers(tp=1, dp=1))


def test_names_of_pages() -> None:
    assert page_names(4, 0, [], 0, False) == ["layer.0.0", "layer.1.0", "layer.0.1", "layer.1.1"]
    assert page_names(2, 0, [], 5, True) == ["layer.5.0", "layer.6.0"]
    assert page_names(4, 2, [], 3, False) == ["layer.3.0", "layer.3.1", "draft.0 of 2", "draft.1 of 2"]
    assert page_names(4, 0, [7, 9, 7, 9], 0, False) == ["layer.7.0", "layer.9.0", "layer.7.1", "layer.9.1"]
    with pytest.raises(ValueError, match="3 layer ids for 4"):
        page_names(4, 0, [1, 2, 3], 0, False)


def test_ids() -> None:
    assert list(ids(np.array([[3], [4]], np.int64), "pages")) == [3, 4]
    assert list(ids((), "pages")) == []
    with pytest.raises(ValueError, match="rows hold -2"):
        ids([1, -2], "rows")


def test_addresses() -> None:
    assert bootstrap_address("0.0.0.0", 8998, None) == "127.0.0.1:8998"
    assert bootstrap_address("::", 8998, None) == "[::1]:8998"
    assert bootstrap_address("127.0.0.1", 8998, "10.0.0.7") == "10.0.0.7:8998"


def test_settings_from_the_environment(tmp_path: Any) -> None:
    assert from_environment({}) == {}
    assert from_environment({"KVCONN_SGLANG_CONFIG": '{"lease_s": 5}'}) == {"lease_s": 5}
    file = tmp_path / "kvconn.json"
    file.write_text('{"nats_token": "t", "tcp_port": 9000}')
    extra = from_environment({"KVCONN_SGLANG_CONFIG": str(file)})
    assert server_config("0.0.0.0", 8998, extra) == {
        "role": "bootstrap",
        "bootstrap_host": "0.0.0.0",
        "bootstrap_port": 8998,
        "nats_token": "t",
    }
    config = agent_config("prefill", "/models/tiny/", "float32", 16, RankOf(1, 2), "127.0.0.1:8998", {"kv_layout": "x"}, 300, extra)
    assert config["model"] == "tiny" and config["dtype"] == "float32" and config["tcp_port"] == 9000 and config["tp_rank"] == 1
    secure = agent_config("prefill", "m", "f", 1, RankOf(), "127.0.0.1:8998", {}, 300, {"tls_cert_file": "c", "tls_key_file": "k"})
    assert secure["bootstrap_join"] == "https://127.0.0.1:8998"
    for key, value in (("engine_id", "mine"), ("bootstrap_port", 1), ("tp_size", 2)):
        with pytest.raises(ValueError, match=f"KVCONN_SGLANG_CONFIG sets {key}"):
            agent_config("decode", "m", "f", 1, RankOf(), None, {}, 300, {key: value})
    file.write_text("[1]")
    with pytest.raises(ValueError, match="an object was expected"):
        from_environment({"KVCONN_SGLANG_CONFIG": str(file)})
    with pytest.raises(ValueError, match="KVCONN_SGLANG_CONFIG"):
        from_environment({"KVCONN_SGLANG_CONFIG": "{"})
