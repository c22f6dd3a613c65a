"""Senders and receivers as SGLang's scheduler calls them, over real agents; in the environment of `make e2e-sglang`."""

from __future__ import annotations

import importlib.util
import time
from array import array
from types import SimpleNamespace
from typing import Any, Iterator

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed here: these run in the environment of `make e2e-sglang`", allow_module_level=True)

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_rank import Rank, empty
from sglang_sides import Side, until

import kvconn
from kvconn.sglang.conn import KVConnManager as Manager
from kvconn.sglang.conn import KVConnReceiver, KVConnSender, KVTransferError
from kvconn.sglang.rooms import Inbox
from kvconn.sglang.route import Engine, RouteError, Router


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    p, d = Side("prefill"), Side("decode")
    yield p, d
    d.rank.close()
    p.rank.close()


def test_as_the_schedulers_do_it(sides: tuple[Side, Side]) -> None:
    p, d = sides
    p.rank.kv[:] = 7
    sender, receiver = KVConnSender(p, p.address, 5), KVConnReceiver(d, p.address, 5)
    assert (sender.poll(), receiver.poll()) == (KVPoll.Bootstrapping, KVPoll.Bootstrapping)
    receiver.init(0)
    assert (sender.poll(), receiver.poll()) == (KVPoll.Bootstrapping, KVPoll.WaitingForInput)
    assert receiver.conclude_state is None
    page = p.layout.page_size
    receiver.send_metadata(np.array([4, 5, 6], np.int32), 2, [], decode_prefix_len=page)
    until(sender, KVPoll.WaitingForInput)
    assert sender.pop_decode_prefix_len() == page
    sender.init(3, 1)
    sender.send(np.array([8, 9], np.int32), num_kv_tokens=2 * page)
    assert sender.should_send_kv_chunk(0, True) and not sender.should_send_kv_chunk(0, False)
    sender.send(np.array([10], np.int32), [], num_kv_tokens=1)
    until(sender, KVPoll.Success)
    until(receiver, KVPoll.Success)
    assert (d.rank.kv[:, 4:7] == 7).all() and not d.rank.kv[:, :4].any()
    metric = sender.get_transfer_metric()
    assert metric.transfer_total_bytes == 3 * p.layout.page_bytes + 64 + 128 and metric.transfer_latency_s >= 0
    sender.clear()
    receiver.clear()
    del sender, receiver
    assert (len(p.rooms), len(d.rooms)) == (0, 0)


def test_scheduler_without_a_batch_waits_for_news(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = sides
    monkeypatch.setattr("kvconn.sglang.conn._NEWS_S", 30.0)
    Manager.wait_for_news(SimpleNamespace(rooms=p.rooms, _agent=None))  # no request waits for anything
    sender, receiver = KVConnSender(p, p.address, 5), KVConnReceiver(d, p.address, 5)
    receiver.init(0)
    receiver.send_metadata([4], 1)
    p.wait_for_news()
    assert sender.poll() == KVPoll.WaitingForInput
    sender.init(1, 1)
    sender.send([8], num_kv_tokens=1)
    p.wait_for_news()
    d.wait_for_news()
    assert (sender.poll(), receiver.poll()) == (KVPoll.Success, KVPoll.Success)
    d.rank.agent.close()
    d.wait_for_news()  # says nothing; the next poll does
    with pytest.raises(kvconn.ClosedError):
        receiver.poll()
    sender.clear()


def test_answer_from_before_is_not_a_new_request_s(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill server was asked while it was gone, for a request that failed then; no poll came before the server was back."""
    p, d = sides
    d.router = Router(d.rooms.inbox)
    monkeypatch.setattr("kvconn.sglang.route._GONE_S", 0.0)
    before = KVConnReceiver(d, "127.0.0.1:1", 5)
    before.init(0)
    deadline = time.monotonic() + 30
    while not d.rooms.inbox:
        assert time.monotonic() < deadline, "the question has no answer"
        time.sleep(0.001)

    async def back(_address: str) -> Engine:
        return Engine(page_size=p.layout.page_size, kv_cache_dtype="bfloat16")

    monkeypatch.setattr(d.router, "_ask_engine", back)
    receiver = KVConnReceiver(d, "127.0.0.1:1", 6)
    receiver.init(0)
    assert until(receiver, KVPoll.WaitingForInput, KVPoll.Failed) == KVPoll.WaitingForInput, receiver.room.reason
    assert before.poll() == KVPoll.Failed
    for each in (before, receiver):
        each.abort()
        each.clear()


def test_failure_says_side_rank_room_and_cause(sides: tuple[Side, Side]) -> None:
    p, d = sides
    sender, receiver = KVConnSender(p, p.address, 6), KVConnReceiver(d, p.address, 6)
    receiver.init(0)
    receiver.send_metadata([1], 1)
    until(sender, KVPoll.WaitingForInput)
    sender.abort()
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError, match="prefill, room 6: the request was aborted") as raised:
        sender.failure_exception()
    assert not raised.value.is_from_another_rank and raised.value.bootstrap_room == 6
    until(receiver, KVPoll.Failed)
    with pytest.raises(KVTransferError, match="decode, room 6: the request was aborted"):
        receiver.failure_exception()
    assert d.forgotten == [p.address], "the prefill engine may have been restarted with other options"
    empty(p.rank, d.rank)


def test_request_that_waits_for_pages_fails(sides: tuple[Side, Side]) -> None:
    """A receiver that has no pages yet hears that its prefill has ended."""
    p, d = sides
    sender, receiver = KVConnSender(p, p.address, 6), KVConnReceiver(d, p.address, 6)
    receiver.init(0)
    assert receiver.poll() == KVPoll.WaitingForInput
    sender.abort()
    until(receiver, KVPoll.Failed)
    assert receiver.is_abort_release_safe() and receiver.conclude_state == KVPoll.Failed
    with pytest.raises(KVTransferError, match="decode, room 6: the request was aborted"):
        receiver.failure_exception()
    receiver.send_metadata([1], 1)
    receiver.clear()
    assert d.rooms.failed == 1
    empty(p.rank, d.rank)


def test_prompts_that_differ(sides: tuple[Side, Side]) -> None:
    """The room takes its prompt from the request that SGLang is about to make a sender or receiver for."""
    p, d = sides
    for room, (ours, theirs) in enumerate([([1, 2], [1, 3]), ([1, 2], [1, 2])]):
        p.coming, d.coming = (Req("r", "", array("q", prompt), SamplingParams(), bootstrap_room=room) for prompt in (ours, theirs))
        sender, receiver = KVConnSender(p, p.address, room), KVConnReceiver(d, p.address, room)
        receiver.init(0)
        receiver.send_metadata([1], 1)
        until(sender, KVPoll.WaitingForInput)
        sender.init(1, 1)
        sender.send([2])
        for half in (sender, receiver):
            if ours == theirs:
                assert until(half, KVPoll.Success, KVPoll.Failed) == KVPoll.Success
                continue
            until(half, KVPoll.Failed)
            with pytest.raises(KVTransferError, match="decode asks for another prompt than prefill has"):
                half.failure_exception()
    empty(p.rank, d.rank)


def test_another_rank_failed(sides: tuple[Side, Side]) -> None:
    """The scheduler takes the least of all ranks' states: this rank's pages are held until nothing can land in them."""
    p, d = sides
    receiver = KVConnReceiver(d, p.address, 7)
    receiver.init(0)
    receiver.send_metadata([1], 1)
    assert receiver.poll() == KVPoll.Transferring
    with pytest.raises(KVTransferError, match="decode, room 7: it failed on another rank") as raised:
        receiver.failure_exception()
    assert raised.value.is_from_another_rank
    receiver.ensure_abort_notified(force_arm=True)
    assert receiver.abort_notified and d.rooms._used[7].state != KVPoll.Failed
    deadline = time.monotonic() + 30
    while not d.is_abort_release_safe(7, 0):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert receiver.poll() == KVPoll.Failed and receiver.is_abort_release_safe()
    receiver.clear()
    empty(d.rank)


def test_another_rank_of_prefill_failed(sides: tuple[Side, Side]) -> None:
    """The prefill scheduler gives the pages to other requests right after it has asked for the reason."""
    p, d = sides
    sender, receiver = KVConnSender(p, p.address, 7), KVConnReceiver(d, p.address, 7)
    receiver.init(0)
    until(sender, KVPoll.Bootstrapping)
    sender.init(1, 1)
    sender.send([1])
    assert sender.poll() == KVPoll.Transferring
    with pytest.raises(KVTransferError) as raised:
        sender.failure_exception()
    assert raised.value.is_from_another_rank
    assert not p.rooms.under_way(7) and not p.rooms._owing
    receiver.send_metadata([1], 1)
    until(receiver, KVPoll.Failed)
    empty(p.rank, d.rank)


def test_rank_that_does_not_answer_keeps_a_failure_back(sides: tuple[Side, Side]) -> None:
    """The rank that answers finds the reason meanwhile. If it fails first, this rank's reason is known all the same."""
    p, d = sides
    d.rooms.tell_s = 3600
    halves = []
    for room in (8, 9):
        sender, receiver = KVConnSender(p, p.address, room), KVConnReceiver(d, p.address, room)
        receiver.init(0)
        receiver.send_metadata([room], 1)
        until(sender, KVPoll.WaitingForInput)
        sender.abort()
        d.rank.until(receiver.room, KVPoll.Failed)
        assert receiver.poll() == KVPoll.Transferring and d.is_abort_release_safe(room)
        halves.append((sender, receiver))
    halves[0][1].room.tell_at = 0
    assert (halves[0][1].poll(), halves[1][1].poll()) == (KVPoll.Failed, KVPoll.Transferring)
    for _, receiver in halves:
        with pytest.raises(KVTransferError, match="the request was aborted") as raised:
            receiver.failure_exception()
        assert not raised.value.is_from_another_rank
    empty(p.rank, d.rank)


def test_prefix_that_is_longer_than_the_prompt(sides: tuple[Side, Side]) -> None:
    """The scheduler would neither send the request nor end it: the two engines got different prompts."""
    p, d = sides
    sender, receiver = KVConnSender(p, p.address, 7), KVConnReceiver(d, p.address, 7)
    receiver.init(0)
    page = p.layout.page_size
    receiver.send_metadata([4], 2, [], decode_prefix_len=4 * page)
    until(sender, KVPoll.WaitingForInput)
    sender.init((2 * page - sender.pop_decode_prefix_len() + page - 1) // page, 1)
    assert sender.poll() == KVPoll.Failed and "same prompt" in sender.room.reason
    until(receiver, KVPoll.Failed)
    assert "same prompt" in receiver.room.reason
    sender.clear()
    receiver.clear()
    empty(p.rank, d.rank)


@pytest.mark.parametrize(
    ("engine", "rank", "says"),
    [
        (RouteError("prefill engine at x: nobody answers there"), 0, "nobody answers"),
        (Engine(page_size=1), 0, "--page-size"),
        (Engine(kv_cache_dtype="float8_e4m3fn"), 0, "--kv-cache-dtype"),
        (Engine(dp_size=2), 2, "no rank 2"),
        (Engine(dp_size=2), -1, "no rank -1"),
    ],
)
def test_engine_that_cannot_be_used(engine: Any, rank: int, says: str) -> None:
    d = Side("decode", engine)
    try:
        receiver = KVConnReceiver(d, "127.0.0.1:1", 8)
        receiver.init(rank)
        assert receiver.poll() == KVPoll.Failed and says in receiver.room.reason, receiver.room.reason
        receiver.abort()
        receiver.clear()
        assert says in receiver.room.reason
    finally:
        d.rank.close()


def test_what_is_sent_out_of_order_ends_the_request(sides: tuple[Side, Side]) -> None:
    p, d = sides
    sender = KVConnSender(p, p.address, 10)
    sender.send([1])
    assert sender.poll() == KVPoll.Failed and "before it called init" in sender.room.reason
    receiver = KVConnReceiver(d, p.address, 10)
    receiver.init(0)
    receiver.send_metadata([1], 1, None, decode_prefix_len=p.layout.page_size + 1)
    assert receiver.poll() == KVPoll.Failed and "multiple of the page size" in receiver.room.reason
    host = KVConnReceiver(d, p.address, 11)
    host.init(0)
    host.send_metadata([1], 1, destination="host")
    assert host.poll() == KVPoll.Failed and "not supported" in host.room.reason
    empty(p.rank, d.rank)


def test_router_asks_a_bootstrap_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words of SGLang's own bootstrap server, at kvconn's."""
    host = kvconn.Agent({"role": "bootstrap", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0})
    address = host.bootstrap_address.removeprefix("http://")
    inbox = Inbox()
    router = Router(inbox)
    answers: list[Any] = []

    def answer() -> Any:
        deadline = time.monotonic() + 30
        while not answers:
            assert time.monotonic() < deadline
            if (call := inbox.take()) is not None:
                call(None)
            time.sleep(0.001)
        return answers.pop()

    ranks = []
    try:
        router.tell_dp_rank(address, 4711, 1)
        router.dp_rank(address, 4711, answers.append)
        assert answer() == 1
        info = {"follow_bootstrap_room": False, "kv_layout": "x"}
        more = {"bootstrap_join": host.bootstrap_address, "dp_size": 2, "route_info": info, "block_tokens": 4, "dtype": "bfloat16"}
        router.engine(address, answers.append)  # its ranks are not there yet
        ranks = [Rank("prefill", dp_rank=rank, **{**more, "engine_id": f"sglang-dp{rank}"}) for rank in range(2)]
        engine = Engine(2, False, 4, "bfloat16", "x")
        assert answer() == engine
        router.engine(address, answers.append)  # remembered: at once
        assert answers.pop() == engine
        for rank in ranks:
            rank.close()
        host.close()
        router.engine(address, answers.append)  # and believed still
        assert answers.pop() == engine
        host = kvconn.Agent({"role": "bootstrap", "bootstrap_host": "127.0.0.1", "bootstrap_port": int(address.rpartition(":")[2])})
        ranks = [Rank("prefill", **{**more, "dp_size": 1, "engine_id": "sglang-dp0"})]
        monkeypatch.setattr("kvconn.sglang.route._KNOWN_S", 0)
        router.forget(address)
        for _ in range(2):
            router.engine(address, answers.append)  # not remembered: it may have come back with other ranks
            assert not answers and answer() == Engine(1, False, 4, "bfloat16", "x")
        ranks[0].close()
        host.close()
        router.forget(address)
        router.engine(address, answers.append)
        assert f"prefill engine at {address}: nobody answers" in str(answer())
    finally:
        for rank in ranks:
            rank.close()
        host.close()
