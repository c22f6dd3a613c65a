"""Engines that change their roles while they run: SGLang ends a manager, and makes another one over the same pool; in the
environment of `make e2e-sglang`."""

from __future__ import annotations

import importlib.util
import threading
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed here: these run in the environment of `make e2e-sglang`", allow_module_level=True)

import like as sglang
from like import like
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_parallel
from sglang_engine import engine, mha, settings, start
from sglang_sides import until
from test_sglang_start import free_port

import kvconn
from kvconn.sglang.conn import KVConnManager, KVConnReceiver, KVConnSender

FAILED, WAITING, SUCCESS = 0, 2, 4


def carry(p: Any, d: Any, address: str, room: int) -> None:
    """A request of two pages, by the calls of both schedulers."""
    for buffer in p.pool.k_buffer + p.pool.v_buffer:
        buffer.fill_(float(room))
    sender, receiver = KVConnSender(p.manager, address, room), KVConnReceiver(d.manager, address, room)
    receiver.init(0)
    assert until(receiver, WAITING, FAILED) == WAITING, receiver.room.reason
    receiver.send_metadata([4, 5], 1, [])
    assert until(sender, WAITING, FAILED) == WAITING, sender.room.reason
    sender.init(2, 1)
    sender.send([2, 3], [])
    for half in (receiver, sender):
        assert until(half, SUCCESS, FAILED) == SUCCESS, half.room.reason
        half.clear()
    page = d.layout.page_size
    for buffer in d.pool.k_buffer + d.pool.v_buffer:
        assert (buffer[4 * page : 6 * page] == float(room)).all()


def asking() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "kvconn-route"]


def test_engines_change_their_roles() -> None:
    before, ports = asking(), (free_port(), free_port())
    pools = mha(0, 2), mha(0, 2)
    with engine(ports[0]) as ranks, engine(ports[1]):
        for turn in range(4):
            first, second = ("prefill", "decode") if turn % 2 == 0 else ("decode", "prefill")
            ranks[:] = [
                start(role, lambda pool=pool: pool, disaggregation_bootstrap_port=port, enable_pd_role_switch=True)
                for role, pool, port in zip((first, second), pools, ports)
            ]
            p, d = ranks if turn % 2 == 0 else ranks[::-1]
            assert p.manager.supports_role_switch
            carry(p, d, f"127.0.0.1:{ports[turn % 2]}", turn + 1)
            assert len(asking()) == len(before) + 1
            for rank in ranks:
                rank.manager.teardown()
            assert asking() == before
            with pytest.raises(kvconn.ClosedError):
                p.manager.rooms.tick()


def test_what_two_engines_compare_is_that_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the model may be others by the time of the change. The weights in memory are those of the start."""
    made: list[Any] = []
    monkeypatch.setattr("kvconn.sglang.start.common_ground", lambda *given: made.append(given) or {"model": f"model {len(made)}"})
    port, scheduler = free_port(), like(sglang.SGLANG_SCHEDULER)
    with engine(port) as ranks:
        for role in ("prefill", "decode", "prefill"):
            ranks[:] = [start(role, lambda: mha(0, 2), scheduler=scheduler, disaggregation_bootstrap_port=port, enable_pd_role_switch=True)]
            ranks[0].manager.teardown()
        assert len(made) == 1
        ranks[:] = [start("decode", lambda: mha(0, 2))]
        assert len(made) == 2, "another engine"


def test_context_parallel_engine_does_not_change_its_role() -> None:
    args = KVArgs()
    args.engine_rank = args.pp_rank = args.system_dp_rank = 0
    refused = pytest.raises(ValueError, match="--enable-pd-role-switch is not supported by kvconn with --attn-cp-size above 1")
    ranks = {"attn_tp_size": 1, "attn_cp_size": 2}
    with settings("prefill", tp=(0, 2), enable_pd_role_switch=True) as server_args, get_parallel().override(**ranks), refused:
        KVConnManager(args, DisaggregationMode.PREFILL, server_args)


def test_engine_that_is_not_a_prefill_engine_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router may not know of the change yet."""
    monkeypatch.setattr("kvconn.sglang.route._READY_S", 0.0)
    port = free_port()
    with engine(port) as ranks:
        p = start("prefill", lambda: mha(0, 2), disaggregation_bootstrap_port=port, enable_pd_role_switch=True)
        ranks.append(start("decode", lambda: mha(0, 2)))
        carry(p, ranks[0], f"127.0.0.1:{port}", 1)
        p.manager.teardown()
        ranks[0].manager.router.forget(f"127.0.0.1:{port}")
        receiver = KVConnReceiver(ranks[0].manager, f"127.0.0.1:{port}", 2)
        receiver.init(0)
        assert until(receiver, WAITING, FAILED) == FAILED
        assert f"prefill engine at 127.0.0.1:{port}: it answers 503" in receiver.room.reason
        receiver.clear()
