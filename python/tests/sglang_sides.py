"""What senders and receivers use of their manager, over ranks without SGLang.

test_sglang_stand_ins.py compares it with the manager itself.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from sglang_rank import Rank

from kvconn.sglang.conn import KVConnManager as Manager
from kvconn.sglang.moments import HostMoments
from kvconn.sglang.route import Engine


class Side(SimpleNamespace):
    """The part of a manager that senders and receivers use, over a rank of sglang_rank."""

    is_abort_release_safe = Manager.is_abort_release_safe
    open_room = Manager.open_room
    submit_prefill_recompute = Manager.submit_prefill_recompute
    wait_for_news = Manager.wait_for_news

    def __init__(self, role: str, engine: Any = None) -> None:
        rank = Rank(role, engine_id="sglang-dp0" if role == "prefill" else "d")
        super().__init__(
            rank=rank,
            coming=None,
            _agent=rank.agent,
            rooms=rank.rooms,
            layout=rank.layout,
            moments=HostMoments(),
            kv_args=SimpleNamespace(page_size=rank.layout.page_size),
            kv_cache_dtype_str="bfloat16",
            kv_layout=None,
            parallel=SimpleNamespace(rank=SimpleNamespace(dp_size=1), answers=True),
            waiting_timeout=30.0,
            forgotten=[],
        )
        engine = engine or Engine(page_size=rank.layout.page_size, kv_cache_dtype="bfloat16")
        self.router = SimpleNamespace(engine=lambda _address, then: then(engine), forget=self.forgotten.append, dp_rank=self.dp_rank)
        self.address = rank.address.removeprefix("http://")

    def dp_rank(self, _address: str, room: int, then: Any) -> None:
        then(room % 2)


def until(half: Any, *states: int) -> int:
    deadline = time.monotonic() + 30
    while (state := half.poll()) not in states:
        assert time.monotonic() < deadline, (state, half.room.reason)
        time.sleep(0.001)
    return state
