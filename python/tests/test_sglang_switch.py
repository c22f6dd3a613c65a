"""Engines that change their roles while they run: SGLang ends a manager, and makes another one over the same pool; in the
environment of `make e2e-sglang`."""

from __future__ import annotations

import importlib.util
import threading
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed here: these run in the environment of `make e2e-sglang`", allow_module_level=True)

from sglang_engine import engine, mha, start
from sglang_sides import until
from test_sglang_start import free_port

import kvconn
from kvconn.sglang.conn import KVConnReceiver, KVConnSender

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
