"""Senders and receivers of requests that are prefilled again, and of data parallel ranks; in the environment of `make e2e-sglang`."""

from __future__ import annotations

import importlib.util
import time
from array import array
from typing import Any, Iterator

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed here: these run in the environment of `make e2e-sglang`", allow_module_level=True)

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_rank import Rank, empty
from sglang_sides import Side, until

import kvconn
from kvconn.sglang.conn import KVConnReceiver, KVConnSender
from kvconn.sglang.route import Engine, RouteError


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    p, d = Side("prefill"), Side("decode")
    yield p, d
    d.rank.close()
    p.rank.close()


def test_retracted_request_is_prefilled_again(sides: tuple[Side, Side]) -> None:
    """The room stays, and the prompt has the tokens decoded before. Prefill hears of the turn by a request of SGLang's own making."""
    p, d = sides
    d.router.engine = lambda _address, then: then(Engine(prefill_http_port=30000))
    posted: list[Any] = []
    d.router.prefill_again = lambda address, payload, bound_s, then: posted.append((address, payload, then))
    asked = Req("r", "", array("q", [1, 2]), SamplingParams(), bootstrap_host="127.0.0.1", bootstrap_port=1, bootstrap_room=5)
    for turn in range(3):
        if turn:  # as SGLang's scheduler leaves it behind a pause
            asked.output_ids.append(7)
            asked.pd_rebootstrap_in_progress = True
        d.coming = asked
        receiver = KVConnReceiver(d, p.address, 5)
        receiver.init(0)
        receiver.send_metadata([4 + turn], 1)
        p.coming, rid = asked, "r"
        if turn:
            d.submit_prefill_recompute(receiver, asked.build_rebootstrap_payload())
            address, payload, _ = posted.pop()
            assert address == f"{p.address.rpartition(':')[0]}:30000"
            rid = payload["rid"]
            p.coming = Req(rid, "", array("q", payload["input_ids"]), SamplingParams(), bootstrap_room=payload["bootstrap_room"])
        assert rid.startswith("r")
        sender = KVConnSender(p, p.address, 5)
        until(sender, KVPoll.WaitingForInput)
        p.rank.kv[:] = 1 + turn
        sender.init(1, 1)
        sender.send([8])
        for half in (sender, receiver):
            assert until(half, KVPoll.Success, KVPoll.Failed) == KVPoll.Success, half.room.reason
            half.clear()
        assert (d.rank.kv[:, 4 + turn] == 1 + turn).all()
        del sender, receiver, half
    d.coming = asked
    receiver = KVConnReceiver(d, p.address, 5)
    receiver.init(0)
    receiver.send_metadata([4], 1)
    d.submit_prefill_recompute(receiver, asked.build_rebootstrap_payload())
    posted.pop()[2](RouteError("prefill server at x: it answers 500"))
    until(receiver, KVPoll.Failed)
    assert "it answers 500" in receiver.room.reason
    receiver.clear()
    empty(p.rank, d.rank)


@pytest.mark.parametrize(("size", "asked", "room", "engine"), [(1, 0, 9, "sglang-dp0"), (4, 3, 9, "sglang-dp3"), (2, 0, 9, "sglang-dp1")])
def test_data_parallel_rank(size: int, asked: int, room: int, engine: str) -> None:
    """Decode takes the rank that is asked for, else the rank that the prefill engine names."""
    d = Side("decode", Engine(dp_size=size))
    try:
        receiver = KVConnReceiver(d, "127.0.0.1:1", room)
        receiver.init(asked)
        assert receiver.poll() == KVPoll.WaitingForInput and receiver._engine == engine
        receiver.abort()
        assert receiver.poll() == KVPoll.Failed
    finally:
        d.rank.close()


@pytest.mark.parametrize("loaded", [False, True])
def test_rank_that_does_not_follow_from_the_room(loaded: bool) -> None:
    """Decode claims at the room's rank at once. The answer names another rank, before decode has pages for the request or later."""
    host = kvconn.Agent({"role": "bootstrap", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0})
    more = {"bootstrap_join": host.bootstrap_address, "dp_size": 2}
    ps = [Rank("prefill", dp_rank=rank, engine_id=f"sglang-dp{rank}", **more) for rank in range(2)]
    d = Side("decode", Engine(dp_size=2))
    answers: list[Any] = []
    d.router.dp_rank = lambda _address, _room, then: answers.append(then)
    try:
        receiver = KVConnReceiver(d, host.bootstrap_address.removeprefix("http://"), 4)
        receiver.init(0)
        assert receiver.poll() == KVPoll.WaitingForInput and receiver._engine == "sglang-dp0", "it waits for no answer"
        if loaded:
            receiver.send_metadata([5], 1)
        at_p = ps[1].rooms.open(4)
        ps[1].rooms.announce(at_p)
        ps[1].kv[:] = 9
        answers.pop()(1)
        if not loaded:
            receiver.send_metadata([5], 1)
        deadline = time.monotonic() + 30
        while at_p.state != KVPoll.WaitingForInput:
            assert time.monotonic() < deadline and receiver.poll() == KVPoll.Transferring, receiver.room.reason
            ps[1].rooms.tick()
        ps[1].offer(at_p, [8], 0)
        assert until(receiver, KVPoll.Success, KVPoll.Failed) == KVPoll.Success, receiver.room.reason
        assert (d.rank.kv[:, 5] == 9).all()
        receiver.clear()
        empty(d.rank)
    finally:
        d.rank.close()
        for p in ps:
            p.close()
        host.close()
